"""``nemo-geomask recipes``: list and copy the recipes, the schema and the pages that come with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_geomask.recipe.shipped_files import copy_files, describe_file, inherited_files, select_files, shipped_file

EXIT_STATUS = {
    0: "the files are listed, printed or copied",
    2: "a name is unknown, or a file can't be written",
}

_EPILOG = """\
A recipe's name can be used as it is, in any folder, with check, lab,
rehearse, sweep and translate. To edit a recipe, or to start NeMo-RL with it,
copy it: a file of the current folder comes before the package's.

examples
  nemo-geomask recipes
  nemo-geomask recipes recipes/llm --copy .
  nemo-geomask recipes recipes/lab/demo.yaml --copy my_runs
  nemo-geomask recipes recipes/lab/demo.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "List the recipes, their JSON Schema and the pages of the documentation that come with this package, print "
        "some of them, or copy them into a folder."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="print these files, or copy only these; a folder stands for its files"
    )
    parser.add_argument(
        "--copy",
        type=Path,
        metavar="DIR",
        help="copy the files, with those that they inherit from, into this folder; recipes and pages if none is named",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    names = select_files(arguments.names)
    if arguments.copy is not None:
        copied = copy_files(inherited_files(names), arguments.copy)
        print("\n".join(map(str, copied)))
    elif arguments.names:
        print("".join(shipped_file(name).read_text(encoding="utf-8") for name in names), end="")
    else:
        width = max(map(len, names))
        print("\n".join(f"{name:{width}}  {describe_file(name)}" for name in names))
    return 0
