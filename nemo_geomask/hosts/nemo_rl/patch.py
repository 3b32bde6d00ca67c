"""Reversible patches of a host library."""

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
    """A change to a host library that can be undone; applying it twice has the effect of applying it once.

    Args:
        owner: the module, class or object that is changed.
        name: the attribute that is changed, or another label of the change. While a patch of this owner and name is
            applied, applying another one with the same owner and name does nothing.
        apply: makes the change.
        undo: reverts the change: the owner holds the identical objects as before.
    """

    def __init__(self, owner: Any, name: str, apply: Callable[[], None], undo: Callable[[], None]) -> None:
        self._key = (id(owner), name)
        self._owner = owner  # kept alive, so that its id is not reused
        self._apply = apply
        self._undo = undo

    def apply(self) -> bool:
        """Make the change unless it is in force; return True if it was made."""
        if self._key in _in_force:
            return False
        self._apply()
        _in_force[self._key] = self
        return True

    def undo(self) -> None:
        """Undo the change if this patch made it."""
        if _in_force.get(self._key) is self:
            del _in_force[self._key]
            self._undo()


_in_force: dict[tuple[int, str], Patch] = {}  # by owner and name, in the order of application


def attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a patch that replaces ``owner.name`` by ``make(owner.name)``.

    Args:
        owner: a module, class or object.
        name: an attribute, defined by the owner or inherited.
        make: called with the attribute when the patch is applied.
    """
    before: list[Any] = []

    def apply() -> None:
        original = vars(owner).get(name, _MISSING)
        replacement = make(getattr(owner, name) if original is _MISSING else original)
        before[:] = original, replacement
        setattr(owner, name, replacement)

    def undo() -> None:
        original, replacement = before
        if vars(owner).get(name) is not replacement:
            _log.warning("%r.%s was changed by other code in the meantime, and is left as it is", owner, name)
        elif original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return Patch(owner, name, apply, undo)


def rebound(module: types.ModuleType, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a patch that replaces a function by ``make(function)`` in every NeMo-RL namespace that has it as ``name``.

    Replacing ``module.name`` alone is not enough, for two reasons. Other modules may have imported the function. And
    Ray pickles the methods of some worker classes by value, because a decorator hides their name; such a method has its
    own copy of its module's globals.

    Args:
        module: the module that defines the function.
        name: name of the function.
        make: called at once with the function; returns the replacement.
    """
    original = vars(module)[name]
    replacement = make(original)

    def rebind(old: Any, new: Any) -> None:
        for referrer in gc.get_referrers(old):
            is_nemo_rl = isinstance(referrer, dict) and str(referrer.get("__name__", "")).startswith("nemo_rl")
            if is_nemo_rl and referrer.get(name) is old:
                referrer[name] = new

    apply = functools.partial(rebind, original, replacement)
    return Patch(module, name, apply, functools.partial(rebind, replacement, original))


MakeMethods = Callable[[type], Mapping[str, Any]]


def carried(owner: type, key: str, make_methods: MakeMethods) -> Patch:
    """Return a patch that carries wrapped methods of a class to other processes, together with its pickled objects.

    A process that unpickles an object of ``owner`` gets an object of a new subclass of ``owner``, which has the wrapped
    methods. The class itself is not patched in that process. Several patches may add methods to the subclass; they can
    be applied and undone in any order.

    Args:
        owner: the class whose objects are pickled.
        key: distinguishes this patch from other ``carried`` patches of the same class.
        make_methods: called in the receiving process with the unpickled object's class; returns the methods to add to
            the subclass. Must be picklable. If no patch adds a method, the object keeps its class.
    """
    reduce_patch = attribute(owner, "__reduce_ex__", functools.partial(_wrap_reduce_ex, owner))

    def apply() -> None:
        _carried.setdefault(owner, {})[key] = make_methods
        reduce_patch.apply()

    def undo() -> None:
        del _carried[owner][key]
        if not _carried[owner]:
            _in_force[id(owner), "__reduce_ex__"].undo()

    return Patch(owner, f"__reduce_ex__, {key}", apply, undo)


_carried: dict[type, dict[str, MakeMethods]] = {}  # by owner and key, of the carried patches that are applied


def _wrap_reduce_ex(owner: type, original: Any) -> Any:
    @functools.wraps(original)
    def reduce_ex(self: Any, protocol: Any) -> Any:
        make, arguments, *state = original(self, protocol)
        return _unpickle_with_methods, (make, arguments, tuple(_carried[owner].values())), *state

    return reduce_ex


def _unpickle_with_methods(
    make: Callable[..., Any], arguments: tuple[Any, ...], all_make_methods: tuple[MakeMethods, ...]
) -> Any:
    instance = make(*arguments)
    cls: Any = type(instance)
    methods: dict[str, Any] = {}
    for make_methods in all_make_methods:
        methods |= make_methods(cls)
    if methods:
        # The new subclass has the same name as cls, and cls itself is not changed.
        instance.__class__ = type(cls)(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
    return instance


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply patches in order; if one fails, undo those before it."""
    with contextlib.ExitStack() as applied:
        for patch in patches:
            if patch.apply():
                applied.callback(patch.undo)
        applied.pop_all()


def in_force(owner: Any, name: str) -> bool:
    """Return True if a patch of this owner and name is applied."""
    return (id(owner), name) in _in_force


def undo_all() -> None:
    """Undo every patch that is in force in this process, the last one first."""
    for patch in reversed(list(_in_force.values())):
        patch.undo()
