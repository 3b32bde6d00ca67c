"""Our loss under translated settings beside what a peer's own code answered."""

from __future__ import annotations

import functools
import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_geomask.losses import PrestepPass
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.tools.translate import Translation, translate
from tests.tools.translate.peers.problems import Problem, problem

DATA = Path(__file__).parent / "data"
CLOSE = 2e-5
RECORDED = tuple(sorted(path.stem for path in DATA.glob("*.npz")))


@functools.cache
def _arrays(peer: str) -> dict[str, Any]:
    with np.load(DATA / f"{peer}.npz") as file:
        return dict(file)


@functools.cache
def index(peer: str) -> dict[str, Any]:
    """Commit and cases of a peer."""
    return json.loads(bytes(_arrays(peer)["index"]))


def differs(peer: str) -> dict[str, str]:
    """Of a peer's cases that are wholly expressed, those that are expected to differ: in ``loss`` alone, or in ``both``
    loss and gradient."""
    found: dict[str, str] = importlib.import_module(f"tests.tools.translate.peers.of_{peer}").DIFFERS
    return found


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        translation: its settings, translated.
        losses: largest difference of the loss, relative to it or to 1e-3.
        gradients: largest difference of a gradient, relative to the batch's largest entry.
        trained: batches with any gradient.
        skipped: batches that masks empty, on which the peer divides by 0 and ours takes no step.
    """

    translation: Translation
    losses: float
    gradients: float
    trained: int
    skipped: int

    @property
    def verdict(self) -> str:
        """``same``, ``loss`` (the loss differs and the gradient doesn't) or ``both``."""
        return "both" if self.gradients > CLOSE else "loss" if self.losses > CLOSE else "same"


@functools.cache
def compared(peer: str, case: str) -> Compared:
    """Run a case's batches."""
    entry, arrays = index(peer)["cases"][case], _arrays(peer)
    translation = translate(entry["settings"], peer)
    loss_fn, _ = build_with_warnings(translation.loss_fn)
    losses, gradients = arrays[f"loss{entry['array']}"], arrays[f"gradient{entry['array']}"]
    worst_loss = worst_gradient = 0.0
    trained = skipped = start = 0
    for seed, true_loss in enumerate(losses):
        batch = problem(seed)
        chosen = batch.mask != 0
        true = gradients[start : start + int(chosen.sum())]
        start += len(true)
        answer = _ours(loss_fn, batch)
        if answer is None:
            assert math.isnan(true_loss), f"{case}, batch {seed}: ours takes no step"
            skipped += 1
            continue
        value, gradient = answer
        size = np.abs(true).max()
        trained += bool(size > 0)
        worst_loss = max(worst_loss, abs(value - true_loss) / max(abs(true_loss), 1e-3))
        worst_gradient = max(worst_gradient, float(np.abs(gradient[chosen].numpy() - true).max() / max(size, 1e-6)))
    return Compared(translation, worst_loss, worst_gradient, trained, skipped)


def _ours(loss_fn: Any, batch: Problem) -> tuple[float, torch.Tensor] | None:
    data = batch.batch()
    before = PrestepPass(loss_fn.config)
    if before.needed:
        decision = before(data)
        if not decision.train:
            return None
        data |= decision.changes
    curr = batch.curr.clone().requires_grad_()
    value, _ = loss_fn(curr, data, *valid_counts([data]))
    value.backward()
    assert curr.grad is not None
    return value.item(), curr.grad
