"""``nemo-geomask run``: run a NeMo-RL script with the loss that its recipe names."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import nemo_geomask
from nemo_geomask.errors import ConfigError, GeomaskError, HostAPIError, MissingDependencyError
from nemo_geomask.hosts.nemo_rl import accepted_apis, environment_probe, host_api, patch
from nemo_geomask.hosts.nemo_rl.facts import LOSS_CONFIG, LOSS_MODULE, SETUPS, neutral_values
from nemo_geomask.hosts.nemo_rl.geomask_setup import is_wrapped, loss_choices, with_geomask
from nemo_geomask.hosts.nemo_rl.honoured_settings import require_honoured
from nemo_geomask.hosts.nemo_rl.installed_version import accepts_python, describe_version, import_nemo_rl
from nemo_geomask.hosts.nemo_rl.loss_block import without_unread_fields
from nemo_geomask.hosts.nemo_rl.script_source import read_script
from nemo_geomask.losses import build_loss
from nemo_geomask.recipe import ROOT_VARIABLE, load_recipe, nemo_rl_root

_log = logging.getLogger("nemo_geomask")

_SETUP_LINES = (
    "`from nemo_geomask.hosts.nemo_rl import with_geomask` and `setup = with_geomask(setup)` in the script, where it "
    "imports NeMo-RL's setup"
)


def launch(
    script: str,
    arguments: Sequence[str],
    *,
    accept: Sequence[str] = (),
    before_start: Callable[[], None] = lambda: None,
) -> None:
    """Run a NeMo-RL script as ``python script arguments...`` would, with the loss that its recipe names.

    Args:
        script: path of the script.
        arguments: its arguments.
        accept: dotted names of NeMo-RL APIs that may differ from the tested versions.
        before_start: called once everything is checked, before the script starts.

    Raises:
        ConfigError: the script does not exist or does not import NeMo-RL's ``setup``, an API in ``accept`` does not
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
    before_start()
    run_script(script)


def run_script(script: str) -> None:
    """Run a script as ``__main__``, with NeMo-RL's ``setup`` functions wrapped where the script imports them.

    Each import statement that names a ``setup`` function is followed at once by a replacement of that name by
    :func:`~nemo_geomask.hosts.nemo_rl.with_geomask` of it. The script's folder is first on ``sys.path``; its arguments
    are in ``sys.argv``.

    Raises:
        ConfigError: the script reaches ``setup`` in a way that would bypass the wrapper. Nothing has been started.
        HostAPIError: the script ended, and no loss was chosen by its recipe.
        MissingDependencyError: NeMo-RL or one of its requirements is not importable.
    """
    _set_log_level()
    source = read_script(script)
    if source.problem:
        raise ConfigError(
            f"{script} {source.problem}, so the loss of the recipe could not take the place of NeMo-RL's own; nothing "
            f"was started. Put {_SETUP_LINES}. If a module outside the script's folder does so already, start the "
            "script by python"
        )
    module = types.ModuleType("__main__")
    module.__file__ = script
    choices_before = len(loss_choices)
    previous = sys.modules["__main__"]
    sys.modules["__main__"] = module  # as under python script: Ray pickles what a script defines by value
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        *imports, rest = source.parts
        for part in imports:
            _run_imports(part, module)
            _wrap_setups(vars(module))
        exec(rest, vars(module))
    except SystemExit as end:
        is_success = not end.code and not {"-h", "--help"} & set(sys.argv)
        if is_success and len(loss_choices) == choices_before:
            _refuse_unchosen(script)
        raise
    finally:
        sys.modules["__main__"] = previous
    if len(loss_choices) == choices_before:
        _refuse_unchosen(script)


def _run_imports(part: types.CodeType, module: types.ModuleType) -> None:
    """Run a part of the script that imports NeMo-RL; name the Python that NeMo-RL requires if that is the fault."""
    try:
        exec(part, vars(module))
    except Exception as error:  # pydantic, for one, refuses NeMo-RL's typing.TypedDict before Python 3.12
        required, version = environment_probe.probe()["requires_python"], platform.python_version()
        try:
            fits = accepts_python(str(required), version)
        except (ImportError, ValueError):
            raise error from None
        if fits:
            raise
        raise MissingDependencyError(
            f"NeMo-RL can't be imported by {sys.executable}, which is Python {version} (required: {required}): "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. "
            "Use the environment that `uv sync` makes in its checkout; nemo-geomask doctor lists every version"
        ) from error


def _refuse_unchosen(script: str) -> NoReturn:
    """Raise the error of a script that has ended well, but in which no recipe chose the loss."""
    raise HostAPIError(
        f"{script} ended without calling the setup that nemo_geomask wrapped; if it has trained, then with NeMo-RL's "
        f"own loss. Put {_SETUP_LINES}"
    )


_wrapped_names: list[tuple[dict[str, Any], str, Any]] = []
"""Namespaces with a wrapped ``setup``, the name that it has there, and NeMo-RL's own function."""


def _wrap_setups(namespace: dict[str, Any]) -> None:
    """Wrap each of NeMo-RL's ``setup`` functions in a namespace."""
    setups = _imported_setups()
    for name, value in list(namespace.items()):
        if isinstance(value, types.FunctionType) and value in setups:
            namespace[name] = with_geomask(value)
            _wrapped_names.append((namespace, name, value))


def _imported_setups() -> set[Callable[..., Any]]:
    """Return NeMo-RL's ``setup`` functions, of the modules that the script has imported."""
    modules = [(sys.modules.get(module), name) for module, name in SETUPS]
    return {getattr(module, name) for module, name in modules if hasattr(module, name)}


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
    _wrap_setups(namespace)
    if not any(map(is_wrapped, namespace.values())):
        raise ConfigError(
            "nemo_geomask.install() found no setup function of NeMo-RL in __main__, so the loss of the recipe could "
            f"not take the place of NeMo-RL's own. Call it after the import of setup, or put {_SETUP_LINES}"
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
    while _wrapped_names:
        namespace, name, original = _wrapped_names.pop()
        if is_wrapped(namespace.get(name)):
            namespace[name] = original


def _set_log_level() -> None:
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


def _check_recipe(arguments: Sequence[str]) -> None:
    """Check that the recipe's loss can be built, and that NeMo-RL can train it."""
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
        fields = neutral_values(getattr(import_nemo_rl(LOSS_MODULE), LOSS_CONFIG, None))
        settings = without_unread_fields(settings, fields)
        with warnings.catch_warnings(action="ignore"):  # NeMo-RL builds the loss again, which repeats the warnings
            config = build_loss(settings).config
        require_honoured(config, recipe)
