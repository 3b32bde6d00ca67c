"""Single files of a package that isn't installed: what they import beside them is made up."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Anything:
    """Stands for whatever is imported and not run: a decorator, a base class, a type in an annotation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return True


class _Empty(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...], files: Mapping[str, Path], values: Mapping[str, Any]) -> None:
        self.roots, self.files, self.values = roots, files, values

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _Empty(spec.name)
        for name, value in self.values.items():
            owner, _, attribute = name.rpartition(".")
            if owner == spec.name:
                setattr(module, attribute, value)
        return module

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def files_of(
    root: Path, modules: Mapping[str, str], *, made_up: tuple[str, ...], values: Mapping[str, Any] | None = None
) -> Iterator[dict[str, types.ModuleType]]:
    """Modules by name, each run from its file under ``root``.

    Args:
        root: of a checkout.
        modules: module names and their files.
        made_up: top-level packages of which everything else is :class:`Anything`.
        values: what some names of made-up modules are instead.
    """
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] in made_up]:
        del sys.modules[name]
    finder = _Finder(made_up, {name: root / path for name, path in modules.items()}, values or {})
    sys.meta_path.insert(0, finder)
    try:
        yield {name: importlib.import_module(name) for name in modules}
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in made_up:
                del sys.modules[name]
        sys.modules.update(before)
