"""Exact arithmetic on text from a policy. Nothing but numbers and operators is ever carried out."""

import ast
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction

MAX_TEXT = 200
"""Characters of an expression."""
MAX_BITS = 4096
"""Bits of a numerator or denominator, on the way and in the end."""
MAX_DIGITS = 12
"""Digits behind the point of a result that has more."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def compute_expression(text: str) -> str:
    """Returns the value of an expression of numbers, + - * / // % ** and parentheses.

    Raises ValueError that says what is wrong with it.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"an expression must have at most {MAX_TEXT} characters, got {len(text)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return write_number(_compute_node(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an expression: {text!r}") from None


def write_number(number: Fraction) -> str:
    """Writes a number exactly where its decimals end within MAX_DIGITS, else rounded to as many."""
    if number.denominator == 1:
        return str(number.numerator)
    scaled = round(abs(number) * 10**MAX_DIGITS)
    whole, decimals = divmod(scaled, 10**MAX_DIGITS)
    sign = "-" if number < 0 and scaled else ""
    return f"{sign}{whole}.{decimals:0{MAX_DIGITS}d}".rstrip("0").rstrip(".")


def _compute_node(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            raise ValueError(f"only numbers are known, got {node.value!r}")
        case ast.Constant(value=int() | float() as value):
            if abs(value) == float("inf"):
                raise ValueError("a number is too large")
            return _check_size(Fraction(str(value)))
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_compute_node(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return _raise_to_power(_compute_node(node.left), _compute_node(node.right))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _check_size(_BINARY[type(node.op)](_compute_node(node.left), _compute_node(node.right)))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses are known, got {type(node).__name__}")


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"an exponent must be a whole number, got {write_number(exponent)}")
    if abs(exponent) * _count_bits(base) > MAX_BITS:
        raise ValueError("the result is too large")
    return Fraction(base ** int(exponent))


def _check_size(number: Fraction) -> Fraction:
    if _count_bits(number) > MAX_BITS:
        raise ValueError("the result is too large")
    return number


def _count_bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())
