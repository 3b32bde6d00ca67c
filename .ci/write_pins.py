"""Write the files of exact versions and hashes beside this one, with uv: ``make pins``, ``make pins ARGS=--upgrade``.

The versions that are pinned already stay, unless ``--upgrade`` is given; those of constraints.txt stay in any case.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
UV = Path(sys.executable).with_name("uv")
OWN = {
    "build": ["setuptools"],
    "mutation": ["mutmut"],
    "audit": ["pip-audit", "pip-licenses", "uv"],
    "release": ["build", "check-wheel-contents", "twine"],
    "site": ["myst-parser", "pydata-sphinx-theme", "sphinx", "sphinx-copybutton"],
    "megatron": ["megatron-core"],
}
"""What each list begins with; that of the tests is in pyproject.toml."""
GIVEN = ("vllm", "nemo-rl")
"""Lists whose versions are chosen by hand; only their hashes are written."""


def blocks(text: str) -> dict[str, str]:
    """Return each requirement with its hashes, by its line without them."""
    found = re.findall(r"^([A-Za-z][^\n]*?) *\\\n((?:    --hash[^\n]*\n?)+)", text, re.M)
    return {line: f"{line} \\\n{hashes.rstrip()}\n" for line, hashes in found}


def read(name: str) -> dict[str, str]:
    """Return the requirements of one of the files."""
    path = FOLDER / name
    return blocks(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name: str, requirements: dict[str, str], more: str = "") -> None:
    """Replace the requirements of a file, below the comment that it begins with."""
    path = FOLDER / name
    header = re.match(r"(?:#[^\n]*\n)*", path.read_text(encoding="utf-8"))
    assert header is not None
    path.write_text(header[0] + more + "".join(requirements[line] for line in sorted(requirements)), encoding="utf-8")


def compile_pins(source: Path | str, *options: str) -> dict[str, str]:
    """Return what uv resolves for Python 3.11 and later on any platform, with hashes."""
    command = [str(UV), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", *options, str(source)]
    return blocks(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout)


def is_torch(line: str) -> bool:
    """Return True for torch and what only its CUDA build needs."""
    return re.match(r"(torch|nvidia-|cuda-)", line) is not None


def main(upgrade: bool) -> None:
    """Write all files."""
    kept = (
        {}
        if upgrade
        else read("test-requirements.txt") | read("torch-requirements.txt") | read("build-requirements.txt")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def file(name: str, lines: list[str]) -> str:
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            return str(folder / name)

        chosen = ["-c", ".ci/constraints.txt"]
        tests = compile_pins("pyproject.toml", "--extra", "test", *chosen, "-c", file("kept", list(kept)))
        of_tests = file("tests", list(tests))
        own = {}
        for room, packages in OWN.items():
            before = [] if upgrade else list(read(f"{room}-requirements.txt"))
            alone = ["--no-deps"] if room in ("build", "megatron") else []
            own[room] = compile_pins(
                file(room, packages), *alone, *chosen, "-c", of_tests, "-c", file(f"{room}.kept", before)
            )
        torch = {line: text for line, text in tests.items() if is_torch(line)}
        rest = {line: text for line, text in tests.items() if line not in torch and line not in own["build"]}
        write("torch-requirements.txt", torch)
        write("test-requirements.txt", rest | own["megatron"])
        write("build-requirements.txt", own["build"])
        write("mutation-requirements.txt", {k: v for k, v in own["mutation"].items() if k not in tests})
        for room in ("audit", "release", "site"):
            write(f"{room}-requirements.txt", own[room])
        for room in GIVEN:
            name = f"{room}-constraints.txt"
            (torch_line,) = re.findall(r"^torch==.*\n", (FOLDER / name).read_text(encoding="utf-8"), re.M)
            given = [line for line in read(name) if not line.startswith("torch==")]
            write(name, compile_pins(file(room, given), "--no-deps"), torch_line)


if __name__ == "__main__":
    main("--upgrade" in sys.argv[1:])
