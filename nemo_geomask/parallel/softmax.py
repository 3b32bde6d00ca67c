"""Log-probs and entropy over the global vocabulary from each shard's softmax statistics, and checks of the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_geomask.errors import ArgumentError
from nemo_geomask.kernels import RowGradientInputs
from nemo_geomask.parallel.agreement import gather_rank_arguments, has_problem, raise_other_rows, raise_problem
from nemo_geomask.parallel.logprob_options import LogprobOptions, VocabShards
from nemo_geomask.segments.packed_reductions import gather_ranks
from nemo_geomask.segments.rank_comparison import copy_to_host


class Targets(NamedTuple):
    """Token ids whose log-probs are computed, and the outcome of their checks.

    Attributes:
        ids: [N] int64.
        is_counted: [N] bool, True where the id is not ``ignore_index``.
        is_stray: [N] bool, True where the id is counted, but in no shard.
        rank_arguments: from :func:`nemo_geomask.parallel.agreement.gather_rank_arguments`.
        read_problem: function that returns a tensor [], True if there is an error to raise; None without ``validate``.
    """

    ids: Tensor
    is_counted: Tensor
    is_stray: Tensor
    rank_arguments: Tensor | None
    read_problem: Callable[[], Tensor] | None

    def has_problem(self) -> bool:
        """Return True if there is an error to raise, which :func:`merge_shards` raises after its collective.

        The host waits for the flag, but not for kernels launched after it. ``tests/gpu`` checks that the log-prob
        functions wait for nothing else, except :func:`~nemo_geomask.parallel.linear.linear_logprobs` for its number of
        rows.

        Raises: RanksDisagreeError: the ranks have different numbers of targets, so that no collective is possible.
        """
        if self.read_problem is None or not bool(self.read_problem()):
            return False
        raise_other_rows(self.rank_arguments)
        return True


class Softmax(NamedTuple):
    """Softmax of each row over the global vocabulary, with the same bits on all ranks.

    Attributes:
        logprobs: [N] float32 of the targets, 0 at ``ignore_index``.
        entropy: [N] float32 in nats; undefined unless the caller requested it.
        max_logit: [N] float32, the largest logit m, finite.
        sum_exp: [N] float32, Σ e^{(x - m)/T}.
    """

    logprobs: Tensor
    entropy: Tensor
    max_logit: Tensor
    sum_exp: Tensor


def check_targets(targets: Tensor, shards: VocabShards, options: LogprobOptions) -> Targets:
    """Start the checks of the targets and of the ranks' arguments; :func:`merge_shards` raises the errors.

    Call this before launching the kernels: the host can then read the outcome without waiting for the kernels.
    """
    ids = targets.reshape(-1)
    is_counted = ids != options.ignore_index
    is_stray = is_counted & ((ids < 0) | (ids >= shards.valid_columns))
    rank_arguments = gather_rank_arguments(ids, shards, options)
    read_problem = copy_to_host(has_problem(is_stray, rank_arguments)) if options.validate else None
    return Targets(ids, is_counted, is_stray, rank_arguments, read_problem)


def merge_shards(statistics: Tensor, targets: Targets, shards: VocabShards, options: LogprobOptions) -> Softmax:
    """Merge the statistics of all ranks by one all-gather of four numbers a token, and compute the log-probs.

    Args:
        statistics: [4, N] float32 of this rank's columns, see :func:`nemo_geomask.kernels.cpu.row_statistics`.
        targets: from :func:`check_targets`.
        shards: shards of the vocabulary.
        options: settings of the call.

    Raises: the errors of :func:`nemo_geomask.parallel.agreement.raise_problem`, on all ranks that validate.
    """
    ids, is_counted, is_stray, rank_arguments, _ = targets
    parts, must_raise = statistics.unsqueeze(0), False
    group = shards.group if len(shards.sizes) > 1 else None
    if group is not None:
        # Read before the collective, which fails if the ranks have different numbers of targets.
        must_raise = targets.has_problem()
        parts = gather_ranks(statistics, group)
    max_logit, sum_exp, target_logit, entropy = options.kernels.fold(parts, options.inverse_temperature)
    max_logit = torch.where(torch.isinf(max_logit), 0.0, max_logit)
    logprobs = (target_logit - max_logit) * options.inverse_temperature - sum_exp.log()
    logprobs = torch.where(is_counted, logprobs, 0.0)
    if not options.validate:
        logprobs = torch.where(is_stray, torch.nan, logprobs)
    if options.entropy:
        entropy = torch.where(is_counted, torch.where(sum_exp == 0, torch.nan, entropy), 0.0)
    if group is None:
        # Read last: these launches then keep the GPU busy while the host waits, and launches the backward pass.
        must_raise = targets.has_problem()
    # Raised last: no rank raises before it has taken part in all collectives of the others, which may not validate.
    if must_raise:
        raise_problem(ids, is_stray, rank_arguments, shards, options.ignore_index)
    return Softmax(logprobs, entropy, max_logit, sum_exp)


def gradient_inputs(
    grads: Sequence[Tensor | None],
    targets: Tensor,
    max_logit: Tensor,
    sum_exp: Tensor,
    entropy: Tensor,
    row_indices: Tensor | None = None,
) -> RowGradientInputs | None:
    """Collect the inputs of the backward kernels; return None if neither output has an incoming gradient.

    Args:
        grads: incoming gradients of the log-probs, and of the entropy if it was returned, over all rows.
        targets: [R] int64, for the R rows that take part.
        max_logit: [R] float32.
        sum_exp: [R] float32.
        entropy: [R] float32.
        row_indices: [R] int64, indices of these rows among all; None if all rows take part.

    Raises: ArgumentError: the caller asked for a second derivative (``create_graph=True``). Autograd itself would not
        raise: where the incoming gradient is constant, it would silently return a second derivative of 0.
    """
    if torch.is_grad_enabled():
        raise ArgumentError("the log-probs can be differentiated once; call autograd.grad without create_graph")
    flat = [None if grad is None else grad.reshape(-1) for grad in (*grads, None)[:2]]
    grad_logprobs, grad_entropy = (grad if grad is None or row_indices is None else grad[row_indices] for grad in flat)
    if grad_logprobs is None and grad_entropy is None:
        return None
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(sum_exp)
    return RowGradientInputs(targets, max_logit, sum_exp, entropy, grad_logprobs, grad_entropy)
