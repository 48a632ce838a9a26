"""Reads YAML that is not trusted: files of settings and of placements.

Whole numbers are read only in plain decimal digits. YAML 1.1 also has them in other bases, where
`010` is 8 and `1:30` is 90; such words stay text here, and so do dates. A key must be text or a
whole number and may occur once in a mapping. Tags for other types are refused.

The number of values is bounded before they are built: those of the text, and those that it stands
for where it repeats a part by aliases and merges. A few lines could stand for gigabytes.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

from evenkeel_moe.errors import InvalidInput

MAX_CHARS = 2 << 20
"""Length of the longest text that is read."""
MAX_VALUES = 200_000
"""Most values of a text. A placement of 100 layers x 1000 slots has half as many."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_FORMS: dict[str, tuple[str, tuple[str, ...], Callable[[str], Any]]] = {
    "null": ("~|null|Null|NULL|", ("", *"~nN"), lambda _: None),
    "bool": (
        "yes|Yes|YES|true|True|TRUE|on|On|ON|no|No|NO|false|False|FALSE|off|Off|OFF",
        tuple("yYtToOnNfF"),
        lambda word: word.lower() in ("yes", "true", "on"),
    ),
    "int": ("0|-?[1-9][0-9]{0,99}", tuple("-0123456789"), int),
    "float": (
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)",
        tuple("-+.0123456789"),
        lambda word: float(re.sub(r"\.(?=[in])", "", word)),
    ),
}
"""By type: how its words look, the letters they begin with, and what a word stands for."""


def parse_yaml(text: str, at: str) -> Any:
    """Return what a text holds: mappings, lists, text, numbers, booleans and None.

    Args:
        text: one YAML document.
        at: what errors say before the number of the line, such as `line ` or `settings.yaml:`.

    Raises:
        InvalidInput: the text is no such YAML or too large. The words are about its form and never
            show its content, which may be secret.
    """
    if len(text) > MAX_CHARS:
        raise InvalidInput(f"{at}1: {len(text)} characters, at most {MAX_CHARS} are read")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise InvalidInput(f"{at}{line}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidInput(f"{at}{line}: {error.reason}") from error
    except RecursionError as error:
        line = 1 if loader is None else loader.reached
        raise InvalidInput(f"{at}{line}: nested too deeply") from error


class _Loader(yaml.SafeLoader):
    """Loads YAML as the module describes."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def __init__(self, text: str) -> None:
        self.reached = 1
        """Line of the value that is read, counted from 1."""
        self._values = 0
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.reached = mark.line + 1
        self._values += 1
        if self._values > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES} values", mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag not in (_MERGE, f"{_TAG}str", f"{_TAG}int"):
                problem = "a key must be text or a whole number"
            elif (key.tag, key.value) in seen:
                problem = "a key occurs twice"
            else:
                seen.add((key.tag, key.value))
                continue
            raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, counts: dict[yaml.Node, int | None]) -> int:
        """Return for how many values a node stands. One that it holds itself stands for None."""
        if node in counts:
            known = counts[node]
            if known is None:
                problem = "a value contains itself"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
            return known
        counts[node] = None
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(self._count(each, counts) for each in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(self._count(each, counts) for pair in node.value for each in pair)
        if total > MAX_VALUES:
            problem = f"stands for more than {MAX_VALUES} values by its aliases"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        counts[node] = total
        return total


def _add_type(name: str) -> None:
    """Let the loader know the words of a type, which an explicit tag cannot extend."""
    pattern, first, meaning = _FORMS[name]
    form = re.compile(rf"(?:{pattern})\Z")

    def construct(loader: _Loader, node: yaml.ScalarNode) -> Any:
        word = loader.construct_scalar(node)
        if not isinstance(word, str) or form.match(word) is None:
            problem = f"a value is not written as {name}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return meaning(word)

    _Loader.add_implicit_resolver(f"{_TAG}{name}", form, list(first))
    _Loader.add_constructor(f"{_TAG}{name}", construct)


for _name in _FORMS:
    _add_type(_name)
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])
