"""Changes to a host, each with its way back."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["Patch", "apply_all", "attribute", "carried", "in_force", "rebound", "undo_all"]

_log = logging.getLogger("nemo_geomask")
_MISSING = object()


class Patch:
    """A change to a host that can be taken back; applying it twice changes nothing more.

    Args:
        owner: what is changed: a module, a class.
        name: what of it; a change of the same thing counts as the same.
        apply: makes the change.
        undo: takes it back, so that the host's objects are the very same as before.
    """

    def __init__(self, owner: Any, name: str, apply: Callable[[], None], undo: Callable[[], None]) -> None:
        self._key = (id(owner), name)
        self._owner = owner  # kept, so that nothing else gets its id
        self._apply = apply
        self._undo = undo

    def apply(self) -> bool:
        """Make the change, unless it is made; whether that was so."""
        if self._key in _in_force:
            return False
        self._apply()
        _in_force[self._key] = self
        return True

    def undo(self) -> None:
        """Take it back, if it was this one that made it."""
        if _in_force.get(self._key) is self:
            del _in_force[self._key]
            self._undo()


# By what is changed, in the order of application.
_in_force: dict[tuple[int, str], Patch] = {}


def attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """``owner.name`` becomes ``make`` of what it is.

    Args:
        owner: a module or class.
        name: its attribute, its own or inherited.
        make: called with the attribute when the patch is applied.
    """
    before: list[Any] = []

    def apply() -> None:
        own = vars(owner).get(name, _MISSING)
        ours = make(getattr(owner, name) if own is _MISSING else own)
        before[:] = own, ours
        setattr(owner, name, ours)

    def undo() -> None:
        own, ours = before
        if vars(owner).get(name) is not ours:
            _log.warning("%r.%s was changed by somebody else since, and is left as it is", owner, name)
        elif own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return Patch(owner, name, apply, undo)


def rebound(home: types.ModuleType, name: str, make: Callable[[Any], Any]) -> Patch:
    """``home.name``, a function, becomes ``make`` of what it is, wherever NeMo-RL holds it under its name.

    Not only in its modules: Ray sends the methods of a worker class by value where a decorator hides their name, and
    these then have globals of their own, with the module's name.
    """
    original = vars(home)[name]
    ours = make(original)

    def rebind(old: Any, new: Any) -> None:
        for holder in gc.get_referrers(old):
            ours_to_change = isinstance(holder, dict) and str(holder.get("__name__", "")).startswith("nemo_rl")
            if ours_to_change and holder.get(name) is old:
                holder[name] = new

    return Patch(home, name, functools.partial(rebind, original, ours), functools.partial(rebind, ours, original))


Methods = Callable[[type], Mapping[str, Any]]


def carried(owner: type, key: str, methods: Methods) -> Patch:
    """An object of ``owner`` that is sent to a process in which nothing is changed arrives as one of a subclass.

    Several changes may each give it methods, and come and go in any order.

    Args:
        owner: the class.
        key: of these methods among those that others give.
        methods: picklable; those of the subclass, from the object's class; none leave it as it is.
    """
    sends = attribute(owner, "__reduce_ex__", functools.partial(_sending, owner))

    def apply() -> None:
        _carried.setdefault(owner, {})[key] = methods
        sends.apply()

    def undo() -> None:
        del _carried[owner][key]
        if not _carried[owner]:
            _in_force[id(owner), "__reduce_ex__"].undo()

    return Patch(owner, f"__reduce_ex__, {key}", apply, undo)


_carried: dict[type, dict[str, Methods]] = {}


def _sending(owner: type, original: Any) -> Any:
    @functools.wraps(original)
    def reduce_ex(self: Any, protocol: Any) -> Any:
        make, arguments, *state = original(self, protocol)
        return _arrived, (make, arguments, tuple(_carried[owner].values())), *state

    return reduce_ex


def _arrived(make: Callable[..., Any], arguments: tuple[Any, ...], methods: tuple[Methods, ...]) -> Any:
    found = make(*arguments)
    kind: Any = type(found)
    if others := {name: method for some in methods for name, method in some(kind).items()}:
        # Under its own name; the class itself stays as it is.
        found.__class__ = type(kind)(kind.__name__, (kind,), {**others, "__module__": kind.__module__})
    return found


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply them in order; all of them or, where one fails, none."""
    with contextlib.ExitStack() as applied:
        for patch in patches:
            if patch.apply():
                applied.callback(patch.undo)
        applied.pop_all()


def in_force(owner: Any, name: str) -> bool:
    """Whether ``owner.name`` is changed."""
    return (id(owner), name) in _in_force


def undo_all() -> None:
    """Undo every patch in force in this process, the last one first."""
    for patch in reversed(list(_in_force.values())):
        patch.undo()
