"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.recipe import Origin

__all__ = ["Finding", "Hit", "Rule", "Severity"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Hit:
    """One place where a rule applies.

    Attributes:
        key: dotted key that the message is about, written or not.
        message: value found, what is wrong with it, the way out.
        origin: where that is; None: where the key was written, or the nearest section around it.
    """

    key: str
    message: str
    origin: Origin | None = None


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        id: GM and three digits. 0: the recipe itself; 1: causes of mismatch; 2: settings that do nothing; 3: what
            NeMo-RL refuses at its start; 4: lengths and batch sizes.
        severity: ``error``: training would be wrong, or not start; ``warning``: probably not meant; ``note``: worth
            knowing, never counts.
        title: what it finds, as in the table.
        source: where that is known from.
        check: its hits in a recipe.
        needs: what has to be known to judge at all: attributes of :class:`RecipeFacts`.
        needs_loss: False for rules that also judge a recipe whose ``loss_fn`` is invalid.
        may_be_ignored: False for a rule that no ``--ignore`` and no comment silences.
    """

    id: str
    severity: Severity
    title: str
    source: str
    check: Callable[[RecipeFacts], Iterator[Hit]]
    needs: tuple[str, ...] = ()
    needs_loss: bool = True
    may_be_ignored: bool = True


@dataclass(frozen=True)
class Finding:
    """A hit of a rule, with the place in the files."""

    rule: Rule
    key: str
    message: str
    origin: Origin | None
