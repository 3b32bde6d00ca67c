"""A library that is missing here and of which a test needs nothing: modules whose attributes are made when read."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types


class AbsentLibrary(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the modules of a library; ``make`` makes an attribute of theirs by its name."""

    def __init__(self, library, make):
        self._library, self._make = library, make

    def find_spec(self, name, path=None, target=None):
        if not f"{name}.".startswith(f"{self._library}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self._attribute
        return module

    def exec_module(self, module):
        pass

    def _attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._make(name)
