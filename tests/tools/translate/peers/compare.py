"""Comparison of this package's loss, under translated settings, with the recorded answers of a peer's loss."""

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
from tests.tools.translate.peers.batches import RandomBatch, random_batch

DATA = Path(__file__).parent / "data"
CLOSE = 2e-5
RECORDED = tuple(sorted(path.stem for path in DATA.glob("*.npz")))


@functools.cache
def _arrays(peer: str, folder: str = "") -> dict[str, Any]:
    with np.load(DATA / folder / f"{peer}.npz") as file:
        return dict(file)


@functools.cache
def index(peer: str, folder: str = "") -> dict[str, Any]:
    """Return the commit and the cases of a peer."""
    return json.loads(bytes(_arrays(peer, folder)["index"]))


def expected_differences(peer: str) -> dict[str, str]:
    """Return the fully expressed cases of a peer that still differ: in ``loss`` alone, or in ``both``, gradient too."""
    found: dict[str, str] = importlib.import_module(f"tests.tools.translate.peers.of_{peer}").DIFFERS
    return found


@dataclass(frozen=True)
class Comparison:
    """Differences between the two losses over the batches of one case.

    Attributes:
        translation: translation of the case's settings.
        losses: largest difference of the loss, relative to it or to 1e-3.
        gradients: largest difference of a gradient, relative to the batch's largest entry.
        trained: number of batches with a gradient other than 0.
        skipped: number of batches without a kept token: the peer divides by 0, this package takes no step.
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
def compare_case(peer: str, case: str, folder: str = "") -> Comparison:
    """Compare the losses on all batches of a case."""
    entry, arrays = index(peer, folder)["cases"][case], _arrays(peer, folder)
    translation = translate(entry["settings"], peer)
    loss_fn, _ = build_with_warnings(translation.loss_fn)
    losses, gradients = arrays[f"loss{entry['array']}"], arrays[f"gradient{entry['array']}"]
    worst_loss = worst_gradient = 0.0
    trained = skipped = start = 0
    for seed, peer_loss in enumerate(losses):
        batch = random_batch(seed)
        is_trained = batch.mask != 0
        peer_gradient = gradients[start : start + int(is_trained.sum())]
        start += len(peer_gradient)
        answer = _evaluate(loss_fn, batch)
        if answer is None:
            assert math.isnan(peer_loss), f"{case}, batch {seed}: this package takes no step"
            skipped += 1
            continue
        value, gradient = answer
        size = np.abs(peer_gradient).max()
        trained += bool(size > 0)
        worst_loss = max(worst_loss, abs(value - peer_loss) / max(abs(peer_loss), 1e-3))
        worst_gradient = max(
            worst_gradient, float(np.abs(gradient[is_trained].numpy() - peer_gradient).max() / max(size, 1e-6))
        )
    return Comparison(translation, worst_loss, worst_gradient, trained, skipped)


def _evaluate(loss_fn: Any, batch: RandomBatch) -> tuple[float, torch.Tensor] | None:
    data = batch.nemo_rl_data()
    prestep = PrestepPass(loss_fn.config)
    if prestep.needed:
        decision = prestep(data)
        if not decision.train:
            return None
        data |= decision.changes
    curr = batch.curr.clone().requires_grad_()
    value, _ = loss_fn(curr, data, *valid_counts([data]))
    value.backward()
    assert curr.grad is not None
    return value.item(), curr.grad
