from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.cli.options import nested_fields, parse_value


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size.

    Args:
        width: Number of columns.
        height: Number of rows, of which some
            may be empty. Default: as many as columns.
    """

    width: Annotated[int, typer.Option("--width", "-w", min=1)]
    height: int | None = None


def test_a_group_of_options_reaches_the_command_as_one_argument():
    app = CommandGroup(rich_markup_mode=None)

    @app.command()
    def draw(name: Annotated[str, typer.Argument()], *, size: Size, bold: bool = False) -> None:
        """Draw a box.

        Args:
            name: Name of the box.
            bold: Draw thick lines.
        """
        typer.echo(f"{name} {size} {bold}")

    result = CliRunner().invoke(app, ["box", "-w", "5", "--bold"])
    assert result.stdout == "box Size(width=5, height=None) True\n"
    assert CliRunner().invoke(app, ["box"]).exit_code == 2
    assert CliRunner().invoke(app, ["box", "-w", "0"]).exit_code == 2
    words = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=300).output.split())
    assert "Draw a box. Arguments:" in words
    assert "Name of the box." in words
    assert "--height <int> Number of rows, of which some may be empty." in words
    assert "[default: (as many as columns)]" in words
    assert "--bold Draw thick lines." in words


def test_values_are_json_or_text():
    assert parse_value("a=1") == ("a", 1)
    assert parse_value("a=null") == ("a", None)
    assert parse_value("mode=auto") == ("mode", "auto")
    assert parse_value("a=b=c") == ("a", "b=c")
    for text in ("9" * 5000, "[" * 100_000):
        assert parse_value(f"a={text}") == ("a", text)
    with pytest.raises(CliError, match="=1 names no field; write KEY=VALUE"):
        parse_value("=1")
    with pytest.raises(CliError, match="cost has no value; write cost=VALUE"):
        parse_value("cost")


def test_dotted_keys_name_fields_of_objects():
    pairs = [("mode", "auto"), ("a.b", 1), ("a.c.d", None), ("e", {"f": 2}), ("e.g", 3)]
    assert nested_fields(pairs) == {
        "mode": "auto",
        "a": {"b": 1, "c": {"d": None}},
        "e": {"f": 2, "g": 3},
    }
    for wrong in ([("a", 1), ("a.b", 2)], [("a.b", 1), ("a", 2)], [("a..b", 1)], [(".", 1)]):
        with pytest.raises(CliError, match="given twice|a value already|is empty"):
            nested_fields(wrong)
