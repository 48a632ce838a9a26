"""Small wrong changes of a module, made one at a time in its syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {
    **{ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SKIPPED = {"annotation", "returns", "defaults", "exc", "cause"}
"""Fields without behaviour of their own; texts of errors are not judged."""
_LARGEST = 8
"""Larger numbers are limits and times, in which one more or less makes no difference."""
_REMOVED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, eq=False)
class Change:
    """One changed statement of a module."""

    scope: str
    """Class and function of the statement."""
    line: int
    before: str
    """First line of the statement."""
    after: str
    code: CodeType
    """The whole module with this change."""


def changes(source: str, filename: str) -> Iterator[Change]:
    """Yield every change in a function of a module, in the order of its text."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in [("", tree.body), *((f"{node.name}.", node.body) for node in classes)]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _below(tree, node, "body", node, prefix + node.name, filename)


def _below(
    tree: ast.Module, node: ast.AST, field: str, statement: ast.stmt, scope: str, filename: str
) -> Iterator[Change]:
    value = getattr(node, field)
    for index, child in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(child, ast.AST) or _is_text(child):
            continue
        around = child if isinstance(child, ast.stmt) else statement
        for new in _replacements(child, field):
            ast.fix_missing_locations(ast.copy_location(new, child))
            before = _header(around)
            _put(node, field, index, new)
            after = _header(new if isinstance(new, ast.stmt) else around)
            code = compile(tree, filename, "exec")
            _put(node, field, index, child)
            yield Change(scope, around.lineno, before, after, code)
        for name in child._fields:
            if name not in _SKIPPED:
                yield from _below(tree, child, name, around, scope, filename)


def _put(node: ast.AST, field: str, index: int, child: ast.AST) -> None:
    if isinstance(getattr(node, field), list):
        getattr(node, field)[index] = child
    else:
        setattr(node, field, child)


def _is_text(node: ast.AST) -> bool:
    """Return True for docstrings, formatted text, assertions and log lines."""
    if isinstance(node, ast.Expr):
        called = ast.unparse(node)
        return isinstance(node.value, ast.Constant) or called.startswith(("_log.", "assert_never("))
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # Only a bug of ours lets it raise, like an assertion.
    return isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)


def _header(statement: ast.stmt) -> str:
    return ast.unparse(statement).split("\n", 1)[0]


def _replacements(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node."""
    if field in ("test", "ifs") and isinstance(node, ast.Name | ast.Attribute | ast.Call):
        yield ast.UnaryOp(ast.Not(), node)
    match node:
        case ast.Compare(left=left, ops=ops, comparators=values):
            for place, op in enumerate(ops):
                for table in (_OPPOSITE, _BOUNDARY):
                    if type(op) in table:
                        other = [*ops[:place], table[type(op)](), *ops[place + 1 :]]
                        yield ast.Compare(left, other, values)
        case ast.BoolOp(op=op, values=values):
            for place in range(len(values)):
                kept = [*values[:place], *values[place + 1 :]]
                yield kept[0] if len(kept) == 1 else ast.BoolOp(op, kept)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield ast.BinOp(left, ast.Add(), right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)) if abs(value) <= _LARGEST:
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Name(id=name) if field == "func" and name in _NAMES:
            yield ast.Name(_NAMES[name], ast.Load())
        case ast.Return(value=ast.Constant(value=None | False) | ast.List(elts=[])):
            pass
        case ast.Return(value=ast.expr()):
            yield ast.Return(None)
        case ast.Expr() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case _ if isinstance(node, _REMOVED):
            yield ast.Pass()
