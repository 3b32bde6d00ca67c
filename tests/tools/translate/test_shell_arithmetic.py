"""Arithmetic of the shell: that of 64 bits, with quotients rounded toward 0; anything else has no value."""

import pytest

from nemo_geomask.tools.translate.shell_arithmetic import evaluate_arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" 1024 * 8 + 2 ", 8194),
        ("-(3 - 5)", 2),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("7 / -2", -3),
        ("-7 % 3", -1),
        ("7 % -3", 1),
        ("9007199254740993 / 1", 9007199254740993),  # 2**53 + 1 is no float64
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_values_are_those_of_a_shell(expression, value):
    assert evaluate_arithmetic(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "PROMPT", "a.b", "'1' * 3", "True", "1.5", "1 // 2", "1 < 2", "+", "f(1)", "1 / 0", "1 % 0", "2 ** 4",
        "9223372036854775808", "9223372036854775807 * 9223372036854775807", "1+" * 600 + "1",
        "1\0"
    ]
)  # fmt: skip
def test_what_is_no_arithmetic_of_64_bits_has_no_value(expression):
    assert evaluate_arithmetic(expression) is None
