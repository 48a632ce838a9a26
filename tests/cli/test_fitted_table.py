from rich.console import Console

from evenkeel_moe.cli.fitted_table import FittedColumn, FittedTable

COLUMNS = (
    FittedColumn("NAME"),
    FittedColumn("LEAST", keep=2),
    FittedColumn("SIZE", right=True, keep=1),
    FittedColumn("TEXT", fold=True, least=10),
)
ROWS = [("alpha", "unimportant", "12", "long text that may take lines")]


def drawn(width, columns=COLUMNS, rows=ROWS):
    console = Console(width=width, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(FittedTable(columns, rows))
    return captured.get().splitlines()


def test_a_wide_terminal_shows_every_column_in_one_line():
    lines = drawn(80)
    assert lines[0].split() == ["NAME", "LEAST", "SIZE", "TEXT"]
    assert len(lines) == 2


def test_the_least_important_columns_are_left_out_first():
    assert drawn(32)[0].split() == ["NAME", "SIZE", "TEXT"]
    assert drawn(20)[0].split() == ["NAME", "TEXT"]
    text = " ".join(line[7:].strip() for line in drawn(20)[1:-3])
    assert " ".join(text.split()) == ROWS[0][3]


def test_columns_that_are_left_out_are_named():
    assert " ".join("".join(drawn(32)[-2:]).split()) == "a wider terminal also shows LEAST"
    assert " ".join("".join(drawn(20)[-3:]).split()) == "a wider terminal also shows LEAST, SIZE"
    assert "wider" not in "".join(drawn(80))


def test_names_are_never_cut():
    for width in range(8, 80):
        assert "alpha" in "".join(drawn(width)).replace("\n", "")


def test_values_below_a_row_use_the_width_of_the_terminal_and_move_no_column():
    columns = (
        FittedColumn("NO"),
        FittedColumn("NAME"),
        FittedColumn("WHY", keep=2, under="NAME", label="why: "),
        FittedColumn("PLAN", keep=1, under="NAME"),
        FittedColumn("TEXT", fold=True, least=10),
    )
    rows = [
        ("1", "a", "the reason takes many words", "a-plan-with-a-long-name", "folded into lines"),
        ("2", "beta", "-", "", "short"),
    ]
    assert [line.rstrip() for line in drawn(40, columns, rows)] == [
        "NO  NAME  TEXT",
        "1   a     folded into lines",
        "      why: the reason takes many words;",
        "      a-plan-with-a-long-name",
        "2   beta  short",
    ]
    assert drawn(20, columns, rows)[1:3] == ["1   a     folded    ", "          into lines"]
