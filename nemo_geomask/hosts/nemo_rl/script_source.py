"""Source of a training script: where it names NeMo-RL's ``setup``, and whether that can be wrapped there.

The source is read before the script runs. If the script called ``setup`` unwrapped, it would train with NeMo-RL's loss
instead of the recipe's, and at most its log would tell.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from nemo_geomask.hosts.nemo_rl.facts import SETUPS

_FUNCTIONS = dict(SETUPS).values()
_ENTRIES = ("with_geomask", "install", "build_nemo_rl_loss")
"""Names of this package by which a script takes the recipe's loss itself."""


@dataclass(frozen=True)
class ScriptSource:
    """A script, compiled in parts.

    Attributes:
        parts: the script's code in its order. Each part but the last ends with an import of a ``setup`` function.
        problem: why ``setup`` can't be wrapped, as a verb phrase whose subject is the script; empty if it can be, or
            if the script takes the recipe's loss itself.
    """

    parts: tuple[CodeType, ...]
    problem: str


def read_script(script: str) -> ScriptSource:
    """Read a script, and the modules that it imports from its own folder.

    Raises:
        SyntaxError: the script is not valid Python.
    """
    path = Path(script)
    tree = ast.parse(path.read_bytes(), filename=script)
    modules = _local_modules(tree, path)
    takes_loss_itself = any(map(_takes_loss, [tree, *modules.values()]))
    problem = "" if takes_loss_itself else _problem(tree) or _problem_in_modules(modules)
    return ScriptSource(tuple(_compile_parts(tree, script)), problem)


def _compile_parts(tree: ast.Module, script: str) -> Iterator[CodeType]:
    """Compile the script in parts, each of which ends with an import of a ``setup`` function."""
    future_imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    parts: list[list[ast.stmt]] = [[]]
    for statement in tree.body:
        parts[-1].append(statement)
        if _imported_setup(statement):
            parts.append([*future_imports])  # a future import holds only for the part that it is compiled with
    for part in parts:
        # Without dont_inherit, the future imports of this module would hold for the script.
        yield compile(ast.Module(body=part, type_ignores=[]), script, "exec", dont_inherit=True)


def _problem(tree: ast.Module) -> str:
    """Describe why the ``setup`` that a module names can't be wrapped; empty if it can be."""
    imports = _setup_imports(tree)
    for statement, name in imports:
        if statement not in tree.body:
            return f"imports {name} in line {statement.lineno}, which is not at its top level"
    if call := _module_attribute(tree):
        return f"calls {ast.unparse(call)} in line {call.lineno} through its module"
    if not imports:
        return f"imports none of {', '.join(f'{name} of {module}' for module, name in SETUPS)} by its name"
    return ""


def _problem_in_modules(modules: dict[Path, ast.Module]) -> str:
    """Describe the first of a script's own modules that names a ``setup`` function; empty if none does."""
    for path, tree in modules.items():
        places = [(name, statement.lineno) for statement, name in _setup_imports(tree)]
        if call := _module_attribute(tree):
            places.append((ast.unparse(call), call.lineno))
        for name, line in places:
            return f"imports {path.name}, which names NeMo-RL's {name} in line {line}"
    return ""


def _setup_imports(tree: ast.Module) -> list[tuple[ast.ImportFrom, str]]:
    """Return the statements of a module that import a ``setup`` function, each with the name of the function."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [(statement, name) for statement in statements if (name := _imported_setup(statement))]


def _imported_setup(node: ast.AST) -> str:
    """Return the name of the ``setup`` function that a statement imports; empty if it imports none."""
    if not isinstance(node, ast.ImportFrom):
        return ""
    # A package may export the function that one of its modules defines, so its name may be imported from either.
    names = [name for module, name in SETUPS if not node.level and f"{module}.".startswith(f"{node.module}.")]
    return next((alias.name for alias in node.names if alias.name in names), "")


def _module_attribute(tree: ast.Module) -> ast.Attribute | None:
    """Return the first expression that reaches a ``setup`` function as an attribute of its module, if there is one."""
    modules = [module for module, _ in SETUPS]
    names = {*modules, *(alias.asname or alias.name for node in ast.walk(tree) for alias in _module_aliases(node))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _FUNCTIONS:
            owner = ast.unparse(node.value)
            is_part_of_path = "." in owner and any(module.endswith(f".{owner}") for module in modules)
            if owner in names or is_part_of_path:
                return node
    return None


def _module_aliases(node: ast.AST) -> list[ast.alias]:
    """Return the names under which an import statement binds a module of NeMo-RL that defines a ``setup``."""
    modules = [module for module, _ in SETUPS]
    if isinstance(node, ast.Import):
        return [alias for alias in node.names if alias.name in modules]
    if isinstance(node, ast.ImportFrom):
        return [alias for alias in node.names if f"{node.module}.{alias.name}" in modules]
    return []


def _takes_loss(tree: ast.Module) -> bool:
    """Return True if a module uses one of this package's entries to take the recipe's loss itself."""
    names: set[str] = set()
    imports_package = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            imports_package = True
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            imports_package |= any(_is_ours(alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return imports_package and not names.isdisjoint(_ENTRIES)


def _is_ours(module: str | None) -> bool:
    return (module or "").split(".")[0] == "nemo_geomask"


def _local_modules(tree: ast.Module, script: Path) -> dict[Path, ast.Module]:
    """Parse the modules that a script imports from its own folder, and those that they import from there."""
    parsed: dict[Path, ast.Module] = {}
    queue = [(tree, script)]
    while queue:
        importing, importing_path = queue.pop()
        for path in _imported_paths(importing, importing_path, script.parent):
            if path == script or path in parsed:
                continue
            try:
                parsed[path] = ast.parse(path.read_bytes(), filename=str(path))
            except SyntaxError:  # Python reports it when it imports the module
                continue
            queue.append((parsed[path], path))
    return parsed


def _imported_paths(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a module's import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            start, names = folder, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if node.level else folder
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] in ("nemo_rl", "nemo_geomask"):  # in the folder of a script at the root of a checkout
                continue
            place = start.joinpath(*parts)
            yield from (file for file in (place / "__init__.py", place.parent / f"{place.name}.py") if file.is_file())
