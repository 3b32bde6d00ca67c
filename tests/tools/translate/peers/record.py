"""Record loss and gradient of the peers' own code.

``python -m tests.tools.translate.peers.record PEERS_ROOT [NAME …]`` writes ``data``.

``PEERS_ROOT`` holds their checkouts, ``verl``, ``trl``, …, as files or git repositories; the commit is taken from a
file ``COMMIT`` or from git. Needs torch, numpy and pyyaml; of a peer only single files are run.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tools.translate.peers.batches import random_batch

DATA = Path(__file__).parent / "data"
PEERS = ("verl", "trl", "slime", "areal", "skyrl", "prime_rl", "openrlhf", "open_instruct", "fast_llm")
MANY, FEW = 100, 12


def record(name: str, root: Path) -> None:
    """Run every case of a peer and write its data file."""
    peer = importlib.import_module(f"tests.tools.translate.peers.of_{name}")
    cases = {case: (settings, MANY) for case, settings in getattr(peer, "PRESETS", {}).items()}
    cases |= {case: (settings, FEW) for case, settings in peer.CASES.items()}
    record_cases(name, root, cases, DATA / f"{name}.npz")


def record_cases(name: str, root: Path, cases: Mapping[str, tuple[dict[str, Any], int]], file: Path) -> None:
    """Run cases of a peer, each with its settings and its number of batches, and write the answers to a file."""
    peer = importlib.import_module(f"tests.tools.translate.peers.of_{name}")
    index: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    with peer.loss(root) as loss:
        for number, (case, (settings, count)) in enumerate(cases.items()):
            losses, gradients = [], []
            for seed in range(count):
                batch = random_batch(seed)
                value, gradient = loss(settings, batch)
                losses.append(float(value))
                gradients.append(gradient[batch.mask != 0].numpy())
            index[case] = {"settings": settings, "array": number, "count": count}
            arrays[f"loss{number}"] = np.array(losses)
            arrays[f"gradient{number}"] = np.concatenate(gradients).astype(np.float32)
    description = {"commit": commit_of(root), "cases": index}
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, index=np.frombuffer(json.dumps(description).encode(), np.uint8), **arrays)
    print(f"{name} at {description['commit']}: {len(index)} cases")


def commit_of(root: Path) -> str:
    """Return the commit of a checkout."""
    if (root / "COMMIT").exists():
        return (root / "COMMIT").read_text().strip()
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    for name in sys.argv[2:] or PEERS:
        record(name, Path(sys.argv[1], name))
