"""``nemo-geomask run``: run a NeMo-RL script with the loss that its recipe names."""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.hosts.nemo_rl import accepted_apis, host_api, patch
from nemo_geomask.hosts.nemo_rl.facts import LOSS_CONFIG, LOSS_MODULE, SETUPS, neutral_values, prev_readers
from nemo_geomask.hosts.nemo_rl.geomask_setup import is_wrapped, setup_calls, with_geomask
from nemo_geomask.hosts.nemo_rl.host_errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.hosts.nemo_rl.loss_block import without_unread_fields
from nemo_geomask.losses import build_loss
from nemo_geomask.recipe import ROOT_VARIABLE, load_recipe, nemo_rl_root

__all__ = ["install", "installed", "launch", "run_script", "uninstall"]

_log = logging.getLogger("nemo_geomask")

_ENTRIES = ("with_geomask", "install", "build_nemo_rl_loss")
"""Names that a script imports if it takes this package's loss by itself."""
_OWN_LINES = (
    "`from nemo_geomask.hosts.nemo_rl import with_geomask` and `setup = with_geomask(setup)` in the script, where it "
    "imports NeMo-RL's setup"
)


def launch(script: str, arguments: Sequence[str], *, accept: Sequence[str] = ()) -> None:
    """Run a NeMo-RL script as ``python script arguments...`` would, with the loss that its recipe names.

    Args:
        script: path of the script.
        arguments: its arguments.
        accept: dotted names of NeMo-RL APIs that may differ from the tested versions.

    Raises:
        ConfigError: the script does not exist or does not name NeMo-RL's ``setup``, an API in ``accept`` does not
            differ, or the loss that the recipe names cannot be built. The loss is checked here, because NeMo-RL calls
            ``setup`` only after starting Ray and loading the tokenizer and data sets.
        HostAPIError, MissingDependencyError: see :func:`run_script`.
    """
    if not Path(script).is_file():
        raise ConfigError(
            f"{script}: there is no such script; give one of NeMo-RL's, such as examples/run_grpo.py, by its path"
        )
    # This package's recipes inherit from recipes of NeMo-RL, whose folder they take from this environment variable.
    root = nemo_rl_root()
    if root is not None:
        os.environ.setdefault(ROOT_VARIABLE, str(root))
    accepted_apis.accept(accept)
    host_api.require_every_run()
    _check_recipe(arguments)
    sys.argv = [script, *arguments]
    run_script(script)


def run_script(script: str) -> None:
    """Run a script as ``__main__``, with NeMo-RL's ``setup`` functions wrapped where the script names them.

    The definitions of the script run first, then the ``setup`` functions in its namespace are wrapped by
    :func:`~nemo_geomask.hosts.nemo_rl.with_geomask`, and then its ``if __name__ == "__main__":`` block runs. The
    script's folder is first on ``sys.path``; its arguments are in ``sys.argv``.

    Raises:
        ConfigError: the script reaches ``setup`` in a way that would go round the wrapper. Nothing has been started.
        HostAPIError: the script ended without a call of a wrapped ``setup``.
        MissingDependencyError: NeMo-RL or one of its requirements is not importable.
    """
    _set_log_level()
    tree = ast.parse(Path(script).read_bytes(), filename=script)
    guard = next((index for index, node in enumerate(tree.body) if _is_main_guard(node)), len(tree.body))
    definitions, main_block = (
        ast.Module(body=body, type_ignores=[]) for body in (tree.body[:guard], tree.body[guard:])
    )
    is_wrapped_by_script = any(isinstance(node, ast.alias) and node.name in _ENTRIES for node in ast.walk(tree))
    if not is_wrapped_by_script:
        _refuse_ways_round(script, tree, has_main_block=guard < len(tree.body))
    module = types.ModuleType("__main__")
    module.__file__ = script
    calls_before = setup_calls.wrapped
    previous = sys.modules["__main__"]
    sys.modules["__main__"] = module  # as under python script: Ray pickles what a script defines by value
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        _run_module(module, script, definitions, main_block)
    finally:
        sys.modules["__main__"] = previous
    if setup_calls.wrapped == calls_before:
        raise HostAPIError(
            f"{script} ended without calling the setup that nemo_geomask wrapped; if it has trained, then with "
            f"NeMo-RL's own loss. Put {_OWN_LINES}"
        )


def _run_module(module: types.ModuleType, script: str, definitions: ast.Module, main_block: ast.Module) -> None:
    """Run the definitions of a script in a module, wrap the ``setup`` functions in it, and run the main block."""
    exec(compile(definitions, script, "exec"), vars(module))
    _wrap_setups(vars(module))
    exec(compile(main_block, script, "exec"), vars(module))


def _refuse_ways_round(script: str, tree: ast.Module, *, has_main_block: bool) -> None:
    """Refuse a script that would call NeMo-RL's own ``setup``, so that NeMo-RL's loss would train unnoticed."""

    def refuse(problem: str) -> None:
        raise ConfigError(
            f"{script} {problem}, so the loss of the recipe could not take the place of NeMo-RL's own; nothing was "
            f"started. Put {_OWN_LINES}"
        )

    imports = [
        (node, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        # A package may export the function of its module.
        if any(alias.name == name and module.startswith(node.module or "-") for module, name in SETUPS)
    ]
    if not imports:
        refuse(f"imports none of {', '.join(f'{name} of {module}' for module, name in SETUPS)} by its name")
    for statement, name in imports:
        if statement not in tree.body:
            refuse(f"imports {name} in line {statement.lineno}, which is not at its top level")
    modules = {alias.asname or alias.name for node in ast.walk(tree) for alias in _imported_modules(node)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in dict(SETUPS).values()
            and ast.unparse(node.value) in modules
        ):
            refuse(f"calls {ast.unparse(node)} in line {node.lineno} through its module")
    if not has_main_block:
        refuse('has no `if __name__ == "__main__":` block, before which setup could be wrapped')


def _imported_modules(node: ast.AST) -> list[ast.alias]:
    """Return the names under which an import statement binds a module of NeMo-RL that defines a ``setup``."""
    modules = [module for module, _ in SETUPS]
    if isinstance(node, ast.Import):
        return [alias for alias in node.names if alias.name in modules]
    if isinstance(node, ast.ImportFrom):
        return [alias for alias in node.names if f"{node.module}.{alias.name}" in modules]
    return []


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _wrap_setups(namespace: dict[str, Any]) -> list[patch.Patch]:
    """Wrap each of NeMo-RL's ``setup`` functions in a namespace; return the patches, which are applied."""
    setups = _imported_setups()
    patches = [
        _namespace_patch(namespace, name)
        for name, value in list(namespace.items())
        if isinstance(value, types.FunctionType) and value in setups
    ]
    patch.apply_all(patches)
    return patches


def _imported_setups() -> set[Callable[..., Any]]:
    """Return NeMo-RL's ``setup`` functions, of the modules that the script has imported."""
    modules = [(sys.modules.get(module), name) for module, name in SETUPS]
    return {getattr(module, name) for module, name in modules if hasattr(module, name)}


def _namespace_patch(namespace: dict[str, Any], name: str) -> patch.Patch:
    original = namespace[name]

    def apply() -> None:
        namespace[name] = with_geomask(original)

    def undo() -> None:
        namespace[name] = original

    return patch.Patch(namespace, name, apply, undo)


def install() -> None:
    """Wrap NeMo-RL's ``setup`` functions where the running script, ``__main__``, has imported them by name.

    Same as ``setup = nemo_geomask.hosts.nemo_rl.with_geomask(setup)`` in the script. Call it after the imports and
    before ``setup``. Calling it again does nothing; :func:`uninstall` undoes it.

    Raises:
        ConfigError: the script has not imported ``setup``, so its training would use NeMo-RL's own loss.
        MissingDependencyError: NeMo-RL or one of its requirements is not importable.
        HostAPIError: the installed NeMo-RL differs from the tested versions; nothing is changed.
    """
    host_api.require_every_run()
    namespace = vars(sys.modules["__main__"])
    _set_log_level()
    if not _wrap_setups(namespace) and not any(map(is_wrapped, namespace.values())):
        raise ConfigError(
            "nemo_geomask.install() found no setup function of NeMo-RL in __main__, so the loss of the recipe could "
            f"not take the place of NeMo-RL's own. Call it after the import of setup, or put {_OWN_LINES}"
        )
    _log.info(
        "nemo_geomask %s on NeMo-RL %s: loss_fn.name selects the loss", nemo_geomask.__version__, describe_version()
    )


def uninstall() -> None:
    """Undo every change to NeMo-RL's modules and to ``__main__`` in this process; do nothing if there is none.

    Policies and losses that a wrapped ``setup`` has returned stay as they are. Worker processes stay prepared until
    they end.
    """
    patch.undo_all()


def installed() -> bool:
    """Return True if the running script, ``__main__``, has a wrapped ``setup`` function."""
    return any(map(is_wrapped, vars(sys.modules["__main__"]).values()))


def _set_log_level() -> None:
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


def _check_recipe(arguments: Sequence[str]) -> None:
    """Check that the recipe's loss can be built, and that no other setting needs the ``prev_logprobs`` it skips."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config")
    try:
        options, overrides = parser.parse_known_args(list(arguments))
        recipe = load_recipe(options.config, overrides) if options.config else {}
    except (argparse.ArgumentError, GeomaskError):
        # The script reads its own arguments and reports its own errors.
        return
    settings = recipe.get("loss_fn")
    if isinstance(settings, Mapping) and settings.get("name") is not None:
        fields = neutral_values(getattr(importlib.import_module(LOSS_MODULE), LOSS_CONFIG, None))
        settings = without_unread_fields(settings, fields)
        with warnings.catch_warnings(action="ignore"):  # NeMo-RL builds the loss again, which repeats the warnings
            config = build_loss(settings).config
        if config.skips_prev and (problems := tuple(prev_readers(recipe))):
            raise ConfigError(*problems)
