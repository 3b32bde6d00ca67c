"""Rules over a recipe, and the findings that they produce."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nemo_geomask.recipe import Origin
from nemo_geomask.tools.check.recipe_facts import RecipeFacts

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Hit:
    """Setting to which a rule applies.

    Attributes:
        message: one sentence: the value, what is wrong with it, what is allowed, and the way out. Check puts the
            settings of ``fix`` in the place of ``{fix}``, or at the end.
        origin: file and line; if None, those of the key, or of the nearest section around it that the recipe contains.
        fix: settings that are a way out, by dotted key; empty if only the user can know them.
        is_misspelt: True if the fix is ``key`` under its correct name, so that it has to be renamed.
        others: further keys that the message is about; a rule that gives way does so to findings about these as well.
    """

    key: str  # dotted key that the message is about; the recipe may lack it
    message: str
    origin: Origin | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)
    is_misspelt: bool = False
    others: Collection[str] = ()


RuleFunction = Callable[[RecipeFacts], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """Check of a recipe, with the text that documents it.

    Attributes:
        id: GM and three digits, of which the first is 0 for the recipe itself, 1 for causes of mismatch, 2 for settings
            without effect, 3 for what NeMo-RL refuses when it starts, 4 for lengths and batch sizes.
        severity: ``error`` if training would be wrong or not start, ``warning`` if the setting is probably a mistake,
            ``note`` if it is worth knowing; a note never changes the exit status.
        title: noun phrase for what the rule finds.
        source: document or code that shows the problem.
        needs: attributes of :class:`RecipeFacts` without which the rule can't be checked.
        refusals: words of NeMo-RL's source without which the problem does not exist, such as those of its refusal;
            where the checkout has none of them, the rule says nothing.
        models: sections of further models, such as PPO's ``value`` or a ``teacher``, that the rule is about as well.
        needs_loss: False if the rule also applies to a recipe that trains no policy loss, such as one of DPO.
        applies_to_lab: False if the rule is about sections or defaults that a recipe of ``nemo-geomask lab`` lacks.
        gives_way: True if the rule says nothing about settings of which another finding, no less severe, tells.
        gives_up: True if a setting that it finds has to be given up, so that advice about the setting is left out.
        may_be_ignored: False if neither ``--ignore`` nor a comment silences the rule.
    """

    id: str
    severity: Severity
    title: str
    source: str
    check: RuleFunction
    needs: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    needs_loss: bool = True
    applies_to_lab: bool = True
    gives_way: bool = False
    gives_up: bool = False
    may_be_ignored: bool = True


@dataclass(frozen=True)
class Finding:
    """Hit of a rule, with the origin of its setting; None if the recipe has neither the key nor a section around it."""

    rule: Rule
    key: str
    message: str
    origin: Origin | None
    fix: Mapping[str, Any] = field(default_factory=dict)
    is_misspelt: bool = False  # see Hit
    others: Collection[str] = ()


_rules: dict[str, Rule] = {}


def rule(rule_id: str, severity: Severity, source: str, **options: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Make a rule of a function that yields a :class:`Hit` for each setting concerned.

    The title is the first line of the function's docstring; ``options`` are further attributes of :class:`Rule`.
    """

    def register(function: RuleFunction) -> RuleFunction:
        assert rule_id not in _rules, f"{rule_id} is the id of another rule"
        title = (function.__doc__ or rule_id).partition("\n")[0].rstrip(".")
        _rules[rule_id] = Rule(rule_id, severity, title, source, function, **options)
        return function

    return register


def load_rules() -> tuple[Rule, ...]:
    """Return the rules of all modules beside this one whose names end with ``_rules``, by id."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.endswith("_rules"):
            importlib.import_module(f"nemo_geomask.tools.check.{module.name}")
    return tuple(_rules[rule_id] for rule_id in sorted(_rules))
