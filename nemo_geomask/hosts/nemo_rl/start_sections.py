"""Items of a recipe's sections and members of NeMo-RL's classes, with the defaults that the source declares."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nemo_geomask.hosts.nemo_rl.start_values import (
    UNKNOWN,
    Names,
    RecipeSection,
    SourceClass,
    SourceFunction,
    SourceModule,
    SourceObject,
    Traced,
    source_module,
    text_of,
)

_MAX_BASES = 20  # classes above one another
_KINDS = ("name", "enabled")  # of the keys by whose words NeMo-RL tells the classes of a section


class StartSections(ABC):
    """Names, classes and sections of one run; the subclass evaluates expressions and calls functions."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout

    @abstractmethod
    def value(self, node: ast.expr, names: Names) -> Traced:
        """Return the value of an expression."""

    @abstractmethod
    def call(self, function: SourceFunction, arguments: list[Traced], named: dict[str, Traced]) -> Traced:
        """Run a function and return its result."""

    def global_value(self, module: SourceModule, name: str) -> Traced:
        """Return what a name of a module stands for."""
        match module.bindings.get(name):
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                return Traced(SourceFunction(function, Names(module)))
            case ast.ClassDef() as node:
                return Traced(SourceClass(node, module))
            case ast.Import() | ast.ImportFrom() as statement:
                return self.imported(statement, name, module)
            case ast.Assign([ast.Name()], value) | ast.AnnAssign(ast.Name(), _, ast.expr() as value):
                return self.value(value, Names(module))
        return UNKNOWN

    def imported(self, statement: ast.Import | ast.ImportFrom, name: str, module: SourceModule) -> Traced:
        """Return what an import binds to a name; unknown if it is not from NeMo-RL."""
        alias = next(each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name)
        path = alias.name if isinstance(statement, ast.Import) else statement.module or ""
        if not path.startswith(("nemo_rl", "examples")):
            return UNKNOWN
        origin = source_module(self.checkout, path)
        if isinstance(statement, ast.Import):
            return Traced(origin) if origin and alias.asname else UNKNOWN
        if origin and origin is not module and alias.name in origin.bindings:
            return self.global_value(origin, alias.name)
        submodule = source_module(self.checkout, f"{path}.{alias.name}")
        return Traced(submodule) if submodule else UNKNOWN

    def named(self, path: object) -> Traced:
        """Return what a dotted path names, such as ``nemo_rl.module.Class``."""
        module, _, name = str(path).rpartition(".")
        found = source_module(self.checkout, module)
        return self.global_value(found, name) if found else UNKNOWN

    def item(self, section: RecipeSection, name: object, *, is_attribute: bool = False) -> Traced:
        """Return an item of a section; if it is missing, the default of its class, or its method."""
        of = section.declared_by
        declaration = self._declaration(of, name) if of else None
        if name in section:
            found: Traced = section[name]
            for inner in found.value if isinstance(found.value, list) else [found.value]:
                if isinstance(inner, RecipeSection) and inner.declared_by is None and declaration:
                    inner.declared_by = self._class_named_in(declaration[0].annotation, declaration[1], inner)
            return found
        if section.is_open:
            return UNKNOWN
        if declaration is not None:
            return self._default(section, str(name), *declaration)
        return self.member(of, str(name), Traced(section)) if of and is_attribute else UNKNOWN

    def _default(self, section: RecipeSection, name: str, declaration: ast.AnnAssign, module: SourceModule) -> Traced:
        default, keys = declaration.value, section.keys_of(name)
        if isinstance(default, ast.Call) and text_of(default.func) == "Field":
            named = {each.arg: each.value for each in default.keywords}
            if "default_factory" in named:
                factory = self.value(named["default_factory"], Names(module)).value
                if not isinstance(factory, SourceClass):
                    return UNKNOWN
                section[name] = Traced(RecipeSection())
                section[name].value.path, section[name].value.declared_by = next(iter(keys), None), factory
                return Traced(section[name].value)
            default = named.get("default", next(iter(default.args), None))
        return UNKNOWN if default is None else Traced(self.value(default, Names(module)).value, keys)

    def _declaration(self, of: SourceClass, name: object) -> tuple[ast.AnnAssign, SourceModule] | None:
        for each in self.bases(of):
            for statement in each.node.body:
                if isinstance(statement, ast.AnnAssign) and text_of(statement.target) == name:
                    return statement, each.module
        return None

    def _class_named_in(self, annotation: ast.expr, module: SourceModule, section: RecipeSection) -> SourceClass | None:
        """Return the class that an annotation names; of several, the one whose fixed words a section has."""
        found: list[SourceClass] = []
        for name in dict.fromkeys(each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)):
            alias = module.bindings.get(name)
            if isinstance(alias, ast.Assign):
                inner = self._class_named_in(alias.value, module, section)
                found += [inner] if inner else []
            elif isinstance(value := self.global_value(module, name).value, SourceClass):
                found.append(value)
        fitting = [each for each in found if self._has_words_of(section, each)]
        return fitting[0] if len(fitting) == 1 else None

    def _has_words_of(self, section: RecipeSection, of: SourceClass) -> bool:
        for name in (each for each in _KINDS if each in section):
            declaration = self._declaration(of, name)
            words = re.search(r"Literal\[(.*?)\]", text_of(declaration[0].annotation)) if declaration else None
            if words and repr(section[name].value) not in words[1].split(", "):
                return False
        return True

    def is_model(self, section: RecipeSection) -> bool:
        """Return True if one of pydantic's models declares a section, and no ``TypedDict``."""
        classes = self.bases(section.declared_by) if section.declared_by else ()
        return any(text_of(base) == "BaseModel" for each in classes for base in each.node.bases)

    def bases(self, of: SourceClass, depth: int = 0) -> Iterator[SourceClass]:
        """Yield a class and those from which it inherits."""
        yield of
        for base in of.node.bases if depth < _MAX_BASES else ():
            if isinstance(found := self.value(base, Names(of.module)).value, SourceClass):
                yield from self.bases(found, depth + 1)

    def member(self, of: SourceClass, name: str, owner: Traced) -> Traced:
        """Return a method bound to its owner, the value of a property, or that of an attribute of the class."""
        for each in self.bases(of):
            for statement in each.node.body:
                match statement:
                    case ast.FunctionDef() | ast.AsyncFunctionDef() if statement.name == name:
                        return self._method(SourceFunction(statement, Names(each.module), None, each), of, owner)
                    case ast.Assign([ast.Name(target)], value) if target == name:
                        return self.value(value, Names(each.module))
                    case ast.AnnAssign(ast.Name(target), _, ast.expr() as value) if target == name:
                        return self.value(value, Names(each.module))
        return UNKNOWN

    def inherited(self, name: str, names: Names) -> Traced:
        """Return what ``super()`` has under a name, within a method."""
        method = names.function
        if method is None or method.defined_in is None or method.bound_to is None:
            return UNKNOWN
        _, *above = self.bases(method.defined_in)
        found = (self.member(each, name, method.bound_to) for each in above)
        return next((each for each in found if each is not UNKNOWN), UNKNOWN)

    def _method(self, function: SourceFunction, of: SourceClass, owner: Traced) -> Traced:
        assert not isinstance(function.node, ast.Lambda)
        decorators = {text_of(each).rpartition(".")[2] for each in function.node.decorator_list}
        is_bound = isinstance(owner.value, SourceObject | RecipeSection) or "classmethod" in decorators
        if "staticmethod" in decorators or not is_bound:
            return Traced(function)
        bound = Traced(of) if "classmethod" in decorators else owner
        method = replace(function, bound_to=bound)
        is_property = decorators & {"property", "cached_property"}
        return self.call(method, [], {}) if is_property else Traced(method)
