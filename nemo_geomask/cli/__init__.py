"""Command line ``nemo-geomask COMMAND …``: the table of commands, and what happens around each of them.

A command is a module of this package with ``add_arguments(parser)``, which declares its arguments and its help,
``run(arguments)``, which does the work and returns the exit status, and ``EXIT_STATUS``, which says what each status
means. It is imported when it is chosen, so that ``--help``, ``--version`` and every other command need none of its
packages.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import select
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

import nemo_geomask
from nemo_geomask.cli.arguments import add_limit_option, all_commands
from nemo_geomask.cli.help_format import COMMON_EXIT_STATUS, HelpFormatter, with_exit_status
from nemo_geomask.errors import GeomaskError
from nemo_geomask.optional import missing_extra
from nemo_geomask.plugin_imports import plugin_imports
from nemo_geomask.tools.shared.terminal_text import escape_lines, escaped_output

__all__ = ["COMMANDS", "Command", "create_parser", "main"]


class Command(NamedTuple):
    """Entry of the table of commands.

    Attributes:
        name: the word on the command line, and with ``_`` in place of ``-`` the name of its module in this package.
        help: one line for ``nemo-geomask --help``.
        imports_plugins: True if a ``module:attribute`` that a recipe or an argument names is imported, if need be from
            the current folder.
        reads_recipes: True if the command reads recipes or other systems' settings, whose size ``--limit`` limits.
        runs_script: True if the command runs a program of the user's in this process, which may exit as it likes and
            print what it likes.
        extras: the package's extras, separated by commas, that install all that the command needs.
    """

    name: str
    help: str
    imports_plugins: bool = False
    reads_recipes: bool = False
    runs_script: bool = False
    extras: str = ""

    @property
    def module(self) -> str:
        """Full name of the command's module."""
        return f"{__name__}.{self.name.replace('-', '_')}"


def _recipe_command(name: str, help: str, extras: str) -> Command:
    return Command(name, help, imports_plugins=True, reads_recipes=True, extras=extras)


COMMANDS = (
    _recipe_command("lab", "train a small MoE policy on the CPU and compare losses", "demo"),
    Command("run", "run a NeMo-RL script with the loss that its recipe names", imports_plugins=True, runs_script=True),
    Command("doctor", "check NeMo-RL, its workers' environments and the registered losses"),
    _recipe_command("check", "explain what a recipe trains, and warn of known mistakes in it", "recipes"),
    Command("diagnose", "find out what is wrong with a run's mismatch, since when, and why", extras="diagnose"),
    _recipe_command("sweep", "replay a run's batches under each correction and mask, and compare them", "diagnose"),
    _recipe_command("translate", "write another system's loss settings as a loss_fn block", "recipes"),
    Command(
        "test-variant",
        "test a loss or correction of your own against the package's promises",
        imports_plugins=True,
        extras="recipes",
    ),
    _recipe_command(
        "rehearse", "run a recipe, shrunk, through NeMo-RL's own workers on this machine", "recipes,diagnose"
    ),
    _recipe_command(
        "probe", "find out which settings make a recipe's sampler and trainer disagree", "recipes,diagnose"
    ),
    Command(
        "bench",
        "measure or estimate what a recipe gains: log-probs, losses and steps beside NeMo-RL's",
        extras="recipes",
    ),
    Command("recipes", "list and copy the recipes and pages that come with this package"),
    Command("schema", "write the JSON Schema of a recipe, for editors"),
    Command("completion", "print a script for a shell that completes commands and options", extras="completion"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; those of the process if None.

    Returns:
        The command's own exit status: 0, or 1 where the command documents one; 2 for a mistake in the arguments, the
        recipe or the installation; 130 after Ctrl-C; 141 if the reader of the output went away (``… | head -1``), as a
        shell reports SIGPIPE.
    """
    try:
        try:
            return _run_command(sys.argv[1:] if argv is None else argv)
        finally:
            # Python's own flush at exit comes too late to be caught. A process may have no standard output, and user
            # code may close it.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        broken_streams = [stream for stream in (sys.stdout, sys.stderr) if _is_reader_gone(stream)]
        if not broken_streams:
            raise  # the command's own pipe or socket broke, such as one to a worker
        for stream in broken_streams:
            # Python writes what is still buffered at exit; send it to where that succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _run_command(argv: Sequence[str]) -> int:
    with _without_current_folder():
        with escaped_output():
            arguments = _parse(argv)
        command: Command = arguments.command
        # A script of the user's prints as it likes.
        with contextlib.nullcontext() if command.runs_script else escaped_output():
            return _run(command, arguments)


def _run(command: Command, arguments: argparse.Namespace) -> int:
    folders = [os.getcwd()] if command.imports_plugins else []
    try:
        with (
            missing_extra(command.name, command.extras),
            plugin_imports(folders, allowed=not getattr(arguments, "no_import", False)),
            _limits_of(arguments),
        ):
            status: int = arguments.run(arguments)
        if status not in arguments.exit_status and status not in COMMON_EXIT_STATUS:
            raise RuntimeError(f"{command.name} ended with status {status}, which its EXIT_STATUS lacks")
    except GeomaskError as error:
        _print_error(*map(str, error.problems))
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        # A command returns its status. The handler of a signal exits with 128 and the signal's number; 256 would be 0.
        if command.runs_script or (isinstance(error.code, int) and 128 < error.code < 256):
            raise
        _print_error(f"code outside this package, such as a plugin's, ended the command: SystemExit({error.code!r})")
        return 2
    return status


def _print_error(*messages: str) -> None:
    """Print an error of one or several problems; a line break within one begins no line of its own."""
    print("nemo-geomask: error: " + "\n".join(map(escape_lines, messages)), file=sys.stderr)


def _limits_of(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Put the limits into effect that ``--limit`` sets, if the command has that option and it is used."""
    words = getattr(arguments, "limit", None)
    if not words:
        return contextlib.nullcontext()
    from nemo_geomask.recipe.input_limits import parse_limits, use_limits

    return use_limits(parse_limits(words))


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep Python from importing packages from the current folder, which ``python -m`` and ``-c`` put first.

    If this package itself lies there, as in a checkout, the folder is searched last, and worker processes find it.
    """
    path = list(sys.path)
    is_first = bool(path) and path[0] in ("", os.getcwd())
    if is_first:
        own_folder = os.path.dirname(os.path.dirname(os.path.abspath(nemo_geomask.__file__)))
        sys.path[:] = [*path[1:], *([own_folder] if own_folder == os.getcwd() else [])]
    try:
        yield
    finally:
        if is_first:
            sys.path[:] = path


def create_parser(chosen: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        chosen: names of the commands whose modules are imported, to declare their arguments; None: all.
    """
    parser = argparse.ArgumentParser(
        prog="nemo-geomask",
        description="Losses for NeMo-RL that measure, correct and mask the gap between the engine that samples and the "
        "engine that trains, and tools around a run.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nemo-geomask {nemo_geomask.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, formatter_class=HelpFormatter)
        if chosen is None or command.name in chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.epilog = with_exit_status(subparser.epilog, module.EXIT_STATUS)
            if command.reads_recipes:
                add_limit_option(subparser)
            subparser.set_defaults(
                run=module.run, command=command, exit_status=module.EXIT_STATUS, parser_of_all=create_parser
            )
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; ``run`` of the namespace is the function of the chosen command."""
    # No option before the command takes a value, so the first word without a dash is the command.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = create_parser([] if chosen is None else [chosen])
    commands = all_commands(parser)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if chosen is not None and chosen not in commands:
        hint = _nearest(chosen, commands) or f"choose from {', '.join(commands)}"
        parser.error(f"there is no command '{chosen}'; {hint}")
    # argparse takes `key.path=value …` only up to the next option. It returns those after an option as unknown.
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [word for word in unknown if word.startswith("-")]
        if not hasattr(arguments, "overrides") or options:
            command = commands[arguments.command.name]
            names = [option for action in command._actions for option in action.option_strings]
            hint = _nearest(options[0].partition("=")[0], names) if options else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; {hint}'}")
        arguments.overrides = [*arguments.overrides, *unknown]
    return arguments


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """Return a question that names the candidate nearest to a mistyped word; empty if none is near."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1)
    return f"did you mean '{nearest[0]}'?" if nearest else ""


def _is_reader_gone(stream: TextIO | None) -> bool:
    """Return True if the other end of a standard stream is closed."""
    try:
        descriptor = stream.fileno() if stream is not None else None
    except ValueError:  # the stream is closed, or is no file
        descriptor = None
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
