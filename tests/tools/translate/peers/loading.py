"""Import of single files from a package that is not installed; everything else that they import is a placeholder."""

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


class Placeholder:
    """Placeholder for an imported object that is not run: a decorator, a base class, a type in an annotation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return True


class _PlaceholderModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class _PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...], files: Mapping[str, Path], values: Mapping[str, Any]) -> None:
        self.roots, self.files, self.values = roots, files, values

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _PlaceholderModule(spec.name)
        for name, value in self.values.items():
            owner, _, attribute = name.rpartition(".")
            if owner == spec.name:
                setattr(module, attribute, value)
        return module

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def import_files(
    root: Path,
    modules: Mapping[str, str],
    *,
    placeholder_packages: tuple[str, ...],
    values: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, types.ModuleType]]:
    """Import modules from files under ``root``, and yield them by name.

    Args:
        root: folder of a checkout.
        modules: file of each module, relative to ``root``.
        placeholder_packages: top-level packages whose other modules contain a :class:`Placeholder` for every name.
        values: objects, by dotted name, for names in placeholder modules that need a real one.
    """
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] in placeholder_packages]:
        del sys.modules[name]
    finder = _PlaceholderFinder(
        placeholder_packages, {name: root / path for name, path in modules.items()}, values or {}
    )
    sys.meta_path.insert(0, finder)
    try:
        yield {name: importlib.import_module(name) for name in modules}
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in placeholder_packages:
                del sys.modules[name]
        sys.modules.update(before)
