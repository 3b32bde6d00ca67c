"""Errors that speak to the user.

One base class; each subclass is also the built-in that fits, so ``except ValueError`` keeps working. All of them carry
their problems as objects and can be pickled, since they cross process boundaries in Ray.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ArgumentError",
    "BatchVetoError",
    "ConfigError",
    "DataError",
    "EngineError",
    "GeomaskError",
    "MissingDataError",
    "MissingDependencyError",
    "NonFiniteError",
    "PluginError",
    "Problem",
    "RanksDisagreeError",
    "ShapeError",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        keys: the dotted settings that it is about, such as ``loss_fn.masks[0].min``: several where they contradict each
            other, none where it is about no setting.
        message: what is wrong, the value found, the way out; may quote another error, lines and all.
        fields: fields of the model under which the keys stand whose values can't be relied on because of it, also the
            one that a misspelt key means.
        where: the file or the argument that the settings were given in, where that is to be said.
    """

    keys: tuple[str, ...]
    message: str
    fields: frozenset[str] = frozenset()
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, ", ".join(self.keys), self.message) if part)


class GeomaskError(Exception):
    """Base class of every error raised by nemo_geomask.

    Args:
        problems: what is wrong, each a :class:`Problem` or its message.
    """

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, one by one."""
        return tuple(problem if isinstance(problem, Problem) else Problem((), problem) for problem in self.args)

    def __str__(self) -> str:
        """A line a problem, each beginning with its keys."""
        return "\n".join(map(str, self.problems))


class ConfigError(GeomaskError, ValueError, AssertionError):
    """Settings of a recipe, an engine or the command line are unknown, out of range, or at odds with each other.

    An ``AssertionError`` as well: what NeMo-RL raises for such settings.
    """


class PluginError(ConfigError, LookupError):
    """``loss_fn.name`` leads to no variant: none of that name, one defined twice, one that fails or is no variant."""


class ArgumentError(GeomaskError, ValueError):
    """An argument of a call, no setting and no tensor, has a value that the function is not defined on."""


class DataError(GeomaskError, ValueError):
    """A batch holds values that the loss is not defined on."""


class MissingDataError(DataError, KeyError):
    """A batch lacks a tensor that the configured loss needs."""


class ShapeError(GeomaskError, ValueError):
    """A tensor's shape or dtype is not the one that the function is defined on."""


class NonFiniteError(GeomaskError, ArithmeticError):
    """A log-prob at a trained token is NaN or infinite, and ``nonfinite: raise`` was chosen."""


class RanksDisagreeError(GeomaskError, RuntimeError):
    """Ranks of one group were given different things where they have to be given the same; raised on all of them."""


class BatchVetoError(GeomaskError, RuntimeError):
    """More batches in a row than allowed were vetoed: the engines have come apart."""


class EngineError(GeomaskError, RuntimeError):
    """An engine can't do what is asked of it, as it is set up or at this moment."""


class MissingDependencyError(GeomaskError, ImportError):
    """An optional package is needed for what was asked; the message says which extra installs it."""
