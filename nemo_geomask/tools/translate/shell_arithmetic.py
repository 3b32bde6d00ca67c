"""Arithmetic of the shell, ``$((…))``, on integers of 64 bits."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

_MAX_CHARACTERS = 1000
_MAX_VALUE = 2**63
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: math.trunc(Fraction(a, b)),  # a shell rounds toward 0
    ast.Mod: lambda a, b: a - b * math.trunc(Fraction(a, b)),
}


def evaluate_arithmetic(expression: str) -> int | None:
    """Return the value of an expression; None if it is not one of integers, or too long or too large."""
    expression = expression.strip()
    if len(expression) > _MAX_CHARACTERS:
        return None
    try:
        return _integer(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_integer(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_integer(left), _integer(right))
        case _:
            raise ValueError("not an arithmetic expression of integers")
    if abs(result) >= _MAX_VALUE:
        raise ValueError("not an integer of 64 bits")
    return result
