"""The page about recordings names every finding."""

import re
from pathlib import Path

from evenkeel_moe.model.finding import FindingCode

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


def test_the_page_names_every_finding():
    section = PAGE.read_text(encoding="utf-8").split("## What is checked")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(FindingCode)
