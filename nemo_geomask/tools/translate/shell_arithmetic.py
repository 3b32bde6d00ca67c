"""Arithmetic of the shell, ``$((…))``, on integers of 64 bits."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_MAX_CHARACTERS = 1000
_MAX_VALUE = 2**63


def evaluate_arithmetic(expression: str) -> int | None:
    """Return the value of an expression; None if it is not one of integers, or too long or too large."""
    expression = expression.strip()
    if len(expression) > _MAX_CHARACTERS:
        return None
    try:
        return _integer(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _quotient(dividend: int, divisor: int) -> int:
    """Return the quotient rounded toward 0, as a shell rounds it."""
    magnitude = abs(dividend) // abs(divisor)
    return magnitude if (dividend < 0) == (divisor < 0) else -magnitude


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def _integer(node: ast.expr) -> int:
    value: int | None = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_integer(node.left), _integer(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_integer(node.operand)
    if value is None or abs(value) >= _MAX_VALUE:
        raise ValueError("not an arithmetic expression of integers of 64 bits")
    return value


def _power(base: int, exponent: int) -> int:
    if exponent < 0 or (abs(base) > 1 and exponent > 63):
        raise ValueError("not an integer of 64 bits")
    return int(base ** (exponent if abs(base) > 1 else min(exponent, 2 + exponent % 2)))
