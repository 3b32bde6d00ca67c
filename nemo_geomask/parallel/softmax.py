"""What follows a shard's softmax statistics, however its logits came about: the ranks' merge, log-probs, entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ArgumentError, ShapeError
from nemo_geomask.kernels import Incoming
from nemo_geomask.parallel.agreement import Options, Shards, asked, check_vocab_size, exchanged, refuse, wrong

__all__ = [
    "Goals",
    "Softmax",
    "check_temperature",
    "goals_of",
    "incoming",
    "shards_of",
    "softmax",
]


class Goals(NamedTuple):
    """The targets, [N].

    Attributes:
        ids: int64.
        counted: which are not ``ignore_index``.
        stray: which of these are in no shard.
        refused: reads whether one is; None where nothing is to be validated, or the ranks are to be heard first.
    """

    ids: Tensor
    counted: Tensor
    stray: Tensor
    refused: Callable[[], bool] | None


class Softmax(NamedTuple):
    """Over the whole vocabulary, the same bits on all ranks.

    Attributes:
        logprobs: [N] float32 of the targets, 0 at ``ignore_index``.
        entropy: [N] float32 in nats; of no meaning unless wanted.
        peak: [N] float32, the largest logit, finite.
        mass: [N] float32, Σ e^{(x - peak)/T}.
    """

    logprobs: Tensor
    entropy: Tensor
    peak: Tensor
    mass: Tensor


def shards_of(
    width: int, group: dist.ProcessGroup | None, shard_sizes: Sequence[int] | None, vocab_size: int | None
) -> Shards:
    """The shards that a rank with ``width`` columns takes the vocabulary to have.

    Raises:
        ShapeError: ``shard_sizes`` don't fit.
        ArgumentError: ``vocab_size`` out of range.
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    sizes = [width] * world if shard_sizes is None else list(shard_sizes)
    # With several ranks their widths are compared after the collective, where all of them can raise.
    if len(sizes) != world or (world == 1 and sizes != [width]):
        raise ShapeError(
            f"shard_sizes {sizes} must have one entry for each of the {world} ranks of the group, and rank {rank}'s "
            f"must be its {width} columns"
        )
    shards = Shards(sizes, rank, group, sum(sizes) if vocab_size is None else vocab_size, width)
    if world == 1:
        check_vocab_size(shards)
    return shards


def check_temperature(temperature: float) -> None:
    """Raise ArgumentError unless 0 < T < ∞."""
    if not 0 < temperature < math.inf:
        raise ArgumentError(f"temperature must be above 0 and finite, but it is {temperature}")


def goals_of(targets: Tensor, shards: Shards, options: Options) -> Goals:
    """Look at the targets, before the kernels are launched: so the host doesn't wait for those to refuse some."""
    ids = targets.reshape(-1)
    counted = ids != options.ignore_index
    stray = counted & ((ids < 0) | (ids >= shards.valid))
    alone = options.validate and len(shards.sizes) == 1
    return Goals(ids, counted, stray, asked(wrong(stray, None)) if alone else None)


def softmax(statistics: Tensor, goals: Goals, shards: Shards, options: Options) -> Softmax:
    """Merge the ranks' statistics, one all-gather of four numbers a token, and read the targets' log-probs off them.

    Args:
        statistics: [4, N] float32 of this rank's columns, see :func:`nemo_geomask.kernels.cpu.row_statistics`.
        goals: the targets.
        shards: of the vocabulary.
        options: see there.

    Raises: as :func:`nemo_geomask.parallel.agreement.refuse`, on all ranks.
    """
    ids, counted, stray, refused = goals
    parts, notes = exchanged(statistics, ids, shards, options)
    if options.validate and notes is not None:
        refused = asked(wrong(stray, notes))
    peak, mass, own, entropy = options.kernels.fold(parts, options.inverse_temperature)
    peak = torch.where(torch.isinf(peak), 0.0, peak)
    logprobs = torch.where(counted, (own - peak) * options.inverse_temperature - mass.log(), 0.0)
    if not options.validate:
        logprobs = torch.where(stray, torch.nan, logprobs)
    if options.entropy:
        entropy = torch.where(counted, torch.where(mass == 0, torch.nan, entropy), 0.0)
    # Last: everything is launched by now.
    if refused is not None and refused():
        refuse(ids, stray, notes, shards, options.ignore_index)
    return Softmax(logprobs, entropy, peak, mass)


def incoming(
    grads: Sequence[Tensor | None],
    targets: Tensor,
    peak: Tensor,
    mass: Tensor,
    entropy: Tensor,
    kept: Tensor | None = None,
) -> Incoming | None:
    """The rows of a backward pass, ``kept`` alone if given; None where no gradient comes in.

    Args:
        grads: of the log-probs, and where it was asked for of the entropy; over all rows.
        targets, peak, mass, entropy: of the rows kept.
        kept: their numbers.

    Raises: ArgumentError: the pass is to be differentiated itself; nothing else would say so where the incoming
    gradient is constant, and a second derivative be taken for 0.
    """
    if torch.is_grad_enabled():
        raise ArgumentError("the log-probs can be differentiated once; call autograd.grad without create_graph")
    flat = [None if grad is None else grad.reshape(-1) for grad in (*grads, None)[:2]]
    of_logprobs, of_entropy = (grad if grad is None or kept is None else grad[kept] for grad in flat)
    if of_logprobs is None and of_entropy is None:
        return None
    return Incoming(
        targets, peak, mass, entropy, torch.zeros_like(mass) if of_logprobs is None else of_logprobs, of_entropy
    )
