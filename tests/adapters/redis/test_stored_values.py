"""Single values of stored JSON: each reader takes its own form up to its bounds, and no other."""

import json
import math

import pytest

from evenkeel_moe.adapters.redis import stored_values as stored

LONGEST, LARGEST = "x" * (1 << 16), (1 << 63) - 1
TAKEN = [
    (stored.text, ["", "é", LONGEST]),
    (stored.optional_text, [None, "", LONGEST]),
    (stored.number, [0, -1, 0.5, 1 << 62, -(1 << 62), 1e300]),
    (stored.optional_number, [None, 0, -0.5]),
    (stored.whole, [0, 1, LARGEST]),
    (stored.flag, [True, False]),
    (stored.numbers, [{}, {"a": 1, "b": -math.inf}]),
    (stored.mapping, [{}, {"a": [1]}]),
]
NO_NUMBERS = [True, "1", [], {}, LARGEST + 1, -LARGEST - 1, 10**400, math.inf, math.nan]
REFUSED = [
    (stored.text, [None, 1, ["a"], LONGEST + "x"]),
    (stored.optional_text, [1, {}, LONGEST + "x"]),
    (stored.number, [None, *NO_NUMBERS]),
    (stored.optional_number, NO_NUMBERS),
    (stored.whole, [None, True, 0.0, "1", -1, LARGEST + 1]),
    (stored.flag, [None, 0, 1, "true"]),
    (stored.numbers, [None, [], {"a": None}, {"a": 1, "b": True}, {"a": LARGEST + 1}]),
    (stored.mapping, [None, [], "a", [["a", 1]]]),
]


@pytest.mark.parametrize("read, values", TAKEN)
def test_a_value_of_the_right_form_is_returned(read, values):
    for value in values:
        found = read(value)
        assert found == value and (found is None) == (value is None)
    for kept in (stored.number(3), stored.numbers({"a": 3})["a"]):
        assert isinstance(kept, float)


@pytest.mark.parametrize("read, values", REFUSED)
def test_a_value_of_another_form_is_refused(read, values):
    for value in values:
        with pytest.raises(ValueError, match=r" is (not|neither) | which is not a number"):
            read(value)


@pytest.mark.parametrize("begin, end", [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_value_has_at_most_64_levels_of_nesting(begin, end):
    deepest = 63 * begin + b"1" + 63 * end  # The number is one level more.
    assert stored.parse_json(deepest) == json.loads(deepest)
    for depth in (64, 100, 30_000):
        with pytest.raises(ValueError, match="nested"):
            stored.parse_json(depth * begin + b"1" + depth * end)


@pytest.mark.parametrize("data", [b'"\\ud800"', b'["\\ud800"]', b'{"\\ud800": 1}', b"[1"])
def test_what_is_not_json_or_cannot_be_encoded_is_refused(data):
    with pytest.raises(ValueError):
        stored.parse_json(data)
    with pytest.raises(ValueError):
        stored.text("\ud800")


def test_json_may_have_as_many_bytes_and_values_as_are_allowed_and_not_one_more():
    assert stored.parse_json(b"[1,2]", most_bytes=5, most_values=3) == [1, 2]
    with pytest.raises(ValueError, match="5 bytes of JSON, at most 4"):
        stored.parse_json(b"[1,2]", most_bytes=4)
    with pytest.raises(ValueError, match="up to 3 JSON values, at most 2"):
        stored.parse_json(b"[1,2]", most_values=2)
    # Commas inside texts do not count.
    assert stored.parse_json(b'["a,b,c"]', most_values=2) == ["a,b,c"]
    with pytest.raises(ValueError, match="up to 2 JSON values, at most 1"):
        stored.parse_json(b'["a,b,c"]', most_values=1)


def test_texts_of_a_value_larger_than_a_document_are_not_searched_for():
    large = b'["' + b"," * stored.DOCUMENT_BYTES + b'"]'
    with pytest.raises(ValueError, match=r"up to \d{7} JSON values"):
        stored.parse_json(large, most_bytes=2 * len(large), most_values=2)
