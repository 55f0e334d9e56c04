"""A condition on layouts as typed, such as "tp<=8 and pp>1" -> a test of a layout; nothing else can be said in it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from llmprof.errors import RequestError
from llmprof.schema.layout import Layout

Condition = Callable[[Layout], bool]
_NAMES = (*(field.name for field in fields(Layout)), "gpus")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mod: operator.mod,
}  # fmt: skip
_LONGEST = 500
_HINT = f"""compare {", ".join(_NAMES)} with numbers or quoted words, joined by and, or, not, such as "tp<=8 and pp>1" """


def read_condition(text: str) -> Condition:
    """The condition of a text.

    Raises:
        RequestError: it says something that is no condition on a layout.
    """
    try:
        if len(text) > _LONGEST:
            raise SyntaxError(f"longer than {_LONGEST} characters")
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RequestError(f"--where {text[:80]!r} cannot be read", hint=_HINT.strip()) from error
    _value(tree, Layout())  # says at once what is wrong with it

    def holds(layout: Layout) -> bool:
        return bool(_value(tree, layout))

    return holds


def _value(node: ast.expr, layout: Layout) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return getattr(layout, name)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, layout)
        case ast.BoolOp(op=op, values=parts):
            values = [bool(_value(part, layout)) for part in parts]
            return all(values) if isinstance(op, ast.And) else any(values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _applied(_ARITHMETIC[type(op)], node, _value(left, layout), _value(right, layout))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            values = [_value(part, layout) for part in (left, *others)]
            return all(
                _applied(_COMPARISONS[type(op)], node, a, b)
                for op, a, b in zip(ops, values, values[1:], strict=False)
            )
    raise RequestError(f"--where: {ast.unparse(node)[:80]!r} is no condition on a layout", hint=_HINT.strip())


def _applied(function: Callable[[Any, Any], Any], node: ast.expr, a: Any, b: Any) -> Any:
    if isinstance(a, str) != isinstance(b, str) or (isinstance(a, str) and type(node) is ast.BinOp):
        raise RequestError(
            f"--where: {ast.unparse(node)[:80]!r} sets a word against a number", hint=_HINT.strip()
        )
    try:
        return function(a, b)
    except ZeroDivisionError as error:
        raise RequestError(f"--where: {ast.unparse(node)[:80]!r} divides by 0", hint=_HINT.strip()) from error
