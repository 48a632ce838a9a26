import sys
import unicodedata

import pytest

from evenkeel_moe.model.texts import printable_line, printable_lines, refused

forged = pytest.mark.fault(
    "an operator", "words of a rank forged a line of `evenkeel status` in a pipe"
)
INVISIBLE = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),
    *map(chr, range(0xE0100, 0xE01F0)),
}
"""Characters that Unicode calls ignorable by default, though their category is of visible ones."""


def steers(char):
    """Return True for a character that moves the cursor, ends a line or takes no place in it."""
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in INVISIBLE


@forged
def test_all_controls_are_replaced_and_no_other_character():
    for char in map(chr, range(sys.maxunicode + 1)):
        shown = "\ufffd" if steers(char) else char
        assert printable_line(f"a{char}") == "a" + (" " if char in "\t\n\r" else shown)
        assert printable_lines(f"a{char}") == "a" + (char if char in "\t\n" else shown)


@forged
@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85"]
)
def test_nothing_but_an_end_of_line_ends_a_line(end):
    assert printable_line(f"a{end}b").splitlines() == ["a\ufffdb"]
    assert printable_lines(f"a{end}b\nc").splitlines() == ["a\ufffdb", "c"]


@forged
@pytest.mark.parametrize("mark", ["\u0301", "\u0489", "\u0e49", "\u20dd", "\U0001e8d0"])
def test_marks_are_not_stacked_and_not_put_on_what_stands_before_a_text(mark):
    assert printable_line(f"e{mark}") == f"e{mark}"
    assert printable_line(f"e{mark * 2}e{mark * 2}") == f"e{mark * 2}e{mark * 2}"
    assert printable_lines(f"e{mark * 200}.") == f"e{mark * 2}" + "\ufffd" * 198 + "."
    assert printable_line(f"{mark}e") == "\ufffde"
    assert printable_line(f"a\n{mark}e") == "a \ufffde"
    assert printable_line(f"e{mark}\u200b{mark}") == f"e{mark}\ufffd\ufffd"


def test_texts_of_all_languages_stay():
    for words in (
        "Tiếng Việt",
        "Tie\u0302\u0301ng Vie\u0323\u0302t",
        "ภาษาไทย นี้",
        "עִבְרִית",
        "日本語　中文",
        "é🙂",
    ):
        assert printable_line(words) == words == printable_lines(words)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "wrong; it is -1"),
        ("x" * 50, f"wrong; it is {'x' * 40}"),
        ("a\nb\x1b", "wrong; it is a b\ufffd"),
        (10**5000, "wrong; it has thousands of digits"),
        (None, "wrong"),
        ([1], "wrong"),
        ({"token": "secret"}, "wrong"),
    ],
    ids=lambda value: str(type(value)),
)
def test_a_refusal_names_the_value_on_one_line(value, text):
    assert refused("wrong", value) == text
