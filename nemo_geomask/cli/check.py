"""``nemo-geomask check``: prints the objective of a recipe and warns of known mistakes in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_geomask.cli.arguments import positive_number
from nemo_geomask.errors import ConfigError, GeomaskError
from nemo_geomask.recipe import read_recipe
from nemo_geomask.recipe.shipped_files import find_recipe
from nemo_geomask.tools.check import UNCHECKED_SECTIONS
from nemo_geomask.tools.check.bulk_check import bulk_as_text, check_many
from nemo_geomask.tools.check.check_json import CheckOutput, as_json, bulk_as_json, unreadable_as_json
from nemo_geomask.tools.check.check_output import as_text, list_rules
from nemo_geomask.tools.check.recipe_check import CheckedRecipe, CheckOptions, check_recipe
from nemo_geomask.tools.check.recipe_fixes import FixedRecipe, fix_recipe, write_fixes
from nemo_geomask.tools.shared.terminal_text import escape_json, escape_line

EXIT_STATUS = {
    0: "no errors; warnings are printed",
    1: "warnings, under --strict",
    2: "errors, or a recipe that can't be read",
}

_EPILOG = """\
A rule is silenced by --ignore, or by a comment in the recipe or in a file it inherits from:
  # nemo-geomask: ignore GM108, GM110

examples
  nemo-geomask check recipes/llm/grpo-gspo-qwen3-30ba3b-8n8g-megatron-cp2-geomask.yaml
  nemo-geomask check recipe.yaml ++loss_fn.is_correction_level=sequence --gpu A100 --strict --format json
  nemo-geomask check my_recipes/ --strict
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Read a NeMo-RL recipe with everything that it inherits, validate its loss_fn, print the objective, and warn "
        "of settings that are known to cause mismatch, to have no effect, or to be refused by NeMo-RL."
    )
    parser.usage = "nemo-geomask check [options] RECIPE.yaml|DIR ... [key.path=value ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE.yaml",
        help="the recipe; or several recipes, or folders, all of whose recipes are checked",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="settings that replace the recipe's, in NeMo-RL's syntax: ++key.path=value adds a key that is not there",
    )
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="GMnnn,…", help="silence these rules (may be repeated)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    parser.add_argument("--diff", action="store_true", help="print the findings' fixes as a patch, and nothing else")
    parser.add_argument(
        "--fix",
        action="store_true",
        help="write the fixes of errors and warnings into the recipe, set inherited settings there, and check it again",
    )
    parser.add_argument("--gpu", metavar="NAME", help="GPU that samples, such as A100; some rules depend on it")
    parser.add_argument(
        "--mismatch-kl",
        type=positive_number,
        metavar="NATS",
        help="expected mean KL between the engines in nats per token, which a run reports as geomask/mismatch_k3 "
        "(default: the value measured by --from, or what is usual for the recipe's precisions)",
    )
    parser.add_argument(
        "--from",
        dest="similar_run",
        type=Path,
        metavar="DIR",
        help="records or logs of a similar run: use its mismatch and response length, and apply the masks to its last "
        "batches; logs are converted once, into DIR/geomask-records unless --cache says otherwise",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder of the converted logs of --from, if its own can't be written"
    )
    parser.add_argument(
        "--no-import",
        action="store_true",
        help="import no plugin, neither a module:attribute nor an installed one, and judge the rest of the recipe",
    )
    parser.add_argument("--list-rules", action="store_true", help="print the rules and exit")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.list_rules:
        print(list_rules())
        return 0
    words, overrides = _split_words([] if arguments.recipe is None else [arguments.recipe, *arguments.overrides])
    paths = [str(find_recipe(word)) for word in words]
    try:
        if not paths:
            raise ConfigError("check needs a recipe; see nemo-geomask check --help")
        for word, path in zip(words, paths, strict=True):
            if arguments.fix and Path(word) != Path(path):
                raise ConfigError(f"{word}: comes with nemo-geomask; `nemo-geomask recipes` copies it for a fix")
        is_single = len(paths) == 1 and not os.path.isdir(paths[0])
        recipe = read_recipe(paths[0], overrides, leave=UNCHECKED_SECTIONS) if is_single else None
        options = CheckOptions(
            recipe=paths[0],
            overrides=overrides,
            ignore=[rule for group in arguments.ignore for rule in group.split(",") if rule.strip()],
            gpu=arguments.gpu,
            mismatch_kl=arguments.mismatch_kl,
            similar_run=arguments.similar_run,
            cache=arguments.cache,
        )
        if recipe is None:
            return _run_many(paths, options, arguments)
        checked = check_recipe(options, recipe)
        if arguments.fix and _fix([checked]):
            checked = check_recipe(options)
    except GeomaskError as error:
        if arguments.format == "json":
            # Programs that read standard output always get an object; the message also goes to standard error.
            _print_json(unreadable_as_json(arguments.recipe, error.problems))
        raise
    if arguments.diff:
        _print_diff([checked])
    elif arguments.format == "json":
        _print_json(as_json(checked))
    else:
        print(as_text(checked))
    return _status(checked.report.count, arguments)


def _run_many(paths: Sequence[str], options: CheckOptions, arguments: argparse.Namespace) -> int:
    bulk = check_many(paths, options)
    if arguments.fix and _fix(bulk.checked):
        bulk = check_many(paths, options)
    if arguments.diff:
        _print_diff(bulk.checked)
    elif arguments.format == "json":
        _print_json(bulk_as_json(bulk))
    else:
        print(bulk_as_text(bulk))
    return _status(bulk.count, arguments)


def _fix(recipes: Sequence[CheckedRecipe]) -> bool:
    """Write the fixes of recipes into their files, and say on standard error what was fixed; True if anything was."""
    count = 0
    for checked in recipes:
        recipe = checked.facts.recipe
        fixed = fix_recipe(recipe, checked.report.findings)
        if fixed.applied:
            write_fixes(recipe, fixed)
            count += 1
            rules = ", ".join(f"{finding.rule.id} {finding.key}" for finding in fixed.applied)
            print(escape_line(f"{recipe.path}: fixed {rules}"), file=sys.stderr)
        _print_refused(fixed, recipe.path)
    return count > 0


def _print_diff(recipes: Sequence[CheckedRecipe]) -> None:
    for checked in recipes:
        fixed = fix_recipe(checked.facts.recipe, checked.report.findings)
        print(fixed.diff(checked.facts.recipe.path), end="")
        _print_refused(fixed, checked.facts.recipe.path)


def _print_refused(fixed: FixedRecipe, path: Path) -> None:
    for reason in fixed.refused:
        print(escape_line(f"{path}: not fixed: {reason}"), file=sys.stderr)


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the recipes and folders among the words, and the overrides; the first word is a recipe in any case."""
    is_path = [
        index == 0 or ("=" not in word and (word.endswith((".yaml", ".yml")) or os.path.isdir(word)))
        for index, word in enumerate(words)
    ]
    named = list(zip(words, is_path, strict=True))
    return [word for word, path in named if path], [word for word, path in named if not path]


def _status(count: Callable[[str], int], arguments: argparse.Namespace) -> int:
    if count("error"):
        return 2
    return 1 if arguments.strict and count("warning") else 0


def _print_json(output: CheckOutput) -> None:
    print(escape_json(json.dumps(output, ensure_ascii=False, indent=2)))
