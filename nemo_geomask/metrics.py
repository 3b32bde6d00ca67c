"""Metrics of a step: sums computed on the device, which reach the host in one copy when the first of them is read.

The modules of the loss report :class:`Metric` objects; the loss never reads them. Every metric except minima and maxima
is a sum over tokens or sequences divided by a global count, so that metrics of microbatches and ranks can be added up.
:func:`summarize_step` derives the quantities that can't be added up, such as quantiles, from such sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.segments import Segments

Normalizer = Literal["tokens", "sequences", "none"]
Reduction = Literal["tokens", "token_sum", "sequences", "local_sum", "shared_count", "min", "max", "histogram"]
GEOMASK_PREFIX = "geomask/"
"""Prefix of the metrics that NeMo-RL's own loss doesn't report."""
# A histogram is reported as metrics <name>_bin_00 to <name>_bin_33. Bin 0 ends at 2**_MIN_EXPONENT.
_BIN = "_bin_"
_MIN_EXPONENT, _BINS = -13, 34
# Number of separate copies of a histogram that a GPU fills before it adds them up.
_GPU_LANES = 64
QUANTILES = {"q50": 0.5, "q99": 0.99, "q999": 0.999}
"""Probability of each quantile that takes the place of a histogram, by the suffix of its metric."""


class Label(NamedTuple):
    """Description of a reduced number; the fields are those of :class:`Metric`.

    ``normalizer`` is the global count that divides the metric, also where the reduction implies it.
    """

    names: tuple[str, ...]
    reduction: Reduction
    normalizer: Normalizer
    unit: float = 1.0


class Metric(NamedTuple):
    """One number to report.

    Attributes:
        names: names that it is reported under.
        reduction: what ``value`` returns and how it is reduced, see the list below.
        value: function that computes the value; not called if the settings leave out the metric.
        normalizer: global count by which a ``local_sum`` has been divided.
        unit: factor by which the reduced value is multiplied: -1 for the opposite sign, or a power of 2 for sums that
            would not fit into float32.

    Reductions:

    - ``tokens``: token layout, float32, finite; the mean over the step's valid tokens is reported.
    - ``token_sum``: 0-d, the sum over this rank's tokens of a token's value times its weight; reported as ``tokens``.
    - ``sequences``: [S], the mean over the step's valid sequences is reported.
    - ``local_sum``: 0-d, a sum over this rank's tokens, already divided by the count that ``normalizer`` names.
    - ``shared_count``: 0-d, the same on all ranks that share the sequences, reported as it is.
    - ``min``, ``max``: 0-d, over this rank's tokens.
    - ``histogram``: token layout, integer, the bin of each token; the fraction of the step's valid tokens in each bin
      is reported.
    """

    names: tuple[str, ...]
    reduction: Reduction
    value: Callable[[], Tensor]
    normalizer: Normalizer = "none"
    unit: float = 1.0


class MetricSums:
    """Reduced metrics of one microbatch.

    Each metric is reduced to a 0-d tensor (a histogram to its bins) as it is added, so that its token tensors need not
    be kept.

    Args:
        weight: token layout, float32; 0 at tokens that aren't trained.
        sample_mask: [S], float32.
        segments: layout of the tokens, and the ranks that share the sequences.
        is_full: whether to compute the metrics that NeMo-RL's own loss doesn't report.
    """

    def __init__(self, weight: Tensor, sample_mask: Tensor, segments: Segments, *, is_full: bool) -> None:
        self._weights = {"tokens": weight, "sequences": sample_mask}
        self._segments = segments
        self._is_full = is_full
        self._reduced: dict[Reduction, list[tuple[tuple[Any, ...], Tensor]]] = {reduction: [] for reduction in _ORDER}
        self._histograms: list[tuple[str, Tensor]] = []

    def add(self, reports: Iterable[Metric], *, always: bool = False) -> None:
        """Compute and reduce the metrics that the settings request, or all of them if ``always``."""
        for report in reports:
            self._add(report, always)
            del report  # frees its tensors before a generator makes the next ones

    def _add(self, report: Metric, always: bool) -> None:
        names, reduction, compute, normalizer, unit = report
        if not (self._is_full or always):
            names = _names_of_nemo_rl(names)
            if not names:
                return
        value = compute()
        if value.requires_grad:
            value = value.detach()
        if reduction == "histogram":
            self._histograms.append((names[0], _bin_sums(value, self._weights["tokens"])))
            return
        if reduction == "tokens" or reduction == "sequences":
            # torch.dot may lose three digits over thousands of ratios near 1, too many for bounds such as 1 + 3e-4.
            value = (value * self._weights[reduction]).sum()
            normalizer = reduction
        elif reduction == "token_sum":
            reduction = normalizer = "tokens"
        self._reduced[reduction].append(((names, reduction, normalizer, unit), value))

    @property
    def labels(self) -> tuple[Label, ...]:
        """Labels of the numbers that :meth:`reduce_over_ranks` returns, in their order."""
        bin_names = [bin_name for name, _ in self._histograms for bin_name in _bin_names(name)]
        bins = [Label((bin_name,), "tokens", "tokens") for bin_name in bin_names]
        return (*bins, *(Label(*label) for reduction in _ORDER for label, _ in self._reduced[reduction]))

    def reduce_over_ranks(self, loss: Tensor, *counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the metrics over all ranks that share the sequences, by one collective.

        Args:
            loss: 0-d, this rank's part, with gradient.
            counts: 0-d float32, the numbers of valid sequences and of valid tokens in the step, in this order.

        Returns: the loss, with its value over all ranks and the gradient of this rank's part; the reduced metrics
        followed by the counts, as :class:`Metrics` takes them together with :attr:`labels`.
        """
        values = _vector([*(value for reduction in _ORDER for _, value in self._reduced[reduction]), *counts])
        values = torch.cat([*(bin_sums for _, bin_sums in self._histograms), values])
        if not self._segments.groups:
            return loss, values
        # The values that differ between ranks come first; those by sequence and the counts are the same on all ranks.
        reduced = self._reduced
        sums = _BINS * len(self._histograms) + len(reduced["tokens"]) + len(reduced["local_sum"])
        minima, maxima = len(reduced["min"]), len(reduced["max"])
        local, values = sums + minima + maxima, values.double()
        global_loss, global_values = self._segments.reduce_over_ranks(
            loss, values[:local], num_sums=sums, num_minima=minima
        )
        return global_loss, torch.cat([global_values, values[local:]])


@functools.cache
def _names_of_nemo_rl(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the names that NeMo-RL's own loss reports, too."""
    return tuple(name for name in names if not name.startswith(GEOMASK_PREFIX))


_ORDER: tuple[Reduction, ...] = ("tokens", "local_sum", "min", "max", "sequences", "shared_count")
"""Order of the reduced numbers, after the bins of the histograms, in the vector of :class:`Metrics`."""


def _vector(values: list[Tensor]) -> Tensor:
    """Return [k] float32 from k 0-d tensors."""
    if not torch.compiler.is_compiling():
        return torch.stack(values)
    # Inductor fuses the loop below into one kernel, whereas torch.stack would take one kernel for each of its inputs.
    position = torch.arange(len(values), device=values[0].device)
    vector = torch.zeros(len(values), dtype=torch.float32, device=values[0].device)
    for index, value in enumerate(values):
        vector = torch.where(position == index, value, vector)
    return vector


def histogram(name: str, size: Tensor) -> Metric:
    """Return the histogram of token values.

    Unlike quantiles, histograms of microbatches and ranks can be added up. From 2^-13 to 8 each bin is a factor of √2
    wide. The first bin holds all smaller values, the last all others.

    Args:
        name: prefix of the names of the bins.
        size: token layout, float32, at least 0.
    """

    def bin_index() -> Tensor:
        # The bin depends on floor(2·log2(size)), which is the binary exponent of size². Bits 23 to 30 of a float32 are
        # its exponent plus 127. To read them takes a tenth of the time of frexp or log2 on a CPU.
        biased_exponent = size.square().view(torch.int32) >> 23
        return (biased_exponent - (127 + 2 * _MIN_EXPONENT - 1)).clamp(0, _BINS - 1)

    return Metric((name,), "histogram", bin_index)


def _bin_sums(bins: Tensor, weight: Tensor) -> Tensor:
    """Return the summed weights of each bin, [_BINS]."""
    if bins.is_cuda:
        return _bin_sums_in_lanes(bins, weight)
    # The bins are summed row by row. With a flattened index, compiled code would compute each token's row and column by
    # a division.
    row_sums = weight.new_zeros(*weight.shape[:-1], _BINS).scatter_add(-1, bins.long(), weight)
    return row_sums.view(-1, _BINS).sum(dim=0)


def _bin_sums_in_lanes(bins: Tensor, weight: Tensor) -> Tensor:
    """Return what :func:`_bin_sums` does, fast on a GPU.

    A GPU serialises additions to one address, and most tokens fall into a few bins. So neighbouring tokens are added to
    separate copies of the histogram, the lanes.
    """
    lanes = torch.arange(bins.numel(), dtype=bins.dtype, device=bins.device).remainder_(_GPU_LANES)
    lane_sums = weight.new_zeros(_GPU_LANES * _BINS).index_add(0, bins.flatten() + _BINS * lanes, weight.flatten())
    return lane_sums.view(_GPU_LANES, _BINS).sum(dim=0)


def _bin_names(name: str) -> tuple[str, ...]:
    """Return the metric names of the bins of the histogram ``name``."""
    return tuple(f"{name}{_BIN}{index:02}" for index in range(_BINS))


def summarize_step(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics with quantiles in place of histograms, and with the effective sample size.

    The bins of a histogram are replaced by its quantiles (``geomask/mismatch_q50``, ``…_q99``, ``…_q999``), which are
    exact up to the width of a bin, a factor of √2. The mean and the mean square of the weight w give its effective
    sample size as a fraction of the n tokens or sequences, ``geomask/weight_ess`` = (Σw)² / (n·Σw²). Its square root,
    of the weights before truncation, is ``geomask/lr_factor``, by which VCPO (arXiv:2602.17616) multiplies the step's
    learning rate.

    Args:
        metrics: a complete step's metrics, added up over its microbatches and ranks, except minima and maxima.
    """
    summary = dict(metrics)
    for first_bin in [name for name in metrics if name.endswith(f"{_BIN}00")]:
        name = first_bin.removesuffix(f"{_BIN}00")
        bin_names = _bin_names(name)
        if not all(bin_name in metrics for bin_name in bin_names):
            continue  # another metric whose name happens to end like a bin
        fractions = [summary.pop(bin_name) for bin_name in bin_names]
        # A training loop that adds up the maxima of microbatches reports too large a maximum. The upper edge of the
        # last bin that is not empty bounds it.
        last = max((index for index, fraction in enumerate(fractions) if fraction > 0), default=0)
        edge = 2 ** (_MIN_EXPONENT + last / 2) if last < _BINS - 1 else math.inf
        maximum = min(metrics.get(f"{name}_max", edge), edge)
        summary[f"{name}_max"] = maximum
        for suffix, probability in QUANTILES.items():
            summary[f"{name}_{suffix}"] = min(maximum, _quantile(fractions, probability))
    mean, square = metrics.get(f"{GEOMASK_PREFIX}weight_mean"), metrics.get(f"{GEOMASK_PREFIX}weight_sq")
    # Fraction of the step's valid tokens or sequences that have a weight. Those with non-finite values have none.
    live = metrics.get(f"{GEOMASK_PREFIX}weight_live", 1.0)
    if mean is not None and square and live:
        summary[f"{GEOMASK_PREFIX}weight_ess"] = mean * mean / (square * live)
        raw_mean, raw_square = (metrics.get(f"{GEOMASK_PREFIX}weight_raw_{name}", 0.0) for name in ("mean", "sq"))
        if raw_square:
            summary[f"{GEOMASK_PREFIX}lr_factor"] = min(1.0, raw_mean / math.sqrt(raw_square * live))
    return summary


def kept_factor(step_metrics: Mapping[str, float]) -> float:
    """Return G/K, by which ``denominator: kept_in_loss`` has a step's gradient multiplied before clip and optimiser.

    Args:
        step_metrics: a complete step's metrics, added up over its microbatches and data-parallel ranks.

    Returns: trained tokens by tokens that the masks keep; 1 if they keep none, as the gradient is then 0.
    Source: NeMo-RL PR 4171.
    """
    kept = step_metrics[f"{GEOMASK_PREFIX}kept_tokens"]
    return 1.0 / kept if kept > 0 else 1.0


def _quantile(fractions: Sequence[float], probability: float) -> float:
    """Return a quantile of binned values, interpolated in the logarithm, or linearly in the first bin."""
    target, below = probability * sum(fractions), 0.0
    for index, fraction in enumerate(fractions):
        if fraction and below + fraction >= target:
            position = (target - below) / fraction
            if index == 0:
                return position * 2.0**_MIN_EXPONENT
            return 2 ** (_MIN_EXPONENT + (index - 1) / 2) * 2 ** (position / 2)
        below += fraction
    return 0.0


class Metrics(MutableMapping[str, float]):
    """A step's metrics by name: plain floats, copied from the device when the first of them is read.

    A trainer can use this like a dict of floats: read, assign, add, delete, copy, pickle (as a plain dict). Iterating
    over the names and ``len`` copy nothing.

    Args:
        labels: descriptions of the numbers in ``values``.
        values: [k+2], one for each label, then the step's valid sequences and tokens.
    """

    def __init__(self, labels: Sequence[Label], values: Tensor) -> None:
        self._floats: dict[str, float] = {name: 0.0 for label in labels for name in label.names}
        self._pending: tuple[Sequence[Label], Tensor] | None = (labels, values)

    def _read(self) -> dict[str, float]:
        """Return all metrics as floats; the first call copies them from the device."""
        if self._pending is not None:
            labels, values = self._pending
            *numbers, seqs, toks = values.tolist()
            # If a count is 0, the sums that it divides are 0 too.
            counts = {"tokens": toks or 1.0, "sequences": seqs or 1.0}
            # Only values of existing keys change, since the caller may be iterating over the keys.
            for (names, reduction, _, unit), number in zip(labels, numbers, strict=True):
                number *= unit / counts.get(reduction, 1.0)
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
        """Return a plain dict."""
        return dict(self._read())
