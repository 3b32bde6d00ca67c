"""Cases of the log-prob benchmark, their random inputs, and the float64 truth at a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.bench.clock import release

__all__ = ["IGNORE", "Answer", "Case", "Inputs", "Sample", "errors"]

IGNORE = -100
_SPREAD = 3.0  # standard deviation of the logits: a distribution neither flat nor decided
_ROWS = 6


class Case(NamedTuple):
    """One measured shape.

    Attributes:
        tokens: T.
        vocab: V, the whole vocabulary.
        tp: the logits are one of this many equal shards; nothing crosses ranks.
        fraction: share of the tokens that train.
        entropy: whether the entropy and its gradient are wanted too.
        temperature: divides the logits.
        dtype: of the logits.
    """

    tokens: int
    vocab: int
    tp: int = 1
    fraction: float = 1.0
    entropy: bool = False
    temperature: float = 1.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        """Columns of the shard."""
        return self.vocab // self.tp

    @property
    def elements(self) -> int:
        """Logits."""
        return self.tokens * self.width

    @property
    def floor(self) -> float:
        """Bytes an element that have to move: trained rows are read twice, and the whole gradient is written."""
        return self.dtype.itemsize * (2 * self.fraction + 1)

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", f"V={self.vocab}{f'/{self.tp}' if self.tp > 1 else ''}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.fraction:g} of the tokens train"] if self.fraction < 1 else []
        parts += [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class Sample(NamedTuple):
    """Inputs of one run.

    Attributes:
        logits: [T, V/TP], a leaf.
        targets: [T] int64, ``IGNORE`` where a token does not train.
        labels: [T] int64, the targets with 0 in place of ``IGNORE``.
        kept: [T] bool.
        g: [T] float32, incoming gradient of the log-probs, 0 where a token does not train.
        h: [T] float32, that of the entropy.
    """

    logits: Tensor
    targets: Tensor
    labels: Tensor
    kept: Tensor
    g: Tensor
    h: Tensor


class Answer(NamedTuple):
    """What a path computed forward, and how its gradient is had.

    Attributes:
        logprobs: [T], or None where the path keeps them to itself.
        entropy: [T], where it was asked for.
        gradient: from (g, h) to the gradient of the logits; h is None without entropy.
    """

    logprobs: Tensor | None
    entropy: Tensor | None
    gradient: Callable[[Tensor, Tensor | None], Tensor]


class Inputs:
    """Random inputs of a case, fresh whenever asked for, in buffers that take turns."""

    def __init__(self, case: Case, device: torch.device, *, seed: int = 0) -> None:
        self._case = case
        self._device = device
        self._draw = torch.Generator(device).manual_seed(seed)
        shape = (case.tokens, case.width)
        count = 2
        if device.type == "cuda":
            release()
            free, _ = torch.cuda.mem_get_info(device)
            count = 2 if 8 * case.elements * case.dtype.itemsize < free else 1
        self._buffers = [torch.empty(shape, dtype=case.dtype, device=device) for _ in range(count)]
        self.refresh()

    def refresh(self) -> None:
        """Draw everything anew."""
        case = self._case
        for buffer in self._buffers:
            buffer.normal_(0.0, _SPREAD, generator=self._draw)
        where: dict[str, Any] = {"device": self._device, "generator": self._draw}
        labels = torch.randint(0, case.width, (case.tokens,), **where)
        order = torch.randperm(case.tokens, **where)
        self._kept = torch.ones(case.tokens, dtype=torch.bool, device=self._device)
        self._kept[order[round(case.fraction * case.tokens) :]] = False
        self._targets = labels.where(self._kept, torch.tensor(IGNORE, device=self._device))
        self._labels = labels.where(self._kept, torch.tensor(0, device=self._device))
        self._gradients = torch.randn(2, case.tokens, dtype=torch.float32, **where) * self._kept

    def take(self, turn: int, *, copy: bool = False) -> Sample:
        """Inputs for the run numbered ``turn``; ``copy`` for one that overwrites its logits."""
        logits = self._buffers[turn % len(self._buffers)]
        leaf = (logits.clone() if copy else logits.detach()).requires_grad_()
        return Sample(leaf, self._targets, self._labels, self._kept, *self._gradients)


def errors(sample: Sample, case: Case, answer: Answer, gradient: Tensor) -> dict[str, float]:
    """Largest errors against float64, at a few rows: the last one aside, which some paths have no use for.

    Returns:
        ``logprob`` and ``entropy`` in nats; ``gradient`` relative to the largest entry of its row, and absolute where
        that is 0.
    """
    trained, masked = sample.kept[:-1].nonzero()[:, 0], (~sample.kept[:-1]).nonzero()[:, 0]
    rows = torch.cat([_some(trained, _ROWS), _some(masked, 2)])
    z = sample.logits.detach()[rows].double() / case.temperature
    logp = z.log_softmax(1)
    p = logp.exp()
    own, kept = sample.labels[rows].unsqueeze(1), sample.kept[rows]
    entropy = -(p * logp).sum(1)
    truth = -p.scatter_add(1, own, -torch.ones_like(own, dtype=p.dtype)) * sample.g[rows].double().unsqueeze(1)
    if case.entropy:
        truth = truth - sample.h[rows].double().unsqueeze(1) * p * (logp + entropy.unsqueeze(1))
    truth = truth / case.temperature
    scale = truth.abs().amax(1, keepdim=True)
    found = {"gradient": _largest((gradient[rows].double() - truth) / scale.where(scale > 0, 1.0))}
    if answer.logprobs is not None:
        difference = answer.logprobs.detach()[rows].double() - logp.gather(1, own).squeeze(1)
        found["logprob"] = _largest(difference[kept])
    if answer.entropy is not None:
        found["entropy"] = _largest((answer.entropy.detach()[rows].double() - entropy)[kept])
    return found


def _some(rows: Tensor, count: int) -> Tensor:
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float32, device=rows.device).round().long()]


def _largest(values: Tensor) -> float:
    # max() would let NaN pass on some backends.
    return float("nan") if bool(values.isnan().any()) else float(values.abs().max()) if values.numel() else 0.0
