"""Losses that ``bench loss`` measures, their random batches, and one step of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.tools.bench.paths.path import import_peer
from nemo_geomask.tools.bench.timing import Clock, Lap

__all__ = [
    "LOSSES",
    "Data",
    "build_nemo_rl_loss",
    "draw_batch",
    "global_counts",
    "loss_gradient",
    "pack_batch",
    "read_metrics",
    "timed",
]

_WEIGHTS = {"use_importance_sampling_correction": True}
_CORRECTED = {**_WEIGHTS, "is_correction_level": "sequence_mean"}
_GEOMETRIC = {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}


def _truncated(truncation: str, low: float | None, high: float) -> dict[str, Any]:
    key = "truncated_importance_sampling"
    return {**_WEIGHTS, f"{key}_type": truncation, f"{key}_ratio_min": low, f"{key}_ratio": high}


# Settings that our clipped_pg and NeMo-RL's class share, with the same meaning.
_SHARED_SETTINGS: dict[str, dict[str, Any]] = {
    "clipped_pg": {},
    "clipped_pg, no KL": {"reference_policy_kl_penalty": 0.0},
    "clipped_pg, dual clip": {"ratio_clip_c": 3.0},
    "clipped_pg, token weights": _WEIGHTS,
    "clipped_pg, tis": _truncated("tis", None, 2.0),
    "clipped_pg, icepop": _truncated("icepop", 0.5, 5.0),
    "clipped_pg, seq-mask-tis": _truncated("seq-mask-tis", 0.999, 1.002),
    "clipped_pg, by sequences": {"token_level_loss": False},
    "clipped_pg, use_cispo": {"use_cispo": True},
    "clipped_pg, disable_ppo_ratio": {"disable_ppo_ratio": True},
    "clipped_pg, force_on_policy_ratio": {"force_on_policy_ratio": True},
}
# For each loss, the settings of ours and those of NeMo-RL's class; None if NeMo-RL's class can't compute the loss.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    **{name: (config, config) for name, config in _SHARED_SETTINGS.items()},
    "gspo": ({"name": "gspo"}, {"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "gspo, sequence_mean weights, geometric mask": ({"name": "gspo", **_CORRECTED, **_GEOMETRIC}, None),
    "gspo_token": ({"name": "gspo_token"}, None),
    "gmpo": ({"name": "gmpo"}, None),
    "cispo": ({"name": "cispo"}, None),
    "sapo": ({"name": "sapo"}, None),
}
_TOKEN_KEYS = ("advantages", PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK)

Data = Mapping[str, Tensor]


def draw_batch(lengths: Tensor, width: int, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw a padded batch: a prompt token and a response of ``lengths`` [B]; return ``curr`` [B, T-1] and the data."""
    rows, draw = len(lengths), torch.Generator().manual_seed(seed)

    def normal(size: float, *shape: int) -> Tensor:
        return size * torch.randn(*shape, dtype=torch.float32, generator=draw)

    gen = -2 * torch.rand(rows, width, dtype=torch.float32, generator=draw)
    prev = gen + normal(0.02, rows, width)
    curr = prev + normal(0.02, rows, width)
    mask = (torch.arange(width) <= lengths.unsqueeze(1)).to(torch.float32)
    mask[:, 0] = 0.0
    data = {
        "advantages": normal(1.0, rows, 1).expand(rows, width).contiguous(),
        PREV_LOGPROBS: prev,
        GENERATION_LOGPROBS: gen,
        REFERENCE_POLICY_LOGPROBS: prev + normal(0.1, rows, width),
        TOKEN_MASK: mask,
        "sample_mask": torch.ones(rows, dtype=torch.float32),
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
    }
    return curr[:, 1:].contiguous().to(device), {key: value.to(device) for key, value in data.items()}


def pack_batch(curr: Tensor, data: Data, lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Pack a padded batch without padding; return its log-probs, its data and the offsets of its sequences."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)

    def rows(values: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])

    packed = {key: rows(data[key][:, 1:]) for key in _TOKEN_KEYS} | {"sample_mask": data["sample_mask"]}
    return rows(curr), packed, offsets


def global_counts(data: Data) -> tuple[Tensor, Tensor]:
    """Return the numbers of valid sequences and tokens, by which a loss is normalised."""
    return data["sample_mask"].sum(), (data[TOKEN_MASK][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()


def loss_gradient(values: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a loss forward and backward; return the gradient of the log-probs ``values``."""
    leaf = values.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def read_metrics(outputs: tuple[Tensor, Mapping[str, float]]) -> Tensor:
    """Return the loss after copying the metrics to the host, as NeMo-RL's loss does in every call."""
    loss, metrics = outputs
    metrics["loss"]
    return loss


def build_nemo_rl_loss(settings: Mapping[str, Any]) -> Any:
    """Build NeMo-RL's ``ClippedPGLossFn`` from settings that differ from its defaults.

    Raises:
        Absent: pydantic or NeMo-RL can't be imported.
    """
    import_peer("pydantic")
    from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE, build_loss_config

    losses = import_peer(LOSS_MODULE)
    return losses.ClippedPGLossFn(build_loss_config(losses.ClippedPGLossConfig, settings))


def timed(clock: Clock, step: Callable[[], Tensor]) -> Callable[[int], Lap]:
    """Return a candidate of :func:`nemo_geomask.tools.bench.timing.interleave` that times a step."""
    return lambda turn: clock.lap(step)
