"""The measured part of docs/gpu.md: one block for each part of the report, kept by device.

Figures of a GPU are replaced by later figures of a GPU only. What ran on a CPU says so.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

BEGIN = "<!-- gpu-report begins: `make gpu-report` replaces the text up to its end -->"
END = "<!-- gpu-report ends -->"
NOTHING = "Nothing has been measured on a GPU yet."
ON_CPU = (
    "**Ran on a CPU, with small sizes. It shows that the code runs; the times say nothing about a"
    " GPU.**"
)
_BLOCK = re.compile(
    r"<!-- part (?P<name>[\w-]+) on (?P<kind>cpu|gpu) -->\n(?P<text>.*?)"
    r"(?=<!-- part |<!-- gpu-report ends)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """The text of one part, without its marker."""

    on_gpu: bool
    text: str


def read_blocks(page: str) -> dict[str, Block]:
    """Return the blocks of a page by the name of their part; empty if it has none."""
    return {
        found["name"]: Block(found["kind"] == "gpu", found["text"].strip())
        for found in _BLOCK.finditer(page)
    }


def merged(old: Mapping[str, Block], new: Mapping[str, Block]) -> dict[str, Block]:
    """Return the blocks of a page after a run; a block of a GPU stays if the new one is a CPU's."""
    kept = {name for name, block in old.items() if block.on_gpu}
    return {
        **old,
        **{name: block for name, block in new.items() if block.on_gpu or name not in kept},
    }


def written(page: str, blocks: Mapping[str, Block]) -> str:
    """Return a page with the blocks between the markers, or at its end if it has no markers."""
    parts = [
        f"<!-- part {name} on {'gpu' if block.on_gpu else 'cpu'} -->\n{block.text}\n"
        for name, block in blocks.items()
    ]
    if not any(block.on_gpu for block in blocks.values()):
        parts.insert(0, f"{NOTHING}\n")
    body = "\n".join([BEGIN, "", *parts, END])
    before, begins, rest = page.partition(BEGIN)
    if not begins:
        return f"{page.rstrip()}\n\n{body}\n" if page.strip() else f"{body}\n"
    _, ends, after = rest.partition(END)
    if not ends:
        raise ValueError(f"the page has {BEGIN!r} and no {END!r}")
    return f"{before}{body}{after}"
