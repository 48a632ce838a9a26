"""Translate a Quint model to Python: Quint's own simulator carries out some hundred steps a second.

Quint parses and checks the model and writes it as a tree. This module only writes each node of the
tree as the Python expression that means the same. A test compares both on the same random runs.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.quint.values import OPERATORS, Walk

Node = dict[str, Any]

_INFIX = {
    "and": " and ",
    "or": " or ",
    "actionAll": " and ",
    "iadd": " + ",
    "isub": " - ",
    "eq": " == ",
    "neq": " != ",
}
"""Operators written between their arguments, for speed or because they stop early."""


def load(tree: Path, walk: Walk) -> SimpleNamespace:
    """Return the definitions of the model that `quint parse --out` wrote to `tree`.

    Args:
        tree: path of the JSON file.
        walk: holds the state variable; the model's actions change it.
    """
    modules = json.loads(tree.read_text())["modules"]
    nodes = [node for module in modules for node in module["declarations"]]
    translation = _Translation(nodes)
    lines = [line for node in nodes if node["kind"] == "def" for line in translation.write(node)]
    names: dict[str, Any] = {f"o_{name}": apply for name, apply in OPERATORS.items()}
    names["walk"] = walk
    exec(compile("\n".join(lines), str(tree), "exec"), names)
    return SimpleNamespace(**{name[2:]: value for name, value in names.items() if name[1] == "_"})


class _Translation:
    def __init__(self, nodes: list[Node]) -> None:
        self._variables = {node["name"] for node in nodes if node["kind"] == "var"}
        self._without_arguments = {
            node["name"]
            for node in nodes
            if node["kind"] == "def" and not _is_constant(node) and not _is_lambda(node)
        }

    def write(self, node: Node) -> Iterable[str]:
        """Write a definition of a module."""
        body = node["expr"]
        if _is_constant(node):
            yield f"{_name(node)} = {self._expression(body)}"
            return
        params = body["params"] if _is_lambda(node) else []
        yield f"def {_name(node)}({', '.join(map(_name, params))}):"
        yield from self._statements(body["expr"] if _is_lambda(node) else body, "    ")

    def _statements(self, node: Node, indent: str) -> Iterable[str]:
        # In the body of a function `let` and `if` become statements, which are faster.
        if node["kind"] == "let":
            yield f"{indent}{_name(node['opdef'])} = {self._expression(node['opdef']['expr'])}"
            yield from self._statements(node["expr"], indent)
        elif node.get("opcode") == "ite":
            test, then, otherwise = node["args"]
            yield f"{indent}if {self._expression(test)}:"
            yield from self._statements(then, indent + "    ")
            yield f"{indent}else:"
            yield from self._statements(otherwise, indent + "    ")
        else:
            yield f"{indent}return {self._expression(node)}"

    def _expression(self, node: Node) -> str:
        match node["kind"]:
            case "int" | "str" | "bool":
                return repr(node["value"])
            case "name" if node["name"] in self._variables:
                return "walk.state"
            case "name" if node["name"] in self._without_arguments:
                return f"{_name(node)}()"
            case "name":
                return _name(node)
            case "lambda":
                params = ", ".join(map(_name, node["params"]))
                return f"(lambda {params}: {self._expression(node['expr'])})"
            case "let":
                bound = node["opdef"]
                inner = f"(lambda {_name(bound)}: {self._expression(node['expr'])})"
                return f"{inner}({self._expression(bound['expr'])})"
            case "app":
                return self._application(node["opcode"], node["args"])
        raise ValueError(node["kind"])

    def _application(self, opcode: str, args: list[Node]) -> str:
        values = [self._expression(arg) for arg in args]
        if opcode in _INFIX:
            return f"({_INFIX[opcode].join(values)})"
        match opcode:
            case "ite":
                return f"({values[1]} if {values[0]} else {values[2]})"
            case "field" | "get":
                return f"{values[0]}[{values[1]}]"
            case "contains":
                return f"({values[1]} in {values[0]})"
            case "actionAny":
                return f"walk.any({', '.join(f'lambda: {value}' for value in values)})"
            case "oneOf":
                return f"walk.one_of({values[0]})"
            case "assign":
                return f"walk.assign({values[1]})"
        operator = f"o_{opcode}" if opcode in OPERATORS else f"q_{opcode}"
        return f"{operator}({', '.join(values)})"


def _is_lambda(node: Node) -> bool:
    return bool(node["expr"]["kind"] == "lambda")


def _is_constant(node: Node) -> bool:
    return node["qualifier"] == "pureval" or node["expr"].get("opcode") == "variant"


def _name(node: Node) -> str:
    # The prefix keeps names such as `from` apart from Python's words.
    return f"q_{node['name']}"
