"""Keys and types of a recipe, from the classes in NeMo-RL's source that describe its sections.

NeMo-RL declares each section as a ``TypedDict`` or a pydantic model, all of them reachable from the ``MasterConfig`` of
an algorithm. They are read as text, since importing them needs NeMo-RL's environment. From v0.7.0 on, NeMo-RL itself
validates a recipe against them, and ignores keys that they lack.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_geomask.recipe.input_limits import parse_python, read_source
from nemo_geomask.tools.check.value_types import (
    ANYTHING,
    BOUNDS,
    AnyOf,
    ListOf,
    OneOf,
    Open,
    Scalar,
    Section,
    ValueType,
)

_MASTER_MODULES = {
    "async_rl": "nemo_rl.algorithms.single_controller_utils.config",
    "grpo": "nemo_rl.algorithms.grpo",
    "ppo": "nemo_rl.algorithms.ppo",
    "sft": "nemo_rl.algorithms.sft",
    "dpo": "nemo_rl.algorithms.dpo",
    "rm": "nemo_rl.algorithms.rm",
    "teachers": "nemo_rl.algorithms.xtoken_off_policy_distillation",
    "distillation": "nemo_rl.algorithms.distillation",
    "eval": "nemo_rl.evals.eval",
}
"""Module of each ``MasterConfig``, by the section of a recipe that selects it; the first section present decides."""

GENERATION_CLASSES = {
    "vllm": ("nemo_rl.models.generation.vllm.config", "VllmConfig"),
    "sglang": ("nemo_rl.models.generation.sglang.config", "SGLangConfig"),
    "megatron": ("nemo_rl.models.generation.megatron.config", "MCoreGenerationConfig"),
    "trtllm": ("nemo_rl.models.generation.trtllm.config", "TrtllmConfig"),
    "dynamo": ("nemo_rl.models.generation.dynamo.config", "DynamoConfig"),
}
"""Module and class of ``policy.generation`` by backend; NeMo-RL's ``PolicyConfig`` names only their base class."""

_CLASS = re.compile(r"^class (\w+)(?:\(([^:]*?)\))?:[^\n]*\n((?:[ \t]+[^\n]*\n|[ \t]*\n|#[^\n]*\n)*)", re.MULTILINE)
_IMPORT = re.compile(r"^from (nemo_rl[\w.]*) import (?:\(([^)]*)\)|([^(\n]*))", re.MULTILINE)
_SCALARS = {
    **{name: Scalar(name) for name in ("int", "float", "str", "bool")},
    **{f"Positive{name.title()}": Scalar(name, (("gt", 0.0),)) for name in ("int", "float")},
    **{f"NonNegative{name.title()}": Scalar(name, (("ge", 0.0),)) for name in ("int", "float")},
    "None": OneOf((None,)),
}
_CONTAINERS = {
    **dict.fromkeys(("list", "List", "Sequence", "tuple", "Tuple", "set"), ListOf(ANYTHING)),
    **dict.fromkeys(("dict", "Dict", "Mapping"), Open(ANYTHING)),
}
_WRAPPERS = ("NotRequired", "Required", "Annotated", "ClassVar", "Final")
_TYPED_DICT, _MODEL = "TypedDict", "BaseModel"


def master_section(checkout: Path, recipe: Mapping[str, Any]) -> Section | None:
    """Return the ``MasterConfig`` of a recipe's algorithm; None if the checkout has none for it."""
    name = next((name for name in _MASTER_MODULES if name in recipe), None)
    return None if name is None else master_sections(checkout).get(name)


@functools.cache
def master_sections(checkout: Path) -> Mapping[str, Section]:
    """Return the ``MasterConfig`` of every algorithm by the section that selects it."""
    source = _source_of(checkout)
    sections = {name: source.section(module, "MasterConfig") for name, module in _MASTER_MODULES.items()}
    return {name: section for name, section in sections.items() if section is not None}


@functools.cache
def generation_section(checkout: Path, backend: str) -> Section | None:
    """Return the class of ``policy.generation`` for a backend; None if the checkout has none for it."""
    place = GENERATION_CLASSES.get(backend)
    return None if place is None else _source_of(checkout).section(*place)


@functools.cache
def dataset_arguments(checkout: Path) -> Mapping[str, Mapping[str, Any] | None]:
    """Return the arguments of each dataset's class with their defaults, ``...`` if required; None if unknown."""
    source, name = _source_of(checkout), "nemo_rl.data.datasets.response_datasets"
    module = source.module(name)
    entries = re.findall(r"""^ +["']([\w.-]+)["']: (?:partial\()?(\w+)""", module.text if module else "", re.MULTILINE)
    return {dataset: source.arguments(name, class_name) for dataset, class_name in entries}


@functools.cache
def environment_text(checkout: Path, name: str) -> str:
    """Return the source of the class of a registered environment; empty if there is none."""
    source = _source_of(checkout)
    registry = source.module("nemo_rl.environments.utils")
    entry = re.compile(rf"""["']{re.escape(name)}["']: {{\s*["']actor_class_fqn["']: ["']([\w.]+)\.(\w+)""")
    match = entry.search(registry.text) if registry else None
    module = source.module(match[1]) if match else None
    return module.classes.get(match[2], ("", ""))[1] if module and match else ""


@functools.cache
def _source_of(checkout: Path) -> _Source:
    return _Source(checkout)


@dataclass
class _Module:
    """Text of a module, its classes as (bases, body), and ``module:name`` of each imported name."""

    name: str
    text: str
    classes: Mapping[str, tuple[str, str]]
    imports: Mapping[str, str]


@functools.cache
def _module(checkout: Path, name: str) -> _Module | None:
    path = checkout.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    if (file := next((file for file in files if file.is_file()), None)) is None:
        return None
    text = read_source(file) + "\n"
    imports = {}
    for origin, in_parentheses, on_line in _IMPORT.findall(text):
        for imported in re.sub(r"#[^\n]*", "", in_parentheses or on_line).split(","):
            imports[imported.split(" as ")[-1].strip()] = f"{origin}:{imported.split(' as ')[0].strip()}"
    classes = {match[1]: (match[2] or "", match[3]) for match in _CLASS.finditer(text)}
    return _Module(name, text, classes, imports)


@dataclass
class _Source:
    """Source tree of NeMo-RL, whose modules are read when they are needed."""

    checkout: Path
    types: dict[tuple[str, str], ValueType] = field(default_factory=dict)

    def section(self, module: str, name: str) -> Section | None:
        """Return a class as a section; None if there is no such class."""
        value_type = self._named_type(module, name)
        return value_type if isinstance(value_type, Section) else None

    def arguments(self, module_name: str, name: str) -> dict[str, Any] | None:
        """Return the arguments of a class and of its base classes with constant defaults; None if unknown."""
        module = self.module(module_name)
        if module and name in module.imports:
            return self.arguments(*module.imports[name].split(":"))
        if module is None or name not in module.classes:
            return None
        bases, body = module.classes[name]
        arguments: dict[str, Any] = {}
        for base in filter(None, re.split(r"[,\s]+", bases)):
            inherited = self.arguments(module_name, base)
            if inherited is None:
                return None
            arguments.update(inherited)
        with contextlib.suppress(SyntaxError, RecursionError):
            for method in parse_python(f"class _:\n{body}").body[0].body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    # What a base class requires, this method may pass.
                    arguments = {key: None if value is ... else value for key, value in arguments.items()}
                    names = [each.arg for each in method.args.args[1:]]
                    arguments.update(dict.fromkeys(names, ...))
                    defaults = [*map(_constant, method.args.defaults)]
                    arguments.update(zip(names[len(names) - len(defaults) :], defaults, strict=True))
            return arguments
        return None

    def module(self, name: str) -> _Module | None:
        """Return a module of NeMo-RL; None if there is none of this name."""
        return _module(self.checkout, name)

    def _named_type(self, module_name: str, name: str) -> ValueType:
        """Return the type of a name in a module: a class, an alias, or an imported name; ANYTHING if unknown."""
        key = (module_name, name)
        if key not in self.types:
            self.types[key] = ANYTHING  # for a class that contains itself
            module = self.module(module_name)
            if module is not None:
                # What Python can't parse, or nests too deeply for it, has no type that could be checked.
                with contextlib.suppress(SyntaxError, RecursionError):
                    self.types[key] = self._find_type(module, name)
        return self.types[key]

    def _find_type(self, module: _Module, name: str) -> ValueType:
        if name in module.classes:
            return self._class_type(module, name)
        if name in module.imports:
            origin, _, original = module.imports[name].partition(":")
            return self._named_type(origin, original)
        if alias := re.search(rf"^{re.escape(name)}(?:: *\w+)? *= *", module.text, re.MULTILINE):
            lines = module.text[alias.end() :].split("\n")
            for count in range(1, 20):  # an alias may span several lines, so read on until they parse
                try:
                    return self._type(parse_python("\n".join(lines[:count]).strip(), "eval").body, module)
                except SyntaxError:
                    continue
        return ANYTHING

    def _class_type(self, module: _Module, name: str) -> ValueType:
        """Return the section that a class declares; ANYTHING if it is no TypedDict and no pydantic model."""
        bases, body = module.classes[name]
        arguments = parse_python(f"_({bases})", "eval").body
        assert isinstance(arguments, ast.Call)
        base_names = [base.id for base in arguments.args if isinstance(base, ast.Name)]
        parents = [
            self._named_type(module.name, base) for base in base_names if base not in (_TYPED_DICT, _MODEL, "Protocol")
        ]
        parent_sections = [parent for parent in parents if isinstance(parent, Section)]
        is_model = _MODEL in base_names or any(parent.is_model for parent in parent_sections)
        if not (is_model or _TYPED_DICT in base_names or parent_sections):
            return ANYTHING
        is_total = not any(
            keyword.arg == "total" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            for keyword in arguments.keywords
        )
        fields: dict[str, ValueType] = {}
        required: set[str] = set()
        for parent in parent_sections:
            fields.update(parent.fields)
            required |= parent.required
        for statement in parse_python(f"class _:\n{body}").body[0].body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                key = statement.target.id
                fields[key] = _bounded(self._type(statement.annotation, module), statement.value)
                may_be_missing = statement.value is not None if is_model else not is_total
                (required.discard if may_be_missing or _is_not_required(statement.annotation) else required.add)(key)
        return Section(name, fields, frozenset(required), is_model)

    def _type(self, node: ast.expr, module: _Module) -> ValueType:
        """Return the type that an annotation describes; ANYTHING for what a recipe can't contain."""
        match node:
            case ast.Constant(None):
                return OneOf((None,))
            case ast.Constant(str(text)):
                return self._type(parse_python(text, "eval").body, module)
            case ast.BinOp(left, ast.BitOr(), right):
                return AnyOf.of(self._type(left, module), self._type(right, module))
            case ast.Name(name):
                return _SCALARS.get(name) or _CONTAINERS.get(name) or self._named_type(module.name, name)
            case ast.Subscript(ast.Name("Literal"), content):
                return OneOf(tuple(map(_constant, content.elts if isinstance(content, ast.Tuple) else [content])))
            case ast.Subscript(ast.Name(name), content):
                arguments = content.elts if isinstance(content, ast.Tuple) else [content]
                if name in _WRAPPERS:
                    return _bounded(self._type(arguments[0], module), *arguments[1:])
                types = [self._type(argument, module) for argument in arguments]
                if name in ("Optional", "Union"):
                    return AnyOf.of(*types, *([OneOf((None,))] if name == "Optional" else []))
                container = _CONTAINERS.get(name, ANYTHING)
                if name in ("list", "List", "Sequence"):
                    return ListOf(types[0])
                return Open(types[-1]) if isinstance(container, Open) else container
        return ANYTHING


def _bounded(value_type: ValueType, *nodes: ast.expr | None) -> ValueType:
    """Return a type with the bounds that pydantic's ``Field`` sets on its numbers."""
    keywords = [keyword for node in nodes if isinstance(node, ast.Call) for keyword in node.keywords]
    bounds = tuple((each.arg, _constant(each.value)) for each in keywords if each.arg in BOUNDS)
    if isinstance(value_type, AnyOf):
        return AnyOf(tuple(_bounded(member, *nodes) for member in value_type.members))
    is_number = isinstance(value_type, Scalar) and value_type.name in ("int", "float")
    return Scalar(value_type.name, bounds) if is_number and bounds else value_type  # type: ignore[attr-defined]


def _constant(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _is_not_required(annotation: ast.expr) -> bool:
    is_generic = isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name)
    return is_generic and annotation.value.id == "NotRequired"  # type: ignore[attr-defined]
