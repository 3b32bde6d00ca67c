"""What a step reports: sums computed on the device, which reach the host in one copy, when something reads them.

The loss's parts say what they report, as :class:`Metric`; nothing here flows back into the loss. Every metric but the
extrema is a sum over tokens or sequences divided by a global count, so it adds up over microbatches and ranks; what
does not add up is made of those that do, by :func:`summarized`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.segments import Segments

__all__ = ["OWN", "Label", "Metric", "Metrics", "Normalizer", "Over", "Sums", "histogram", "summarized"]

Normalizer = Literal["tokens", "sequences", "none"]
Over = Literal["tokens", "summed", "sequences", "part", "count", "lowest", "highest", "histogram"]
OWN = "geomask/"
"""Prefix of the metrics that NeMo-RL's class has not."""
_BIN = "_bin_"
_LOWEST, _BINS = -13, 34
_LANES = 64
QUANTILES = {"q50": 0.5, "q99": 0.99, "q999": 0.999}


class Label(NamedTuple):
    """What a number is: its names, what it is a sum over, the global count that the metric is divided by, its unit."""

    names: tuple[str, ...]
    over: Over
    divided_by: Normalizer
    unit: float = 1.0


class Metric(NamedTuple):
    """One reported number.

    Attributes:
        names: that it is reported under.
        over: what ``value`` is over. ``tokens``: token layout, float32, finite; its mean over the step's valid tokens
            is reported. ``summed``: 0-d, the sum of such values, each times its token's weight. ``sequences``: [S], the
            mean over its valid sequences. ``part``: 0-d, over this rank's tokens, divided already by the count that
            ``normalizer`` names. ``count``: 0-d, which all ranks that share the sequences hold alike. ``lowest``,
            ``highest``: 0-d, over this rank's tokens. ``histogram``: token layout, integer, the token's bin; the share
            of the step's valid tokens in each is reported.
        value: computes it; not called where the metric is not wanted.
        normalizer: of a ``part``.
        unit: the metric is so many times the sum of ``value``: float32 may not hold a sum in ones.
    """

    names: tuple[str, ...]
    over: Over
    value: Callable[[], Tensor]
    normalizer: Normalizer = "none"
    unit: float = 1.0


class Sums:
    """Reduces what is reported of one microbatch, each metric when it comes: its tensors need not be kept.

    Args:
        weight: token layout, float32; 0 at tokens that don't train.
        sample_mask: [S], float32.
        segments: who belongs to which sequence, and over which ranks.
        full: whether more than NeMo-RL's class reports is wanted.
    """

    def __init__(self, weight: Tensor, sample_mask: Tensor, segments: Segments, *, full: bool) -> None:
        self._weights = {"tokens": weight, "sequences": sample_mask}
        self._segments = segments
        self._full = full
        self._found: dict[Over, list[tuple[Label, Tensor]]] = {over: [] for over in _ORDER}
        self._histograms: list[tuple[str, Tensor]] = []

    def add(self, reports: Iterable[Metric], *, always: bool = False) -> None:
        """Compute and reduce those that are wanted, or all of them."""
        for report in reports:
            self._add(report, always)
            del report  # and its tensors, before the next are made

    def _add(self, report: Metric, always: bool) -> None:
        names, over, compute, normalizer, unit = report
        if not (self._full or always):
            names = tuple(name for name in names if not name.startswith(OWN))
            if not names:
                return
        value = compute()
        if value.requires_grad:
            value = value.detach()
        if over == "histogram":
            self._histograms.append((names[0], _counted(value, self._weights["tokens"])))
            return
        if over == "tokens" or over == "sequences":
            # Not torch.dot: over thousands of ratios near 1 it may lose three digits, which bounds such as 1 + 3e-4
            # need.
            value = (value * self._weights[over]).sum()
            normalizer = over
        elif over == "summed":
            over = normalizer = "tokens"
        self._found[over].append((Label(names, over, normalizer, unit), value))

    @property
    def labels(self) -> tuple[Label, ...]:
        """Of the sums, in their order; known without them, by the settings and by what a batch holds."""
        bins = [Label((bin_,), "tokens", "tokens") for name, _ in self._histograms for bin_ in _bins(name)]
        return (*bins, *(label for over in _ORDER for label, _ in self._found[over]))

    def whole(self, loss: Tensor, *counts: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over all ranks, and the loss, which travels along on a path of its own.

        Args:
            loss: 0-d, this rank's part, with gradient.
            counts: 0-d float32, valid sequences and tokens in the step.

        Returns: the loss's value over all ranks with the gradient of this rank's part; the sums, and the counts behind
        them, as :class:`Metrics` takes them with :attr:`labels`.
        """
        values = _vector([*(value for over in _ORDER for _, value in self._found[over]), *counts])
        values = torch.cat([*(shares for _, shares in self._histograms), values])
        if not self._segments.groups:
            return loss, values
        sums, lowest, highest = (
            sum(len(self._found[over]) for over in kinds) for kinds in (("tokens", "part"), ("lowest",), ("highest",))
        )
        sums += _BINS * len(self._histograms)
        shared, values = sums + lowest + highest, values.double()
        whole_loss, across = self._segments.whole(loss, values[:shared], sums=sums, lowest=lowest)
        return whole_loss, torch.cat([across, values[shared:]])


_ORDER: tuple[Over, ...] = ("tokens", "part", "lowest", "highest", "sequences", "count")


def _vector(values: list[Tensor]) -> Tensor:
    """[k] from 0-d numbers, float32."""
    if not torch.compiler.is_compiling():
        return torch.stack(values)
    # One kernel, where a stack of k reductions is k.
    place = torch.arange(len(values), device=values[0].device)
    found = torch.zeros(len(values), dtype=torch.float32, device=values[0].device)
    for index, value in enumerate(values):
        found = torch.where(place == index, value, found)
    return found


def histogram(name: str, size: Tensor) -> Metric:
    """Of sizes, token layout, float32: shares in bins of half an octave from 2^-13 to 8, which merge as no quantile
    does."""

    def place() -> Tensor:
        # The exponent of the square is the size's logarithm in half octaves, rounded down; its bits hold it plus 127.
        return (size.square().view(torch.int32) >> 23).sub_(126 + 2 * _LOWEST).clamp_(0, _BINS - 1)

    return Metric((name,), "histogram", place)


def _counted(bins: Tensor, weight: Tensor) -> Tensor:
    """Summed weights of each bin."""
    if not bins.is_cuda:
        # Row by row: a graph would divide to find a flat token's row and column.
        rows = weight.new_zeros(*weight.shape[:-1], _BINS).scatter_add(-1, bins.long(), weight)
        return rows.view(-1, _BINS).sum(dim=0)
    # A GPU adds to one address one after the other, and most tokens are of few bins.
    lanes = torch.arange(bins.numel(), dtype=bins.dtype, device=bins.device).remainder_(_LANES)
    found = weight.new_zeros(_LANES * _BINS).index_add(0, bins.flatten() + _BINS * lanes, weight.flatten())
    return found.view(_LANES, _BINS).sum(dim=0)


def _bins(name: str) -> tuple[str, ...]:
    return tuple(f"{name}{_BIN}{index:02}" for index in range(_BINS))


def summarized(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a whole step, with those in place of sums that only a whole step has.

    A histogram's bins become its quantiles, exact within a bin, a factor of √2 (``geomask/mismatch_q50``, ``…_q99``,
    ``…_q999``), and the moments of the weight its effective sample size as a share, (Σw)² / (n·Σw²)
    (``geomask/weight_ess``).

    Args:
        metrics: added up over the step's microbatches and ranks, extrema aside.
    """
    found = dict(metrics)
    for first in [name for name in metrics if name.endswith(f"{_BIN}00")]:
        name = first.removesuffix(f"{_BIN}00")
        keys = _bins(name)
        if not all(key in metrics for key in keys):
            continue  # no histogram, whatever it is called
        shares = [found.pop(key) for key in keys]
        # A sum of maxima, where something added them up, exceeds the last bin with anything in it.
        last = max((index for index, share in enumerate(shares) if share > 0), default=0)
        edge = 2 ** (_LOWEST + last / 2) if last < _BINS - 1 else math.inf
        found[f"{name}_max"] = highest = min(metrics.get(f"{name}_max", edge), edge)
        found |= {f"{name}_{key}": min(highest, _quantile(shares, share)) for key, share in QUANTILES.items()}
    mean, square = metrics.get(f"{OWN}weight_mean"), metrics.get(f"{OWN}weight_sq")
    # Of the step's tokens or sequences: some have no weight, since they hold NaN.
    live = metrics.get(f"{OWN}weight_live", 1.0)
    if mean is not None and square and live:
        found[f"{OWN}weight_ess"] = mean * mean / (square * live)
    return found


def _quantile(shares: Sequence[float], share: float) -> float:
    """By the logarithm within a bin; in the first, which begins at 0, in proportion."""
    target, below = share * sum(shares), 0.0
    for index, here in enumerate(shares):
        if here and below + here >= target:
            part, edge = (target - below) / here, 2 ** (_LOWEST + (index - 1) / 2)
            return edge * 2 ** (part / 2) if index else part * 2.0**_LOWEST
        below += here
    return 0.0


class Metrics(MutableMapping[str, float]):
    """A step's metrics by name: plain floats, copied from the device when the first of them is read.

    What a trainer does with a dict of floats it may do with this: read, assign, add, delete, copy, pickle (as the plain
    dict). Names and their number are known without reading.

    Args:
        labels: of the numbers in ``values``.
        values: [k+2], one for each label, then the step's valid sequences and tokens.
    """

    def __init__(self, labels: Sequence[Label], values: Tensor) -> None:
        self._floats: dict[str, float] = {name: 0.0 for label in labels for name in label.names}
        self._pending: tuple[Sequence[Label], Tensor] | None = (labels, values)

    def _read(self) -> dict[str, float]:
        if self._pending is not None:
            labels, values = self._pending
            *numbers, seqs, toks = values.tolist()
            # A count of 0 meets only sums that are 0. The keys stand there already: a trainer may be iterating.
            counts = {"tokens": toks or 1.0, "sequences": seqs or 1.0}
            for (names, over, _, unit), number in zip(labels, numbers, strict=True):
                number *= unit / counts.get(over, 1.0)
                for name in names:
                    self._floats[name] = number
            self._pending = None
        return self._floats

    def __getitem__(self, name: str) -> float:
        return self._read()[name]

    def __setitem__(self, name: str, value: float) -> None:
        self._read()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._floats)

    def __len__(self) -> int:
        return len(self._floats)

    def __contains__(self, name: object) -> bool:
        return name in self._floats

    def __or__(self, other: Any) -> dict[str, float]:
        return {**self._read(), **other}

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._read(),)

    def copy(self) -> dict[str, float]:
        """A plain dict."""
        return dict(self._read())
