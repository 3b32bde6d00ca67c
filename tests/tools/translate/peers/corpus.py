"""Example configurations of the peers: what translate answers for each, and the losses of those fully expressed.

``python -m tests.tools.translate.peers.corpus PEERS_ROOT`` writes ``data/corpus.json`` and ``data/corpus/*.npz`` from
checkouts. Of a file only its name, the block, the messages and the values of its loss settings are recorded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import translate_files
from tests.tools.translate.peers.record import DATA, FEW, commit_of, record_cases

ANSWERS = DATA / "corpus.json"
EXAMPLES = {
    "verl": (
        "verl",
        "examples/**/*.sh",
        "verl/experimental/**/*.sh",
        "verl/**/config/*.yaml",
        "tests/special_*/**/*.sh",
    ),
    "trl": (
        "trl",
        "examples/scripts/**/*.py",
        "trl/scripts/*.py",
        "examples/cli_configs/*.yaml",
        "examples/**/*.ipynb",
    ),
    "slime": ("slime", "examples/**/*.sh", "scripts/**/*.sh", "examples/**/*.yaml", "tests/*.sh"),
    "areal": ("AReaL", "examples/**/*.yaml", "examples/**/*.sh"),
    "skyrl": (
        "SkyRL",
        "examples/**/*.sh",
        "examples/**/*.yaml",
        "integrations/**/*.sh",
        "skyrl-agent/examples/**/*.sh",
    ),
    "prime_rl": ("prime-rl", "configs/**/*.toml", "examples/**/*.toml", "k8s/**/*.toml"),
    "openrlhf": ("OpenRLHF", "examples/scripts/*.sh"),
    "open_instruct": ("open-instruct", "scripts/train/**/*.sh", "configs/train_configs/**/*.yaml"),
    "fast_llm": ("Fast-LLM", "examples/*.yaml", "fast_llm_external_models/**/examples/*.yaml"),
}
"""For each peer, the folder of its checkout and the patterns of its example configurations."""


def checkout_of(peer: str) -> Path:
    """Return a peer's checkout below ``GEOMASK_PEERS``; skip the test if it is not there."""
    root = os.environ.get("GEOMASK_PEERS")
    if root is None:
        pytest.skip("GEOMASK_PEERS does not name a folder with the peers' checkouts")
    folder = Path(root, EXAMPLES[peer][0])
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


def answer(path: Path, root: Path, peer: str | None = None) -> dict[str, Any]:
    """Return what translate writes for a file, with its exit status."""
    try:
        translation = translate_files([path], peer)
    except ConfigError as error:
        return {"status": 2, "error": str(error).replace(f"{root}/", "")}
    return {
        "status": 1 if translation.not_expressed else 0,
        "peer": translation.peer.name,
        "loss_fn": dict(translation.loss_fn),
        "not_expressed": list(translation.not_expressed),
        "not_read": sorted({key.partition(".")[0] for key in translation.not_read}),
        "settings": dict(translation.loss_settings),
    }


def examples(peer: str, peers_root: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each example configuration of a peer."""
    folder, *patterns = EXAMPLES[peer]
    root = peers_root / folder
    for path in sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()}):
        yield str(path.relative_to(root)), path


def answers(peer: str, peers_root: Path) -> dict[str, Any]:
    """Return the answer for each example configuration of a peer."""
    root = peers_root / EXAMPLES[peer][0]
    return {name: json.loads(json.dumps(answer(path, root), default=str)) for name, path in examples(peer, peers_root)}


def sample(files: dict[str, Any], peer: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the fully expressed files, each by the name of the first file that has them.

    A KL penalty in the reward changes the advantages, not the peer's loss function, which is compared without it.
    """
    runnable = importlib.import_module(f"tests.tools.translate.peers.of_{peer}").RUNNABLE
    chosen: dict[str, dict[str, Any]] = {}
    for name, entry in files.items():
        settings = {key: value for key, value in entry.get("settings", {}).items() if key.startswith(runnable)}
        needs_versions = "proximal_policy" in entry.get("loss_fn", {})  # which the random batches don't have
        if entry["status"] == 0 and not needs_versions and settings not in chosen.values():
            chosen[name] = settings
    return chosen


def record_all(peers_root: Path) -> None:
    """Write the answers and the losses."""
    recorded = {}
    for peer, (folder, *_) in EXAMPLES.items():
        files = answers(peer, peers_root)
        recorded[peer] = {"commit": commit_of(peers_root / folder), "files": files}
        cases = {name: (settings, FEW) for name, settings in sample(files, peer).items()}
        if cases:
            record_cases(peer, peers_root / folder, cases, DATA / "corpus" / f"{peer}.npz")
    ANSWERS.write_text(_as_text(recorded), encoding="utf-8")


def _as_text(recorded: dict[str, Any]) -> str:
    """Return JSON with a line for each file."""
    peers = []
    for peer, entry in recorded.items():
        lines = [
            f"  {json.dumps(name)}: {json.dumps(file, ensure_ascii=False)}" for name, file in entry["files"].items()
        ]
        files = ",\n".join(lines)
        peers.append(f'"{peer}": {{"commit": "{entry["commit"]}", "files": {{\n{files}\n}}}}')
    return "{\n" + ",\n".join(peers) + "\n}\n"


if __name__ == "__main__":
    record_all(Path(sys.argv[1]))
