"""Renders the runbooks as pages that every controller serves under `/runbooks/`.

`setup.py` does so when the package is built or installed, and `make deploy-files` after a change.

An alert's `runbook_url` then opens a page that belongs to the version that runs, also in a cluster
without internet.
"""

import html
import posixpath
import shutil
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["PAGES", "write_pages"]

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "docs" / "runbooks"
PAGES = ROOT / "service" / "evenkeel_moe" / "console" / "runbooks"

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Evenkeel</title>
<link rel="icon" href="../console/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="../console/base.css">
<link rel="stylesheet" href="../console/runbooks.css">
</head>
<body>
<header class="top"><a class="brand" href="../"><img src="../console/icon.svg" alt="" width="26" \
height="26">Evenkeel</a><a href="README.md">All runbooks</a></header>
<main class="runbook">
{body}</main>
</body>
</html>
"""


def write_pages() -> None:
    """Write a page for each alert, and README with all of them; remove what is left of others.

    Raises:
        FileNotFoundError: the runbooks are not there.
    """
    served = {source.name for source in SOURCES.iterdir() if source.suffix == ".md"}
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    for name in sorted(served):
        page = _page((SOURCES / name).read_text(encoding="utf-8"), served)
        (PAGES / name).with_suffix(".html").write_text(page, encoding="utf-8")


def _page(text: str, served: set[str]) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[tokens.index(token) + 1].content))
        if token.children:
            token.children = _without_dead_links(token.children, served)
    title = next(token.content for token in tokens if token.type == "inline")
    body = markdown.renderer.render(tokens, markdown.options, {})
    return _PAGE.format(title=html.escape(title), body=body)


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _without_dead_links(children: list[Token], served: set[str]) -> list[Token]:
    """Replace each link to a file that is not served by its name in the repository."""
    kept: list[Token] = []
    name = ""
    for child in children:
        if child.type == "link_open":
            target = str(child.attrGet("href")).partition("#")[0]
            outside = target and target not in served and "://" not in target
            name = posixpath.normpath(f"docs/runbooks/{target}") if outside else ""
        if not (name and child.type in ("link_open", "link_close")):
            kept.append(child)
        elif child.type == "link_close":
            kept += [
                Token("text", "", 0, content=" ("),
                Token("code_inline", "code", 0, content=name),
                Token("text", "", 0, content=")"),
            ]
            name = ""
    return kept
