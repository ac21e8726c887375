"""Statements that compare a value with a literal, as most tests of code do: `assert f(2) == 4`.

    assert EXPRESSION == LITERAL ─▶ the sandbox evaluates EXPRESSION and sends its value ─▶ compared here

So the literal never enters the sandbox, and a class of the code's that equals everything equals nothing here.
"""

import ast
import json
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Comparison = Callable[[Any, Any], bool]
_COMPARISONS: dict[type[ast.cmpop], Comparison] = {
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, literal: value in literal,
}


@dataclass(frozen=True, slots=True)
class Assertion:
    """One comparison of a statement."""

    expression: str
    """Its left side, which names what the code defines."""
    comparison: Comparison
    literal: Any
    """Its right side."""


def read_assertions(statement: str) -> list[Assertion]:
    """Returns the comparisons of a statement of nothing else; an empty list for any other statement."""
    try:
        body = ast.parse(textwrap.dedent(statement)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [_read_assertion(one) for one in body]
    assertions = [one for one in found if one is not None]
    return assertions if len(assertions) == len(found) else []


def _read_assertion(statement: ast.stmt) -> Assertion | None:
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
        return None
    test = statement.test
    comparison = _COMPARISONS.get(type(test.ops[0]))
    if len(test.ops) > 1 or comparison is None:
        return None
    left, right = _read_literal(test.left), _read_literal(test.comparators[0])
    if isinstance(right, ast.expr) and not isinstance(left, ast.expr) and comparison is operator.eq:
        left, right = right, left
    if not isinstance(left, ast.expr) or isinstance(right, ast.expr):
        return None
    return Assertion(ast.unparse(left), comparison, right)


def _read_literal(node: ast.expr) -> Any:
    """Returns the value of a literal; any other expression as it is."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return node


def hold_assertions(assertions: Sequence[Assertion], output: bytes) -> bool:
    """True when the values that the sandbox has sent, as JSON of Python literals, compare as they must."""
    try:
        values = [ast.literal_eval(text) for text in json.loads(output)]
        return len(values) == len(assertions) and all(
            bool(one.comparison(value, one.literal)) for one, value in zip(assertions, values, strict=True)
        )
    # The code may have written there too.
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
