"""Texts of others without the characters that steer a terminal or reorder what it shows.

Also what people are told of a value that is refused.
"""

import re
from unicodedata import category

_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control, format (zero-width, direction of writing), surrogate, and the
separators of lines and paragraphs."""
_INVISIBLE = frozenset(
    map(
        chr,
        (
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0),  # joiner, fillers, vowels
            *(0x180B, 0x180C, 0x180D, 0x180F, *range(0xFE00, 0xFE10)),  # variation selectors
            *range(0xE0100, 0xE01F0),
        ),
    )
)
"""Other characters that take no place in a line."""
_MOST_MARKS = 2
"""Marks on one character; Vietnamese and Thai need two. More can cover other lines."""
_OTHERS = re.compile(r"[^ -~]+")
_REPLACEMENT = "\ufffd"
_IN_A_LINE = dict.fromkeys("\t\n\r", " ")
_IN_LINES = {char: char for char in "\t\n"}


def printable_line(text: str) -> str:
    """Return a text as one line: blanks for tabs and ends of lines, U+FFFD for other controls.

    Characters without a place in the line, marks without a character and more than two marks on
    one are controls too.
    """
    return _printable(text, _IN_A_LINE)


def printable_lines(text: str) -> str:
    """Return a text with U+FFFD for every such control character but tabs and ends of lines."""
    return _printable(text, _IN_LINES)


def refused(what: str, value: object) -> str:
    """Return what is wrong with a value, with the value if it is no list and no mapping."""
    if value is None or isinstance(value, dict | list):
        return what
    try:
        return f"{what}; it is {printable_line(str(value))[:40]}"
    except ValueError:  # JSON and TOML read longer whole numbers than Python shows.
        return f"{what}; it has thousands of digits"


def _printable(text: str, blanks: dict[str, str]) -> str:
    def shown(found: re.Match[str]) -> str:
        # At the beginning a mark would move to what is shown before the text.
        marks, chars = 0 if found.start() else _MOST_MARKS, []
        for char in found[0]:
            kind = category(char)
            if kind in _CONTROLS or char in _INVISIBLE:
                marks, char = _MOST_MARKS, blanks.get(char, _REPLACEMENT)
            elif kind not in ("Mn", "Me"):
                marks = 0
            elif marks == _MOST_MARKS:
                char = _REPLACEMENT
            else:
                marks += 1
            chars.append(char)
        return "".join(chars)

    return _OTHERS.sub(shown, text)
