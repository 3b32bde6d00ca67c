"""Run mutmut on one copy of the repository, in a process of its own; ``__main__`` starts it in that copy.

mutmut forks its workers from this process, which must not have imported the repository's own ``tests`` before. Strings
that are sentences are left alone: the words of an error are not what mutation testing judges.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from mutmut.__main__ import _run, collect_source_file_mutation_data, create_mutants
from mutmut.mutation import mutators
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import change_cwd, copy_also_copy_files, copy_src_dir


def leave_sentences_alone() -> None:
    """Take mutants of strings with a space out of mutmut's operators."""
    change_string = mutators.operator_string

    def change_names_only(node):
        if " " not in getattr(node, "value", ""):
            yield from change_string(node)

    operators = mutators.mutation_operators
    operators[:] = [(kind, change_names_only if change is change_string else change) for kind, change in operators]


def choose_tests_by_name() -> None:
    """Let pytest collect the files of a mutant's tests, leave out the others, and run the quickest first.

    mutmut names the tests on the command line, where pytest does not find all of them by their parameters.
    """

    def run_tests(self, *, mutant_name, tests):
        wanted = set(tests)

        class Chosen:
            def pytest_collection_modifyitems(self, items):
                items[:] = [item for item in items if not wanted or item.nodeid in wanted]
                items.sort(key=lambda item: state().duration_by_test.get(item.nodeid, 0.0))

        files = sorted({name.partition("::")[0] for name in wanted})
        with change_cwd("mutants"):
            return int(self.execute_pytest(self._pytest_args_regular_run(files), plugins=[Chosen()]))

    PytestRunner.run_tests = run_tests


def all_mutants() -> list[str]:
    """Write the mutated sources and return the names of the mutants."""
    Path("mutants").mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
    return sorted(name for _, name, _ in collect_source_file_mutation_data(mutant_names=())[0])


def main(result: str, size: int, seed: int) -> None:
    """Test a sample of the mutants, or all of them for a size of 0, and write what became of each as JSON."""
    leave_sentences_alone()
    choose_tests_by_name()
    names = all_mutants()
    sample = random.Random(seed).sample(names, size) if 0 < size < len(names) else names
    try:
        _run(tuple(sample), 1)
    finally:
        outcomes = []
        for data, name, exit_code in collect_source_file_mutation_data(mutant_names=sample)[0]:
            status = status_by_exit_code[exit_code]
            diff = "" if status == "killed" else get_diff_for_mutant(name, path=data.path)
            outcomes.append({"name": name, "file": str(data.path), "status": status, "diff": diff})
        Path(result).write_text(json.dumps({"mutants": len(names), "outcomes": outcomes}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
