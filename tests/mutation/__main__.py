"""Mutation testing of the core, room by room.

``python -m tests.mutation [ROOM …] [--sample N] [--seed S]`` copies the repository to ``build/mutation/<room>``, lets
mutmut change one thing at a time there, and runs the room's tests against each change. A change that no test notices is
a survivor. The exit status is 1 if one survives that ``equivalents.toml`` does not list.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutation.score import EQUIVALENTS, SLOW_TESTS, Mutant, Score, read_equivalents, read_rooms

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
_COPIED = ("nemo_geomask", "tests", "recipes", "docs", "pyproject.toml", "README.md", "LICENSE")
# The empty expression takes the place of pyproject.toml's, which leaves out slow tests; the plugin chooses among them.
_PYTEST_ARGUMENTS = ["-m", "", "-p", "tests.mutation.threaded_ranks", "-p", "no:cacheprovider", "-p", "no:xdist"]


def copy_repository(room: str, settings: dict[str, list[str]]) -> Path:
    """Copy what the room's tests need, with mutmut's settings; return the folder."""
    folder = WORK / room
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    also = [name for name in _COPIED if name not in ("nemo_geomask", "tests", "pyproject.toml")]
    lines = [
        "[tool.mutmut]",
        'source_paths = ["nemo_geomask"]',
        f"only_mutate = {json.dumps(settings['sources'])}",
        f"also_copy = {json.dumps(also)}",
        f"pytest_add_cli_args_test_selection = {json.dumps(settings['tests'])}",
        f"pytest_add_cli_args = {json.dumps(_PYTEST_ARGUMENTS)}",
        "track_dependencies = false",
        "use_git_change_detection = false",
        "use_setproctitle = false",
    ]
    with (folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(lines) + "\n")
    return folder


def test_room(room: str, sample: int, seed: int) -> Score:
    """Run mutmut on one room and return what became of its mutants.

    Raises: SystemExit: mutmut itself failed, such as for a test that fails without any mutation.
    """
    settings = read_rooms()[room]
    folder = copy_repository(room, settings)
    script = Path(__file__).with_name("mutmut_room.py")
    result = folder / "result.json"
    command = [sys.executable, str(script), str(result), str(sample), str(seed)]
    log = folder / "mutmut.log"
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, SLOW_TESTS: ",".join(settings.get("slow_tests", []))},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status or not result.exists():
        raise SystemExit(f"mutmut ended with status {status} on {room}; its output is in {log}")
    outcome = json.loads(result.read_text(encoding="utf-8"))
    return Score(room, outcome["mutants"], [Mutant(**entry) for entry in outcome["outcomes"]])


def main() -> int:
    """Test the rooms of the command line and print their scores and survivors."""
    rooms = read_rooms()
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"{', '.join(rooms)}; all if none is named")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each room, drawn at random; 0: all (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    arguments = parser.parse_args()
    if unknown := set(arguments.rooms) - set(rooms):
        parser.error(f"unknown room {', '.join(sorted(unknown))}; choose from {', '.join(rooms)}")
    equivalents = read_equivalents()
    survivors = 0
    for room in arguments.rooms or rooms:
        score = test_room(room, arguments.sample, arguments.seed)
        print(score.summary(equivalents), flush=True)
        for mutant in score.survivors(equivalents):
            survivors += 1
            print(f"\n{mutant.name}: {mutant.status}\n{mutant.diff}", flush=True)
    if survivors:
        print(f"\n{survivors} survive: write a test that fails for each, or list it in {EQUIVALENTS.relative_to(ROOT)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
