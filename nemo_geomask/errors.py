"""Exceptions of the package, and the problems that they report.

All exceptions derive from :class:`GeomaskError`. Each subclass also derives from the matching built-in, so that
``except ValueError`` keeps working. An exception carries its problems as objects and can be pickled, since exceptions
cross process boundaries in Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_geomask.yaml_text import advice

__all__ = [
    "ArgumentError",
    "BatchVetoError",
    "ConfigError",
    "DataError",
    "EngineError",
    "GeomaskError",
    "HostAPIError",
    "InputLimitError",
    "LostRankError",
    "MissingDataError",
    "MissingDependencyError",
    "NonFiniteError",
    "PluginError",
    "Problem",
    "RanksDisagreeError",
    "ShapeError",
    "WorkerError",
]


@dataclass(frozen=True)
class Problem:
    """One problem that an error reports.

    Attributes:
        keys: dotted settings that the problem is about, such as ``loss_fn.masks[0].min``; several if they contradict
            each other, none if it is not about a setting.
        template: what is wrong, the offending value and how to fix it; may quote another error of several lines.
            ``{fix}`` stands for the settings of ``fix``.
        fields: fields of the settings' model whose values can't be relied on because of the problem, including the
            one that a misspelt key probably means.
        where: file or argument that the settings come from, if the message should name it.
        fix: settings that are a way out, by dotted key; empty if only the user can know them.
    """

    keys: tuple[str, ...]
    template: str
    fields: frozenset[str] = frozenset()
    where: str = ""
    fix: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def message(self) -> str:
        """The template with the settings of ``fix`` in words."""
        return self.template.replace("{fix}", advice(self.fix)) if self.fix else self.template

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, ", ".join(self.keys), self.message) if part)


class GeomaskError(Exception):
    """Base class of every error raised by nemo_geomask.

    Args:
        problems: each a :class:`Problem`, or the message of a problem without keys.
    """

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems, in the order in which they were passed."""
        return tuple(problem if isinstance(problem, Problem) else Problem((), problem) for problem in self.args)

    def __str__(self) -> str:
        """Return one line for each problem, beginning with its keys."""
        return "\n".join(map(str, self.problems))


class ConfigError(GeomaskError, ValueError, AssertionError):
    """Settings of a recipe, an engine or the command line are unknown, out of range or contradict each other.

    Also an ``AssertionError``, which is what NeMo-RL raises for such settings.
    """


class InputLimitError(ConfigError):
    """A file is no regular file, or exceeds a limit of what is read; the message names the limit."""


class PluginError(ConfigError, LookupError):
    """A plugin can't be loaded: its name is unknown or claimed twice, its import fails, or its type is wrong."""


class ArgumentError(GeomaskError, ValueError):
    """A function is not defined for an argument that it got; the argument is neither a setting nor a tensor."""


class DataError(GeomaskError, ValueError):
    """A batch holds values that the loss is not defined for."""


class MissingDataError(DataError, KeyError):
    """A batch lacks a tensor that the configured loss needs."""


class ShapeError(GeomaskError, ValueError):
    """A tensor has a shape or dtype that the function is not defined for."""


class NonFiniteError(GeomaskError, ArithmeticError):
    """A log-prob or advantage at a trained token is NaN or infinite, under ``nonfinite: raise``."""


class RanksDisagreeError(GeomaskError, RuntimeError):
    """Ranks of one group got different inputs where they must get the same; raised on all of them."""


class LostRankError(GeomaskError, RuntimeError):
    """A collective failed because another rank has ended, has raised an error, or does not take part in time."""


class BatchVetoError(GeomaskError, RuntimeError):
    """More batches in a row were vetoed than ``loss_fn.batch_veto`` allows: the engines' numerics have diverged."""


class EngineError(GeomaskError, RuntimeError):
    """An engine can't do what was requested, because of its configuration or its current state."""


class HostAPIError(GeomaskError, RuntimeError):
    """The installed NeMo-RL differs from the tested versions in an API that this package relies on."""


class WorkerError(GeomaskError, RuntimeError):
    """A worker that is to receive the loss cannot load it, or is not prepared for it."""


class MissingDependencyError(GeomaskError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""
