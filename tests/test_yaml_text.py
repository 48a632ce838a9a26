"""YAML that is not trusted."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe import yaml_text
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.yaml_text import MAX_CHARS, parse_yaml


def test_values_are_those_of_the_module():
    text = """
    a: [1, -5, 0, 1.5, 1e3, .inf, yes, Off, ~, null, "5", word]
    b: &b {k: 1, l: 2}
    c: {<<: *b, k: 3}
    4: *b
    d:
    """
    assert parse_yaml(text, "line ") == {
        "a": [1, -5, 0, 1.5, 1000.0, math.inf, True, False, None, None, "5", "word"],
        "b": {"k": 1, "l": 2},
        "c": {"k": 3, "l": 2},
        4: {"k": 1, "l": 2},
        "d": None,
    }
    assert math.isnan(parse_yaml(".nan", ""))
    assert parse_yaml("", "") is None


@pytest.mark.fault(
    "a user whose YAML had an expert 010 or 1:30", "it was read as another number, 8 or 90"
)
@pytest.mark.parametrize(
    "word", ["010", "0x10", "0b1", "1:30", "1_000", "+5", "2026-01-02", "1:30.5", "-0"]
)
def test_numbers_of_other_forms_stay_text(word):
    assert parse_yaml(f"a: {word}", "") == {"a": word}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [", "line 2: expected the node content"),
        ("a: 1\nb: \0", "line 2: special characters are not allowed"),
        ("a: 1\nb: 1\na: 2", "line 3: a key occurs twice"),
        ("3: 1\n'3': 1\n3: 2", "line 3: a key occurs twice"),
        ("1.0: 1", "line 1: a key must be text or a whole number"),
        ("? [1]\n: 2", "line 1: a key must be text or a whole number"),
        ("a: !!int '0x10'", "line 1: a value is not written as int"),
        ("a: !!float '1:30.5'", "line 1: a value is not written as float"),
        ("a: !!null x", "line 1: a value is not written as null"),
        ("a: !!timestamp x", "line 1: could not determine a constructor"),
        ("!!python/object:os.system a", "line 1: could not determine a constructor"),
        ("a: &a [*a]", "line 1: a value contains itself"),
        ("a: &a {<<: *a}", "line 1: a value contains itself"),
        ("a: {<<: 3}", "line 1: expected a mapping or list of mappings"),
        ("a: *b", "line 1: found undefined alias"),
        ("a: 1\n---\nb: 2", "line 2: but found another document"),
        ("\n" + "- " * 2000, "line 2: nested too deeply"),
        ("#" * MAX_CHARS + "#", f"line 1: {MAX_CHARS + 1} characters, at most {MAX_CHARS}"),
    ],
)
def test_other_text_is_refused_with_its_line_and_without_its_content(text, words):
    with pytest.raises(InvalidInput, match=words):
        parse_yaml(text, "line ")


def test_values_are_counted_before_they_are_built(monkeypatch):
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 100)
    assert parse_yaml("- 1\n" * 99, "") == [1] * 99
    with pytest.raises(InvalidInput, match="^line 100: more than 100 values"):
        parse_yaml("- 1\n" * 100, "line ")
    with pytest.raises(InvalidInput, match="^line 2: stands for more than 100 values"):
        parse_yaml("- &a [1, 2, 3]\n- [" + "*a, " * 30 + "]", "line ")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(values)
def test_what_yaml_writes_is_read_back(value):
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=True), "") == value
