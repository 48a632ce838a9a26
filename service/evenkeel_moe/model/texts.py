"""Texts of others without the characters that steer a terminal or reorder what it shows."""

_CONTROLS = (
    *range(0x20),  # C0
    *range(0x7F, 0xA0),  # DEL and C1
    *(0x061C, 0x200E, 0x200F),  # marks of the direction of writing
    *range(0x202A, 0x202F),  # embeddings and overrides of the direction
    *range(0x2066, 0x206A),  # isolates of the direction
)
_SHOWN = dict.fromkeys(_CONTROLS, "\ufffd")
_IN_A_LINE = _SHOWN | dict.fromkeys(map(ord, "\t\n\r"), " ")
_IN_LINES = {code: shown for code, shown in _SHOWN.items() if chr(code) not in "\t\n"}


def printable_line(text: str) -> str:
    """Return a text as one line: blanks for tabs and ends of lines, U+FFFD for other controls."""
    return text.translate(_IN_A_LINE)


def printable_lines(text: str) -> str:
    """Return a text with U+FFFD for every control character but tabs and ends of lines."""
    return text.translate(_IN_LINES)
