"""Rules from the table ``requirements.toml``: settings that need others, or have to be within bounds."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl.source_words import is_in_source
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import changed_keys, nearest_to_user
from nemo_geomask.yaml_text import as_yaml, inline_yaml

_TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("requirements.toml").read_text(encoding="utf-8")
)
_COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "is not above"),
    "least": (operator.ge, "is below"),
    "below": (operator.lt, "is not below"),
    "most": (operator.le, "exceeds"),
    "divides": (lambda number, total: number <= 0 or total % number == 0, "does not divide"),
}
"""Comparison of a number with its bound, and what to say where it is false."""
_NULL = {"set": False}
_LARGEST_NUMBER = 10**30  # no setting is larger


def _value(key: str, facts: RecipeFacts) -> Any:
    section, _, name = key.partition(".")
    if section == "facts":
        return getattr(facts, name)
    has_field = section == "loss_fn" and facts.has_config and hasattr(facts.config, name)
    return getattr(facts.config, name) if has_field else facts.get(key)


def _number(key: str | float, facts: RecipeFacts) -> float | None:
    """Return the number at a key, or a number itself; None if there is none, or one that no setting has."""
    value = _value(key, facts) if isinstance(key, str) else key
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER
    return value if is_number else None


def _meets(key: str, required: Any, facts: RecipeFacts) -> bool | None:
    """Return True if a setting is as the table requires, and None if that can't be told."""
    value = _value(key, facts)
    if not isinstance(required, Mapping):
        return bool(value == required) or (
            value is None and (required is False or (required == 1 and required is not True))
        )
    for test, expected in required.items():
        if test == "set":
            is_so = (value is not None) == expected
        elif test == "not":
            is_so = value != expected
        elif test == "as":
            is_so = value in (None, facts.get(expected))
        elif value is None:
            return None
        elif test == "like":
            is_so = any(fnmatchcase(str(value), pattern) for pattern in _as_list(expected))
        else:
            number, bound = _number(key, facts), _number(expected, facts)
            if bound is None or number is None:
                return None
            is_so = _COMPARISONS[test][0](number, bound)
        if not is_so:
            return False
    return True


def _hits(need: Mapping[str, Any], facts: RecipeFacts) -> Iterator[Hit]:
    if not all(_meets(key, required, facts) for key, required in need.get("when", {}).items()):
        return
    for unread in changed_keys(need.get("unread", ()), facts):
        yield Hit(unread, f"{as_yaml(facts.get(unread))}: {need['why']}")
    missed = {key: required for key, required in need.get("needs", {}).items() if _meets(key, required, facts) is False}
    settings = {
        key: required for key, required in missed.items() if not isinstance(required, Mapping) or required == _NULL
    }
    fix = {key: None if value == _NULL else value for key, value in need.get("fix", settings).items()}
    key, why = need.get("at"), need.get("why", "")
    if key and missed:
        values = {name: None if required == _NULL else required for name, required in settings.items()}
        needed = ", ".join(f"{name}: {inline_yaml(value)}" for name, value in values.items())
        message = f"{as_yaml(_value(key, facts))}{f' needs {needed}' if needed else ''}{f': {why}' if why else ''}"
        # Whoever has just set what is not as needed wants it no less than the setting that needs it.
        is_theirs = bool(settings) and nearest_to_user((key, *missed), facts) != key
        yield Hit(key, message, fix=values if is_theirs else fix)
        return
    for key, required in missed.items():
        value = as_yaml(_value(key, facts))
        own_fix = {key: fix[key]} if key in fix else {}
        if key in settings or ("set" in required and _value(key, facts) is None):
            yield Hit(key, f"{value}, but {why}", fix=own_fix)
        else:
            outside, nearest = _outside(key, required, facts)
            yield Hit(
                key, f"{value} {outside}{f': {why}' if why else ''}", fix=own_fix or ({} if "fix" in need else nearest)
            )


def _outside(key: str, required: Mapping[str, Any], facts: RecipeFacts) -> tuple[str, dict[str, Any]]:
    """Return which bound a number is beyond, and the setting that is meant: a percentage, or another key's number."""
    if "as" in required:
        return f"differs from {required['as']}: {as_yaml(facts.get(required['as']))}", {key: facts.get(required["as"])}
    number = _number(key, facts)
    for test, bound in required.items():
        limit = _number(bound, facts) if test in _COMPARISONS else None
        if limit is None or number is None or _COMPARISONS[test][0](number, limit):
            continue
        name = f"{bound}: " if isinstance(bound, str) and not bound.startswith("facts.") else ""
        words = f"{_COMPARISONS[test][1]} {name}{limit:g}"
        if bound == 1 and test == "most" and number <= 100:
            return words, {key: number / 100}
        if test == "divides" and limit >= 1:
            divisors = range(max(1, int(min(number, limit, 10**6))), 0, -1)
            return words, {key: next(size for size in divisors if limit % size == 0)}
        # A bound of 0 is likelier to be the mistake than what exceeds it.
        is_allowed = isinstance(bound, str) and test in ("least", "most") and limit > 0
        return words, {key: _value(str(bound), facts)} if is_allowed else {}
    return f"is not {' or '.join(_as_list(next(iter(required.values()))))}", {}


def _as_list(patterns: str | list[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _register(rule_id: str, severity: Any, title: str, source: str, needs: Any, **options: Any) -> None:
    def check(facts: RecipeFacts) -> Iterator[Hit]:
        for need in needs:
            if facts.nemo_rl is None or is_in_source(facts.nemo_rl, need.get("refusal", "")):
                yield from _hits(_named(need, facts.algorithm), facts)

    check.__doc__ = title
    refusals = tuple(need.get("refusal", "") for need in needs)  # every source contains the empty text
    options["models"] = tuple(options.get("models", ()))
    rule(rule_id, severity, source, refusals=refusals, **{"applies_to_lab": False, **options})(check)


def _named(value: Any, algorithm: str) -> Any:
    """Return a part of the table with the name of the recipe's algorithm in it."""
    if isinstance(value, Mapping):
        return {_named(key, algorithm): _named(item, algorithm) for key, item in value.items()}
    return value.replace("{algorithm}", algorithm) if isinstance(value, str) else value


for _id, _entry in _TABLE.items():
    _register(_id, _entry.pop("severity", "error"), **_entry)
