"""Reader of files with settings: YAML, JSON, TOML, Python, a notebook, a shell script or command line."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.input_limits import check_values, current_limits, limit_error, parse_text, read_text
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, ExpansionBudget, check_code, flat, parse_yaml
from nemo_geomask.tools.translate.shell_reader import ProgramRun, program_runs

_PARSERS = ("TrlParser", "HfArgumentParser")
"""Classes that make an object of a configuration class from a command line."""


def code_of_notebook(text: str, source: object) -> str:
    """Return the Python code of a notebook, without its magics and shell commands; ``source`` names it in errors.

    Raises:
        ConfigError: the text is not a notebook, or exceeds a limit of input.
    """
    notebook = parse_text(json.loads, text, source, format_name="JSON")
    try:
        cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells).splitlines()
    except (KeyError, TypeError):
        raise ConfigError(f"{source}: is not a notebook: it has no list of cells with their source") from None
    return "\n".join("pass" if line.startswith(("%", "!")) else line for line in lines)


def constructions(text: str, constructors: Sequence[str], source: object = "the code") -> list[ProgramRun]:
    """Return the settings of each call of a configuration class, as a run of a program of that name.

    A class that is handed to a parser of the command line has the settings of the command in the file's docstring, and
    those that the file assigns afterwards. Without any such class, the items of all dicts are returned, as one program
    without a name.

    Args:
        text: Python code.
        constructors: names of configuration classes.
        source: name of the file, for errors.

    Raises:
        SyntaxError: the text is not Python.
        ValueError: ``**name`` stands for a mapping that is not literal.
        InputLimitError: the values are too large.
    """
    tree = ast.parse(text)
    runs = _runs_in(tree, constructors, ExpansionBudget(source))
    for run in runs:
        check_values(run.settings, source)
    return runs


def _runs_in(tree: ast.Module, constructors: Sequence[str], budget: ExpansionBudget) -> list[ProgramRun]:
    nodes = list(ast.walk(tree))
    calls = [(node, _dotted_name(node.func)) for node in nodes if isinstance(node, ast.Call)]
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    runs = [
        ProgramRun(
            next(name for name in names if name in constructors),
            dict(_arguments(node, names, constructors, assigned, budget)),
        )
        for node, names in calls
        if set(names) & {*constructors}
    ]
    parsed: dict[str, None] = {}  # in order; the settings of a class are those of the file, however often it is parsed
    for node, names in calls:
        if names[-1:] and names[-1] in _PARSERS:
            arguments = (name.id for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in constructors)
            if (constructor := next(arguments, None)) is not None:
                parsed[constructor] = None
    runs += [_parsed_from_command_line(tree, nodes, constructor, budget) for constructor in parsed]
    if runs:
        return runs
    entries = (entry for node in nodes for entry in _dict_entries(node) or ())
    # A dict that is the value of an entry is skipped here: ast.walk visits it, too.
    settings = {name: _literal(value, budget) for name, value in entries if _dict_entries(value) is None}
    return [ProgramRun("", settings)] if settings else []


def _dotted_name(node: ast.expr) -> list[str]:
    """Return the parts of ``a.b.c``; of ``f(…).b.c``, those after the call."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)]


def _arguments(
    call: ast.Call,
    names: Sequence[str],
    constructors: Sequence[str],
    assigned: dict[str, ast.expr],
    budget: ExpansionBudget,
) -> Iterator[tuple[str, Any]]:
    if names[-1] not in constructors:  # a factory method, such as Config.decoupled_seq_is(…)
        yield "preset", names[-1]
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _literal(keyword.value, budget)
            continue
        spread = ast.unparse(keyword.value)
        mapping = _literal(assigned.get(spread, keyword.value), budget)
        if not isinstance(mapping, dict):
            raise ValueError(f"**{spread} is not a literal dict; write its settings in place of it")
        yield from mapping.items()


def _parsed_from_command_line(
    tree: ast.Module, nodes: Sequence[ast.AST], constructor: str, budget: ExpansionBudget
) -> ProgramRun:
    commands = [run for run in program_runs(_commands_of(ast.get_docstring(tree) or "")) if run.program.endswith(".py")]
    settings = dict(commands[0].settings) if len(commands) == 1 else {}
    unread = (*(commands[0].unread if len(commands) == 1 else ("the command line, from which its settings come",)),)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            owner, _, name = ast.unparse(node.targets[0]).rpartition(".")
            if owner in ("training_args", "grpo_args", "args"):
                settings[name] = _literal(node.value, budget)
    return ProgramRun(constructor, settings, unread, is_from_docstring=len(commands) == 1)


def _commands_of(docstring: str) -> str:
    """Return the lines of a docstring that start or continue a command."""
    kept, continues = [], False
    for line in docstring.splitlines():
        if (
            continues
            or line.split(" ")[0].split("=")[0] in ("python", "python3", "accelerate", "trl", "torchrun", "uv")
            or (line[:1].isupper() and "=" in line.split(" ")[0])
        ):
            kept.append(line)
            continues = line.endswith("\\")
        else:
            continues = False
    return "\n".join(kept)


def _dict_entries(node: ast.AST) -> list[tuple[str, ast.expr]] | None:
    """Return the entries of a dict display or a ``dict(…)`` call; None for anything else."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
    return None


def _literal(value: ast.expr, budget: ExpansionBudget) -> Any:
    """Return the value of a literal; for other expressions, their code marked as unresolved."""
    entries = _dict_entries(value)
    if entries is not None:
        return {name: _literal(inner, budget) for name, inner in entries}
    for _ in ast.walk(value):
        budget.add("items", 1)  # a literal may hold others that are read, too
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):  # the second for a list in a set, or as a key
        code = ast.unparse(value)
        budget.add("characters", len(code))  # an expression may hold others that are read, too
        return UNRESOLVED + code


def read_runs(path: Path, constructors: tuple[str, ...]) -> list[ProgramRun]:
    """Return the settings in a file, one entry for each program or class that the file gives settings to.

    Args:
        path: the file. ``.yaml``, ``.yml``, ``.json`` and ``.toml`` are read in their formats, as settings of a program
            without a name. In a ``.py`` file or a notebook the settings are the keyword arguments of calls of
            ``constructors`` or, without such a call, the items of dicts. Any other file is read as a shell script.
        constructors: names of configuration classes.

    Returns:
        Settings by dotted name; a value that the file does not contain has
        :data:`~nemo_geomask.tools.translate.setting_values.UNRESOLVED` in it.

    Raises:
        ConfigError: the file can't be read, or contains no settings by name.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: can't be read: it is not text in UTF-8 ({error})") from None
    limits = current_limits()
    try:
        match path.suffix:
            case ".yaml" | ".yml" | ".json":
                runs = [_of_mapping(path, parse_yaml(text, path))]
            case ".toml":
                runs = [_of_mapping(path, _parse_toml(text, path))]
            case ".py":
                runs = constructions(check_code(text, path), constructors, path)
            case ".ipynb":
                runs = constructions(check_code(code_of_notebook(text, path), path), constructors, path)
            case _:
                runs = program_runs(text, path.parent, path)
        return [run.with_settings(flat(run.settings, path)) for run in runs]
    except ConfigError:
        raise
    except (RecursionError, MemoryError):  # Python's parser raises the second for code that is nested too deeply
        raise limit_error("nesting", path, limits) from None
    except (ValueError, SyntaxError) as error:
        if "integer string conversion" in str(error):
            raise ConfigError(f"{path}: an integer has more than 4,300 digits, which Python does not read") from None
        raise ConfigError(f"{path}: can't be read: {' '.join(str(error).split())}") from None


def read_settings(path: Path, constructors: tuple[str, ...]) -> dict[str, Any]:
    """Return all settings in a file, by dotted name, whatever program they belong to."""
    return {name: value for run in read_runs(path, constructors) for name, value in run.settings.items()}


def _parse_toml(text: str, path: Path) -> Any:
    """Return a TOML document. Keys of very many parts, whose time is quadratic in tomllib, are refused before."""
    limits = current_limits()
    key = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
    if re.search(rf"(?<![\w-]){key}(?:\s*+\.\s*+{key}){{{limits.nesting}}}", text):
        raise limit_error("nesting", path, limits)
    return parse_text(tomllib.loads, text, path, format_name="TOML")


def _of_mapping(path: Path, settings: Any) -> ProgramRun:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: must hold settings by name, but it holds a {type(settings).__name__}")
    return ProgramRun("", dict(settings))
