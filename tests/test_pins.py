"""What CI installs is exact and by hash, and what has no hash is checked or says why."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LISTS = sorted([*(ROOT / ".ci").glob("*-requirements.txt"), *(ROOT / ".ci").glob("*-constraints.txt")])


def entries(path):
    """Each requirement of a list, with its hashes."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=")
        yield Requirement(requirement.strip()), [item.strip() for item in hashes]


@pytest.fixture
def check_hashes():
    spec = importlib.util.spec_from_file_location("check_hashes", ROOT / ".ci" / "check_hashes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_requirement_is_exact_and_has_hashes(path):
    found = list(entries(path))
    assert found
    for requirement, hashes in found:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", item) for item in hashes), requirement
        if not hashes:
            assert requirement.name == "torch"
            assert "torch has no" in path.read_text(encoding="utf-8")


def test_the_versions_that_were_chosen_are_the_pinned_ones():
    pins = [entry for name in ("test", "torch") for entry, _ in entries(ROOT / ".ci" / f"{name}-requirements.txt")]
    text = re.sub(r"^#.*\n", "", (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    for chosen in map(Requirement, text.splitlines()):
        for version in ("3.11", "3.13"):
            here = {"python_version": version, "python_full_version": f"{version}.1", "sys_platform": "linux"}
            if chosen.marker is None or chosen.marker.evaluate(here):
                (pin,) = (
                    str(pin.specifier).removeprefix("==")
                    for pin in pins
                    if canonicalize_name(pin.name) == canonicalize_name(chosen.name)
                    and (pin.marker is None or pin.marker.evaluate(here))
                )
                assert chosen.specifier.contains(pin), chosen


def test_all_that_the_tests_require_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, wanted, required = project["optional-dependencies"], ["test"], [*project["dependencies"]]
    for extra in wanted:
        for item in map(Requirement, extras[extra]):
            if item.name == "nemo-geomask":
                wanted += [name for name in item.extras if name not in wanted]
            else:
                required.append(str(item))
    pinned = {
        canonicalize_name(entry.name)
        for name in ("build", "test", "torch")
        for entry, _ in entries(ROOT / ".ci" / f"{name}-requirements.txt")
    }
    assert {canonicalize_name(Requirement(item).name) for item in required} <= pinned
    assert "megatron-core" in pinned


def artifact(url, digest):
    info = {"hashes": {"sha256": digest}} if digest else {}
    return {"metadata": {"name": "torch", "version": "2"}, "download_info": {"url": url, "archive_info": info}}


def test_what_came_over_a_network_must_be_listed(check_hashes, tmp_path, capsys):
    listed, other = "a" * 64, "b" * 64
    remote, local = "https://index/torch.whl", "file:///wheels/torch.whl"
    assert check_hashes.unlisted({"install": [artifact(remote, listed), artifact(local, other)]}, {listed}) == []
    for digest in (other, None):
        (problem,) = check_hashes.unlisted({"install": [artifact(remote, digest)]}, {listed})
        assert problem == f"torch 2 from {remote}: sha256 {digest} is not listed"
    report, hashes = tmp_path / "report.json", tmp_path / "hashes.txt"
    hashes.write_text(f"torch==2 \\\n    --hash=sha256:{listed}\n", encoding="utf-8")
    for digest, status in ((listed, 0), (other, 1)):
        report.write_text(check_hashes.json.dumps({"install": [artifact(remote, digest)]}), encoding="utf-8")
        assert check_hashes.main(str(report), str(hashes)) == status
    assert "is not listed in" in capsys.readouterr().err
