"""Properties that the package promises of every loss, each as a check of a loss on a batch."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.batch import read
from nemo_geomask.losses.evaluate import evaluate
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.losses.raw_batch import requested_tensors, take_padded
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments, PaddedSegments
from nemo_geomask.testing.gradient_check import find_gradient_error
from nemo_geomask.testing.nonfinite_origin import describe_origin

# If its terms are added in another order, a float32 sum changes by a relative 2**-24 for each term. Some hundred terms
# are added, and they may cancel.
_RELATIVE_TOLERANCE = 2e-5
_ABSOLUTE_TOLERANCE = 2e-6
_COLUMNS = 16  # T - 1; a multiple of 2·CP for 1, 2, 4 and 8 context-parallel ranks
_RANKS = 2  # number of context-parallel ranks
_JUNK = (math.nan, math.inf, -math.inf, 1e6)  # values written to tokens that don't train

Batch = dict[str, Tensor]
"""NeMo-RL's batch: tensors [B, T] and [B]. The log-probs of the current policy have the key ``curr``; their first
column is unused."""
Counts = tuple[Tensor, Tensor]
"""Number of valid sequences and number of valid tokens of the optimiser step, both 0-d."""


@dataclass(frozen=True)
class Promise:
    """A property that every loss must have.

    Attributes:
        name: the property in a few words.
        find_violation: function of a loss and a batch; returns a message that says how the loss breaks the promise, or
            "" if it keeps it.
    """

    name: str
    find_violation: Callable[[PolicyLoss, Batch], str]


class LossOutcome(NamedTuple):
    """Value, gradient and metrics of a loss on a batch."""

    value: float
    gradient: Tensor
    """Gradient by the current policy's log-probs, in their layout."""
    metrics: Mapping[str, float]


def uneven_batch() -> Batch:
    """Return a batch of rows of different lengths; one has tool tokens, one is empty, one has a sample mask of 0."""
    generator = torch.Generator().manual_seed(7)
    lengths = (16, 9, 13, 5, 0, 7)
    shape = (len(lengths), _COLUMNS + 1)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    tilt = torch.linspace(-0.15, 0.15, len(lengths)).unsqueeze(1)
    gen = -0.2 - 2.0 * torch.rand(shape, generator=generator)
    prev = gen + tilt + normal(0.2)
    mask = (torch.arange(shape[1]) >= 1) & (torch.arange(shape[1]) <= torch.tensor(lengths).unsqueeze(1))
    mask[2, 5:8] = False
    sign = torch.tensor([1.0, -1.0]).repeat(len(lengths) // 2).unsqueeze(1)
    return {
        "curr": prev + tilt + normal(0.3),
        PREV_LOGPROBS: prev,
        GENERATION_LOGPROBS: gen,
        REFERENCE_POLICY_LOGPROBS: prev + normal(0.3),
        "advantages": sign * (0.3 + torch.rand(shape, generator=generator)),
        TOKEN_MASK: mask.float(),
        "sample_mask": torch.tensor([1.0] * (len(lengths) - 1) + [0.0]),
        "rewards": sign[:, 0],
    }


def evaluate_padded(loss: PolicyLoss, batch: Batch, counts: Counts | None = None) -> LossOutcome:
    """Call the loss on padded rows; the gradient is [B, T-1]. By default ``counts`` are those of the batch."""
    curr = batch["curr"][:, 1:].clone().requires_grad_()
    value, metrics = loss.for_prepared_batches()(curr, batch, *(counts or valid_counts([batch])))
    return LossOutcome(value.item(), _gradient(value, curr), dict(metrics))


def _evaluate_packed(
    loss: PolicyLoss, batch: Batch, *, rank: int = 0, world: int = 1, groups: Sequence[Any] = ()
) -> tuple[LossOutcome, Tensor]:
    """Call the loss on this rank's shard of the packed rows; also return the indices of its tokens among B·(T-1)."""
    rows = batch["curr"].shape[0]
    segments = PackedSegments(
        list(range(0, (rows + 1) * _COLUMNS, _COLUMNS)), cp_rank=rank, cp_size=world, groups=tuple(groups)
    )
    token_indices = segments.token_index
    data = {key: value[:, 1:].reshape(-1)[token_indices] if value.dim() == 2 else value for key, value in batch.items()}
    curr = data["curr"].clone().requires_grad_()
    value, metrics = loss.for_prepared_batches().packed(curr, data, segments, *valid_counts([batch]))
    return LossOutcome(value.item(), _gradient(value, curr), dict(metrics)), token_indices


def _gradient(value: Tensor, curr: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, curr, allow_unused=True)
    return torch.zeros_like(curr) if gradient is None else gradient


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.6g}"


def _is_close(value: float, expected: float) -> bool:
    return value == expected or math.isclose(value, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)


def describe_difference(subject: str, outcome: LossOutcome, expected: LossOutcome) -> str:
    """Return a sentence that says how ``outcome`` differs from ``expected`` by more than rounding; "" if it doesn't.

    Args:
        subject: what produced the outcome; the subject of the sentence.
        outcome: the outcome to check.
        expected: the outcome to compare with; its gradient has the same shape.
    """
    if math.isnan(outcome.value) != math.isnan(expected.value):
        return f"{subject} gives a loss of {_number(outcome.value)} instead of {_number(expected.value)}"
    if not _is_close(outcome.value, expected.value):
        return (
            f"{subject} gives a loss of {outcome.value:.6g} instead of {expected.value:.6g}; the surrogate must not "
            "sum or average over tokens: return one loss for each token, and get means over a sequence through pool"
        )
    error = (outcome.gradient - expected.gradient).abs()
    if not (error <= _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * expected.gradient.abs()).all():
        size = expected.gradient.abs().max().item()
        return (
            f"{subject} gives a gradient that is off by up to {error.max().item():.2g}; the largest component of the "
            f"expected gradient is {size:.2g}"
        )
    if set(outcome.metrics) != set(expected.metrics):
        names = sorted(set(outcome.metrics) ^ set(expected.metrics))
        return f"{subject} reports other metrics; only one of the two has {', '.join(names)}"
    for name, value in outcome.metrics.items():
        if not _is_close(value, expected.metrics[name]):
            return f"{subject} reports {name} = {value:.6g} instead of {expected.metrics[name]:.6g}"
    return ""


def has_same_bits(outcome: LossOutcome, expected: LossOutcome) -> bool:
    """Return True if values, gradients (the sign of 0 included) and metrics are the same to the bit."""
    return (
        outcome.value == expected.value
        and math.copysign(1.0, outcome.value) == math.copysign(1.0, expected.value)
        and torch.equal(outcome.gradient.view(torch.int32), expected.gradient.view(torch.int32))
        and outcome.metrics == expected.metrics
    )


def _sum_microbatches(outcomes: Sequence[LossOutcome]) -> LossOutcome:
    """Add up microbatches as NeMo-RL does: extrema by minimum and maximum, everything else by sum."""
    metrics = {}
    for name in outcomes[0].metrics:
        combine: Callable[[list[float]], float] = (
            min if name.endswith("_min") else max if name.endswith("_max") else sum
        )
        metrics[name] = combine([outcome.metrics[name] for outcome in outcomes])
    gradient = torch.cat([outcome.gradient for outcome in outcomes])
    return LossOutcome(sum(outcome.value for outcome in outcomes), gradient, metrics)


def find_split_difference(
    loss: PolicyLoss, batch: Batch, counts: Counts | None = None, cuts: Sequence[int] = (1, 4)
) -> str:
    """Return a message if the sum over microbatches differs from the whole batch, else "".

    Args:
        loss: the loss to check.
        batch: the whole batch.
        counts: as for :func:`evaluate_padded`.
        cuts: index of the first row of each microbatch but the first.
    """
    counts = counts or valid_counts([batch])
    bounds = [0, *cuts, len(batch["curr"])]
    parts = [
        evaluate_padded(loss, {key: tensor[start:end] for key, tensor in batch.items()}, counts)
        for start, end in itertools.pairwise(bounds)
        if len(batch["curr"][start:end])
    ]
    expected = evaluate_padded(loss, batch, counts)
    return describe_difference(f"the sum over {len(parts)} microbatches", _sum_microbatches(parts), expected)


def _find_packing_difference(loss: PolicyLoss, batch: Batch) -> str:
    packed, _ = _evaluate_packed(loss, batch)
    padded = evaluate_padded(loss, batch)
    return describe_difference("the packed row", packed, padded._replace(gradient=padded.gradient.reshape(-1)))


def _evaluate_shard(
    rank: int, world: int, pickled_loss: bytes, batch: Batch
) -> tuple[float, list[float], dict[str, float], list[int]]:
    import torch.distributed as dist

    loss = pickle.loads(pickled_loss)
    (value, gradient, metrics), token_indices = _evaluate_packed(
        loss, batch, rank=rank, world=world, groups=(dist.group.WORLD,)
    )
    return value, gradient.tolist(), dict(metrics), token_indices.tolist()


def _find_context_parallel_difference(loss: PolicyLoss, batch: Batch) -> str:
    expected = evaluate_padded(loss, batch)
    expected = expected._replace(gradient=expected.gradient.reshape(-1))
    shards = run_ranks(_RANKS, _evaluate_shard, pickle.dumps(loss), batch, timeout=300)
    gradient = torch.zeros_like(expected.gradient)
    for _, shard_gradient, _, token_indices in shards:
        gradient[torch.tensor(token_indices)] = torch.tensor(shard_gradient)
    for value, _, metrics, _ in shards:
        difference = describe_difference("a context-parallel rank", LossOutcome(value, gradient, metrics), expected)
        if difference:
            return difference
    return ""


def find_influence_of_untrained(
    loss: PolicyLoss, batch: Batch, counts: Counts | None = None, junk: Sequence[float] = _JUNK
) -> str:
    """Return a message if values at tokens that don't train change the loss, its gradient or its metrics, else "".

    Even a change of the last bit counts. The values in ``junk`` are written to these tokens, one after another.
    """
    counts = counts or valid_counts([batch])
    is_untrained = (batch[TOKEN_MASK] * batch["sample_mask"].unsqueeze(1)) == 0
    is_untrained[:, 0] = True
    clean = evaluate_padded(loss, batch, counts)
    for junk_value in junk:
        dirty = {
            key: tensor.masked_fill(is_untrained, junk_value)
            for key, tensor in batch.items()
            if tensor.dim() == 2 and tensor.is_floating_point() and key != TOKEN_MASK
        }
        dirty["rewards"] = batch["rewards"].masked_fill(batch["sample_mask"] == 0, junk_value)
        if not has_same_bits(evaluate_padded(loss, batch | dirty, counts), clean):
            return f"{junk_value} at tokens that don't train changes the loss, its gradient or its metrics"
    if clean.gradient[is_untrained[:, 1:]].view(torch.int32).any():
        return "tokens that don't train have a gradient"
    return ""


def _find_nan(loss: PolicyLoss, batch: Batch) -> str:
    """Return where NaN or infinity first appears on an ordinary batch, and on each of its rows alone, else ""."""
    counts = valid_counts([batch])
    if problem := _find_nan_statistic(loss, batch):
        return problem
    rows = range(len(batch["curr"]))
    parts = {"": batch, **{f" on row {row} alone": {k: v[row : row + 1] for k, v in batch.items()} for row in rows}}
    for place, part in parts.items():
        outcome = evaluate_padded(loss, part, counts)
        nan_metrics = [name for name, value in outcome.metrics.items() if math.isnan(value)]
        nonfinite_tokens = int((~outcome.gradient.isfinite()).sum())
        if not math.isfinite(outcome.value):
            problem = f"the loss is {_number(outcome.value)}{place}"
        elif nonfinite_tokens:
            nonfinite_as = "NaN" if outcome.gradient.isnan().any() else "infinite"
            problem = f"the gradient is {nonfinite_as} at {nonfinite_tokens} tokens{place}"
        elif nan_metrics:
            problem = f"{nan_metrics[0]} is NaN{place}"
        if problem:
            return problem + describe_origin(loss, part, counts)
    return ""


def _find_nan_statistic(loss: PolicyLoss, batch: Batch) -> str:
    """Return which plugin's mask statistic is NaN at trained tokens, else ""; such tokens would silently be kept."""
    raw = take_padded(batch["curr"][:, 1:], batch, requested_tensors(loss.config))
    tokens = read(raw, PaddedSegments(), loss.config.ratio_anchor)
    for rule in loss.config.mask_rules:
        if rule.plugin_statistic is not None:
            values = rule.plugin_statistic.of(*tokens.compared_logprobs(rule.log_ratio))[tokens.is_trained]
            if values.isnan().any():
                code = getattr(rule.plugin_statistic.of, "__code__", None)
                where = (
                    f"; see {Path(code.co_filename).name}, line {code.co_firstlineno}, {code.co_name}" if code else ""
                )
                return (
                    f"statistic {rule.statistic} is NaN at {int(values.isnan().sum())} of {values.numel()} trained "
                    f"tokens, which no bound would remove{where}"
                )
    return ""


def find_nonfinite(loss: PolicyLoss, batch: Batch, counts: Counts | None = None) -> str:
    """Return a message if the loss or its gradient is not finite on the batch, else ""."""
    outcome = evaluate_padded(loss, batch, counts)
    if math.isfinite(outcome.value) and outcome.gradient.isfinite().all():
        return ""
    return "extreme log-ratios give a loss or a gradient that is not finite; use F.saturating_exp"


def _find_overflow(loss: PolicyLoss, batch: Batch) -> str:
    # The log-ratios of even and odd rows have opposite signs, so that products and means are extreme on both sides.
    offset = torch.where(torch.arange(len(batch["curr"])) % 2 == 0, 100.0, -100.0).unsqueeze(1)
    anchor, other = batch["curr"] - offset, batch["curr"]
    prev, gen = (anchor, other) if loss.config.ratio_anchor == "prev" else (other, anchor)
    return find_nonfinite(loss, batch | {PREV_LOGPROBS: prev, GENERATION_LOGPROBS: gen})


def find_pickle_difference(loss: PolicyLoss, batch: Batch, counts: Counts | None = None) -> str:
    """Return a message if the unpickled loss differs from the original, even in the last bit, else ""."""
    copy = pickle.loads(pickle.dumps(loss))
    if not has_same_bits(evaluate_padded(copy, batch, counts), evaluate_padded(loss, batch, counts)):
        return "the unpickled loss gives another loss, gradient or metric"
    if copy.metric_normalizations != loss.metric_normalizations:
        return "the unpickled loss has other metric_normalizations"
    return ""


def _find_graph_difference(loss: PolicyLoss, batch: Batch) -> str:
    raw = take_padded(batch["curr"][:, 1:], batch, requested_tensors(loss.config))
    raw = raw._replace(batch_scalars=loss.batch_scalars(batch, batch["curr"].device))
    counts = [count.float() for count in valid_counts([batch])]
    function = functools.partial(evaluate, loss.config, loss.variant, loss.options)
    torch.compiler.reset()  # otherwise the graphs of other losses would count towards torch's limit of recompilations
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    compiled, expected = (call(raw, PaddedSegments(), (), *counts)[0].item() for call in (graph, function))
    no_gradient = torch.zeros(())
    return describe_difference(
        "the compiled graph", LossOutcome(compiled, no_gradient, {}), LossOutcome(expected, no_gradient, {})
    )


PROMISES = (
    Promise("finite on an ordinary batch", _find_nan),
    Promise("microbatches add up to the whole batch", find_split_difference),
    Promise("packed rows equal padded rows", _find_packing_difference),
    Promise("untrained tokens have no influence", find_influence_of_untrained),
    Promise("finite at log-ratios of ±100", _find_overflow),
    Promise("the gradient equals finite differences", find_gradient_error),
    Promise("survives pickling", find_pickle_difference),
    Promise("one graph under torch.compile", _find_graph_difference),
    Promise("context parallelism equals one rank", _find_context_parallel_difference),
)
"""All promises, in the order in which they are tested; all need the first one, and the last two take seconds each."""
