import sys
import unicodedata

from evenkeel_moe.model.texts import printable_line, printable_lines

DIRECTIONS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u061c\u200e\u200f"


def steers(char):
    directed = unicodedata.bidirectional(char) in DIRECTIONS
    return unicodedata.category(char) == "Cc" or directed or char in MARKS


def test_all_controls_are_replaced_and_no_other_character():
    for char in map(chr, range(sys.maxunicode + 1)):
        shown = "\ufffd" if steers(char) else char
        assert printable_line(char) == (" " if char in "\t\n\r" else shown)
        assert printable_lines(char) == (char if char in "\t\n" else shown)
