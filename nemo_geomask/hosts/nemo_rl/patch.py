"""Reversible patches of a host library."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

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


def function(
    module: types.ModuleType, name: str, make: Callable[[Any], Any], *, namespaces: Iterable[dict[str, Any]] = ()
) -> Patch:
    """Return a patch that replaces a function of a module by ``make(function)``, also where it was imported by name.

    Args:
        module: the module that defines the function.
        name: name of the function.
        make: called with the function when the patch is applied.
        namespaces: globals of other modules, in which the function is replaced too if they have it under this name.
    """
    replaced: list[tuple[dict[str, Any], Any, Any]] = []

    def apply() -> None:
        original = vars(module)[name]
        replacement = make(original)
        for namespace in (vars(module), *namespaces):
            if namespace.get(name) is original:
                namespace[name] = replacement
                replaced.append((namespace, original, replacement))

    def undo() -> None:
        while replaced:
            namespace, original, replacement = replaced.pop()
            if namespace.get(name) is replacement:
                namespace[name] = original

    return Patch(module, name, apply, undo)


def nemo_rl_namespaces(actor: object = None) -> list[dict[str, Any]]:
    """Return the globals of NeMo-RL's imported modules, and those of the functions that an actor's class consists of.

    Ray pickles some worker classes by value, because a decorator hides their name; their methods have copies of their
    module's globals.

    Args:
        actor: None: only of the imported modules.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "nemo_rl"]
    namespaces = {id(vars(module)): vars(module) for module in modules if module is not None}
    functions = [value for cls in type(actor).__mro__ for value in vars(cls).values()]
    visited: set[int] = set()
    while functions:
        function = functions.pop()
        function = getattr(function, "__func__", function)  # of a static method or a class method
        if not isinstance(function, types.FunctionType) or id(function) in visited:
            continue
        visited.add(id(function))
        # A decorated method is in the closure of the function that the decorator returned.
        functions += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        if str(function.__globals__.get("__name__", "")).startswith("nemo_rl"):
            namespaces[id(function.__globals__)] = function.__globals__
    return list(namespaces.values())


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
