"""Cases of the log-prob benchmark, their random inputs, and the paths' errors against float64 in a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.tools.bench.timing import free_memory

__all__ = ["IGNORE", "LogprobCase", "LogprobSample", "PathOutput", "RandomInputs", "measure_errors"]

IGNORE = -100
_SPREAD = 3.0  # standard deviation of the logits: neither nearly equal nor dominated by one
_ROWS = 6


class LogprobCase(NamedTuple):
    """One measured shape.

    Attributes:
        tokens: number of tokens, T.
        vocab: size of the global vocabulary, V.
        tp: number of equal vocabulary shards, of which the logits are one; no collectives are run.
        fraction: fraction of the tokens that train.
        entropy: True if the entropy and its gradient are also computed.
        temperature: temperature that the logits are divided by.
        dtype: type of the logits.
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
        """Number of columns of the shard."""
        return self.vocab // self.tp

    @property
    def elements(self) -> int:
        """Number of logits."""
        return self.tokens * self.width

    @property
    def min_bytes_per_element(self) -> float:
        """Least memory traffic for each logit: trained rows are read twice, and the gradient is written once."""
        return self.dtype.itemsize * (2 * self.fraction + 1)

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", f"V={self.vocab}{f'/{self.tp}' if self.tp > 1 else ''}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.fraction:g} of the tokens train"] if self.fraction < 1 else []
        parts += [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class LogprobSample(NamedTuple):
    """Random inputs of one run.

    Attributes:
        logits: [T, V/TP], a leaf tensor.
        targets: [T] int64, ``IGNORE`` where a token does not train.
        labels: [T] int64, the targets with 0 in place of ``IGNORE``.
        is_trained: [T] bool, the tokens that train.
        g: [T] float32, incoming gradient of the log-probs, 0 where a token does not train.
        h: [T] float32, incoming gradient of the entropies, 0 where a token does not train.
    """

    logits: Tensor
    targets: Tensor
    labels: Tensor
    is_trained: Tensor
    g: Tensor
    h: Tensor


class PathOutput(NamedTuple):
    """Outputs of a path's forward pass, and the function that computes its gradient.

    Attributes:
        logprobs: [T], or None if the path does not return them.
        entropy: [T], or None if the case has no entropy.
        gradient: function from the incoming gradients (g, h) to the gradient of the logits; h is None without entropy.
    """

    logprobs: Tensor | None
    entropy: Tensor | None
    gradient: Callable[[Tensor, Tensor | None], Tensor]


class RandomInputs:
    """Random inputs of a case, in two buffers that runs use in turn, or in one if a GPU has too little memory."""

    def __init__(self, case: LogprobCase, device: torch.device, *, seed: int = 0) -> None:
        self._case = case
        self._device = device
        self._draw = torch.Generator(device).manual_seed(seed)
        shape = (case.tokens, case.width)
        count = 2
        if device.type == "cuda":
            free_memory()
            free, _ = torch.cuda.mem_get_info(device)
            count = 2 if 8 * case.elements * case.dtype.itemsize < free else 1
        self._buffers = [torch.empty(shape, dtype=case.dtype, device=device) for _ in range(count)]
        self.refresh()

    def refresh(self) -> None:
        """Draw new inputs."""
        case = self._case
        for buffer in self._buffers:
            buffer.normal_(0.0, _SPREAD, generator=self._draw)
        options: dict[str, Any] = {"device": self._device, "generator": self._draw}
        labels = torch.randint(0, case.width, (case.tokens,), **options)
        order = torch.randperm(case.tokens, **options)
        self._is_trained = torch.ones(case.tokens, dtype=torch.bool, device=self._device)
        self._is_trained[order[round(case.fraction * case.tokens) :]] = False
        self._targets = labels.where(self._is_trained, torch.tensor(IGNORE, device=self._device))
        self._labels = labels.where(self._is_trained, torch.tensor(0, device=self._device))
        self._gradients = torch.randn(2, case.tokens, dtype=torch.float32, **options) * self._is_trained

    def take(self, turn: int, *, copy: bool = False) -> LogprobSample:
        """Return the inputs of run number ``turn``, with a copy of the logits for a path that overwrites them."""
        logits = self._buffers[turn % len(self._buffers)]
        leaf = (logits.clone() if copy else logits.detach()).requires_grad_()
        return LogprobSample(leaf, self._targets, self._labels, self._is_trained, *self._gradients)


def measure_errors(sample: LogprobSample, case: LogprobCase, output: PathOutput, gradient: Tensor) -> dict[str, float]:
    """Return the largest errors against float64 in a few rows.

    The last row is left out, because some paths do not compute it.

    Returns:
        ``logprob`` and ``entropy`` in nats; ``gradient`` relative to the largest entry of its row, or absolute if that
        entry is 0.
    """
    trained, masked = sample.is_trained[:-1].nonzero()[:, 0], (~sample.is_trained[:-1]).nonzero()[:, 0]
    rows = torch.cat([_spread_rows(trained, _ROWS), _spread_rows(masked, 2)])
    z = sample.logits.detach()[rows].double() / case.temperature
    logp = z.log_softmax(1)
    p = logp.exp()
    target, is_trained = sample.labels[rows].unsqueeze(1), sample.is_trained[rows]
    entropy = -(p * logp).sum(1)
    expected = -p.scatter_add(1, target, -torch.ones_like(target, dtype=p.dtype)) * sample.g[rows].double().unsqueeze(1)
    if case.entropy:
        expected = expected - sample.h[rows].double().unsqueeze(1) * p * (logp + entropy.unsqueeze(1))
    expected = expected / case.temperature
    scale = expected.abs().amax(1, keepdim=True)
    largest = {"gradient": _largest((gradient[rows].double() - expected) / scale.where(scale > 0, 1.0))}
    if output.logprobs is not None:
        difference = output.logprobs.detach()[rows].double() - logp.gather(1, target).squeeze(1)
        largest["logprob"] = _largest(difference[is_trained])
    if output.entropy is not None:
        largest["entropy"] = _largest((output.entropy.detach()[rows].double() - entropy)[is_trained])
    return largest


def _spread_rows(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` evenly spaced rows, or all rows if there are fewer."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float32, device=rows.device).round().long()]


def _largest(values: Tensor) -> float:
    # max() does not return NaN on every backend.
    return float("nan") if bool(values.isnan().any()) else float(values.abs().max()) if values.numel() else 0.0
