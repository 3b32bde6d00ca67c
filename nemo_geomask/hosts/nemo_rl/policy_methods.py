"""Subclasses of NeMo-RL's policies, which also an existing policy object can be turned into."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["is_subclassed", "make_subclass", "nemo_rl_method"]

_ATTRIBUTE = "_nemo_rl_class"
"""Attribute of a subclass: the class that it derives from."""


def make_subclass(base: type, name: str, holders: tuple[type, ...], **attributes: Any) -> type:
    """Make a subclass of a policy class whose methods are those of other classes.

    The other classes do not become its bases. Python gives an object another class only if both lay out their objects
    in the same way, which is certain for a single base. NeMo-RL's policies derive from ``abc.ABC``, and a further base
    would give the subclass another layout.

    Args:
        base: the policy class.
        name: name of the subclass.
        holders: classes whose methods, also inherited ones, the subclass gets. They call the methods that they override
            by :func:`nemo_rl_method`, since ``super()`` does not find them.
        attributes: further attributes of the subclass.
    """
    classes = [cls for holder in holders for cls in reversed(holder.__mro__)]
    methods = {
        key: value for cls in classes for key, value in vars(cls).items() if isinstance(value, types.FunctionType)
    }
    return type(name, (base,), {**methods, **attributes, _ATTRIBUTE: base})


def is_subclassed(policy: object) -> bool:
    """Return True if the class of a policy is one that :func:`make_subclass` has made, or derives from one."""
    return hasattr(policy, _ATTRIBUTE)


def nemo_rl_method(policy: Any, name: str) -> Callable[..., Any]:
    """Return a method of a policy as NeMo-RL's class defines it, bound to the policy."""
    function = getattr(getattr(policy, _ATTRIBUTE), name)
    method: Callable[..., Any] = function.__get__(policy)
    return method
