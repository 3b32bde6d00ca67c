"""Layers and operators at which the two sides part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_geomask.optional import require
from nemo_geomask.tools.probe.gap_statistics import k3_of
from nemo_geomask.tools.probe.ledger import NEGLIGIBLE_K3

numpy: Any = require("numpy", "the probe's statistics need", "diagnose")

_ROUNDINGS = 16.0
"""Roundings of the coarser dtype that an operator's output may differ by without standing out."""
_EPSILONS = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11, "torch.float32": 2.0**-24}
_FLOAT32_FLOOR = _ROUNDINGS * _EPSILONS["torch.float32"]


@dataclass(frozen=True)
class LayerDifferences:
    """Differences of hidden states between trainer and engine."""

    grown: Mapping[str, float]  # by layer, the relative difference of its output as both sides run
    arising: Mapping[str, float]  # by operator, the relative difference of its output for the engine's own input
    floor: float  # relative difference that rounding explains
    routes: Mapping[str, float]  # by layer, the share of tokens with other experts as both sides run
    routes_of_same_input: Mapping[str, float]  # the same for the engine's own input
    # k3 in nats a token between the engine's prefill and the trainer's head on the engine's last hidden states; None
    # if it was not computed
    head_k3: float | None
    # first operator, in the order of the forward pass, whose difference for the same input exceeds the floor; empty
    # if there is none
    first: str
    error: str = ""  # why nothing was compared; empty if something was

    @property
    def is_equal(self) -> bool:
        """True if hidden states and head agree within float32's rounding: the sides part after the logits or in decode.

        Within the rounding of a coarser dtype they do not: that rounding may be the whole mismatch.
        """
        if self.error or self.first or self.head_k3 is None or not self.grown:
            return False
        return self.head_k3 <= NEGLIGIBLE_K3 and max(self.grown.values()) <= _FLOAT32_FLOOR * len(self.grown)


def layer_differences(
    layers: Mapping[str, Any] | None, prefill: Sequence[Sequence[float]], dtypes: Sequence[str]
) -> LayerDifferences:
    """Return the differences of hidden states that a start has measured.

    Args:
        layers: ``layers`` of the start's answer.
        dtypes: texts that name the dtypes of both sides' weights; the coarsest counts.
    """
    if layers is None or layers["error"]:
        reason = "no hidden states were compared" if layers is None else layers["error"]
        return LayerDifferences({}, {}, 0.0, {}, {}, None, "", reason)
    epsilons = [epsilon for name, epsilon in _EPSILONS.items() if any(name in text for text in dtypes)]
    floor = _ROUNDINGS * max(epsilons, default=_EPSILONS["torch.float32"])
    as_they_run, replayed = layers["own"], layers["replayed"]
    arising = {name: value for name, value in replayed.items() if not name.endswith("router")}
    head = layers["head"]
    deltas = [numpy.asarray(trainer) - numpy.asarray(engine) for trainer, engine in zip(head, prefill, strict=False)]
    # A layer's own output comes after those of its operators, which are what a reader can look for.
    ordered = sorted(arising, key=_place)
    return LayerDifferences(
        grown={name: value for name, value in as_they_run.items() if name.endswith("layer")},
        arising={name: arising[name] for name in ordered},
        floor=floor,
        routes={name: value for name, value in as_they_run.items() if name.endswith("router")},
        routes_of_same_input={name: value for name, value in replayed.items() if name.endswith("router")},
        head_k3=float(k3_of(numpy.concatenate(deltas)).mean()) if deltas else None,
        first=next((name for name in ordered if arising[name] > floor), ""),
    )


_ORDER = ("attention norm", "attention", "MLP norm", "MLP", "layer")


def _place(name: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,9}) (.+)$", name)
    return (int(match[1]), _ORDER.index(match[2])) if match and match[2] in _ORDER else (1 << 30, 0)
