"""docs/offline.md lists the keys of the file of options. `python -m` this module prints them."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evenkeel_moe.replay.options import CompareOptions, OfflineOptions, SinglePlanOptions

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"
COMMANDS: dict[str, type[BaseModel]] = {
    "`offline`": OfflineOptions,
    "`replay compare`": CompareOptions,
    "`replay plan`": SinglePlanOptions,
}


def rows():
    fields: dict[str, Any] = {}
    for model in COMMANDS.values():
        fields |= model.model_fields
    for name, field in fields.items():
        of = [words for words, model in COMMANDS.items() if name in model.model_fields]
        only = "" if len(of) == len(COMMANDS) else f" ({' and '.join(of)})"
        yield f"| `{name}` | {field.description}{only} |"


def test_the_page_has_a_row_for_each_key():
    text = PAGE.read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing
    table = text.split("| key | meaning |")[1].split("\n\n")[0]
    assert len(table.splitlines()) == 2 + len(list(rows()))


if __name__ == "__main__":
    print("\n".join(rows()))
