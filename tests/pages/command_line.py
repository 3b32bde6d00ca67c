"""Sections of all commands, options and exit statuses, for ``docs/reference/command_line.md``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from nemo_geomask.cli import COMMANDS, create_parser
from nemo_geomask.cli.arguments import all_commands
from nemo_geomask.cli.help_format import COMMON_EXIT_STATUS
from tests.helpers.markdown import markdown_table


def command_sections() -> str:
    """Return the table of exit statuses and a Markdown section for each command."""
    parsers = all_commands(create_parser())
    rows = []
    sections = []
    for command in COMMANDS:
        exit_status = importlib.import_module(command.module).EXIT_STATUS
        rows += [(f"`{command.name}`", str(status), meaning) for status, meaning in exit_status.items()]
        parser = parsers[command.name]
        needs = f"\n\nNeeds `nemo-geomask[{command.extras}]`." if command.extras else ""
        sections.append(f"## {command.name}\n\n{parser.description}{needs}\n")
        sections += _argument_tables(parser, command.name)
    rows += [("every command", str(status), meaning) for status, meaning in COMMON_EXIT_STATUS.items()]
    table = markdown_table(("command", "status", "meaning"), rows)
    return "\n".join([f"## Exit statuses\n\n{table}\n", *sections])


def _argument_tables(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield the table of a command's arguments, or a section with a table for each of its own commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                yield f"### {name} {word}\n\n{subparser.description}\n"
                yield from _argument_tables(subparser, f"{name} {word}")
            return
    yield markdown_table(("argument", "meaning"), _argument_rows(parser)) + "\n"


def _argument_rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = _placeholder(action)
        names = [" ".join(filter(None, (option, value))) for option in action.option_strings] or [value]
        # Angle brackets in a help text are placeholders, not HTML.
        text = (action.help or "") % vars(action)
        text = text.replace("<", "‹").replace(">", "›")
        yield ", ".join(f"`{name}`" for name in names), text


def _placeholder(action: argparse.Action) -> str:
    """Return what stands for the argument's value; empty for a switch."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
