"""The loss object that a trainer calls."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.data_keys import TOKEN_MASK
from nemo_geomask.errors import DataError, GeomaskError, NonFiniteError, PluginError, Problem
from nemo_geomask.losses import protocol
from nemo_geomask.losses.compiled import CompiledPass
from nemo_geomask.losses.evaluate import evaluate, metric_labels
from nemo_geomask.losses.rank_check import RankCheck
from nemo_geomask.losses.raw_batch import (
    BATCH_KEYS,
    RawBatch,
    possible_batch_keys,
    requested_tensors,
    take_packed,
    take_padded,
)
from nemo_geomask.metrics import Label, Metrics
from nemo_geomask.objectives.variant import Variant
from nemo_geomask.segments import PackedSegments, PaddedSegments, Segments
from nemo_geomask.segments.padded import NO_TENSORS
from nemo_geomask.segments.rank_comparison import as_lost_rank_error

PREPARED_KEY = "geomask_prepared"
"""Batch key, [B], that PrestepPass adds to mark a batch that it has processed."""
BATCH_SCALAR_PREFIX = "geomask_bound_"
"""Prefix of the batch keys, [B], of the numbers that PrestepPass computes over the whole batch.

The name of the number in ``LossConfig.batch_scalars`` follows the prefix.
"""
Count = Tensor | float


class PolicyLoss:
    r"""Weighted, masked surrogate plus KL to the reference policy, under NeMo-RL's loss protocol.

    .. math:: L = \sum_t c_t\,\bigl(w_t\,k_t\,\ell_t + \beta\,\mathrm{KL}_t\bigr) + \lambda\,\mathrm{NLL}^+

    with the variant's surrogate :math:`\ell`, the weight :math:`w` against the mismatch, :math:`k_t = 1` at tokens that
    the masks keep and 0 at others (applied by ``torch.where``, not by multiplication), the coefficient :math:`c` of the
    normalisation, ``reference_policy_kl_penalty`` :math:`\beta`, and ``positive_example_nll_weight`` :math:`\lambda`,
    the weight of the NLL of sequences with a positive reward. A loss is picklable; unpickling needs torch, pydantic and
    the module that defines the variant.

    Args:
        config: settings in force, with the variant's defaults applied.
        variant: the objective.
        options: the variant's own settings.
        use_fused_linear_logprobs: True if NeMo-RL computes log-probs by its fused linear path.
    """

    def __init__(
        self, config: LossConfig, variant: Variant, options: BaseModel, *, use_fused_linear_logprobs: bool = False
    ) -> None:
        self.config, self.variant, self.options = config, variant, options
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self._requested = requested_tensors(config)
        self._prestep_reason = next(iter(config.prestep_reasons.items()), None)
        self._batch_scalar_keys = [f"{BATCH_SCALAR_PREFIX}{label}" for label in config.batch_scalars]
        self._prepared_scalars: Mapping[str, Tensor] | None = None
        self._evaluate = CompiledPass(
            functools.partial(evaluate, config, variant, options), config.compile, config.name
        )
        self._labels = self._metric_labels()
        self._check_ranks = self._rank_check() if config.compare_ranks else None

    def __repr__(self) -> str:
        changed = self.config.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        settings = "".join(f", {key}={value!r}" for key, value in changed.items())
        return f"{type(self).__name__}(name={self.config.name!r}{settings})"

    # NeMo-RL compares enum members by identity with its own, so each property resolves them; see losses/protocol.py.
    @property
    def loss_type(self) -> Any:
        """``LossType``: the global count that divides the loss."""
        by_token = self.config.normalization == "tokens"
        return protocol.resolve(protocol.LossType.TOKEN_LEVEL if by_token else protocol.LossType.SEQUENCE_LEVEL)

    @property
    def input_type(self) -> Any:
        """``LossInputType.LOGPROB``."""
        return protocol.resolve(protocol.LossInputType.LOGPROB)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """``MetricNormalizer`` of every metric that a call may return; some need an optional tensor of the batch."""
        labels = self._labels[self._requested]
        normalizers = {name: label.normalizer for label in labels for name in label.names}
        return {
            name: protocol.resolve(protocol.MetricNormalizer(normalizer)) for name, normalizer in normalizers.items()
        }

    @property
    def reference_policy_kl_penalty(self) -> float:
        """β, the coefficient of the KL to the reference policy; 0 if the loss needs no reference log-probs."""
        return self.config.kl_coefficient

    def for_prepared_batches(self, changes: Mapping[str, Tensor] = NO_TENSORS) -> PolicyLoss:
        """Return a copy for batches that have had the pre-step pass, but lack the keys that it adds.

        Args:
            changes: :attr:`nemo_geomask.losses.Decision.changes` for the batch.
        """
        loss = copy.copy(self)
        loss._prepared_scalars = {key: changes[key][:1].clone() for key in self._batch_scalar_keys if key in changes}
        return loss

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of one microbatch.

        Args:
            next_token_logprobs: [B, T-1], floating point, log π_θ of tokens 1 to T-1, with gradient.
            data: the batch, see :func:`nemo_geomask.losses.raw_batch.take_padded`.
            global_valid_seqs: sum of ``sample_mask`` over the optimiser step, all microbatches and ranks.
            global_valid_toks: sum of ``token_mask[:, 1:] * sample_mask`` over the same.

        Returns: the loss, a differentiable float32 scalar, and the metrics, which stay on the device until one is read.
        The losses and metrics of the microbatches of a step add up (except minima and maxima). If there are trained
        tokens under a count of 0, if a count that is a tensor is negative or not finite, or if a mask holds a value
        that is NaN or not from 0 to 1, the loss is NaN. Its gradient is then 0, unless a count is NaN. The metrics
        ``geomask/invalid_…`` count the calls with such values.
        Raises: MissingDataError: a tensor is missing. ShapeError: one has another shape or dtype. DataError: a global
        count is not a finite number of at least 0, or the settings need a pass over the whole batch before the step
        (:class:`~nemo_geomask.losses.PrestepPass`), which this batch has not had. NonFiniteError: a trained token has a
        non-finite value, under ``nonfinite: raise``.
        """
        batch_scalars = self.batch_scalars(data, next_token_logprobs.device)
        raw = take_padded(next_token_logprobs, data, self._requested)._replace(batch_scalars=batch_scalars)
        return self._call(raw, PaddedSegments(), global_valid_seqs, global_valid_toks)

    def packed(
        self,
        logprobs: Tensor,
        data: Mapping[str, Any],
        segments: PackedSegments,
        global_valid_seqs: Count,
        global_valid_toks: Count,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of packed sequences, complete or this rank's shard of them.

        Every rank of the segments' groups must call this together. The value of the loss and the metrics are global,
        the same on all ranks; the gradient is that of the global loss with respect to this rank's log-probs.

        Args:
            logprobs: [N], floating point, log π_θ of the token that each position is about, with gradient.
            data: as for calling the loss, but token tensors are [N] and aligned with ``logprobs`` (no shift).
            segments: layout of the sequences.
            global_valid_seqs, global_valid_toks: as for calling the loss.

        Raises: as calling the loss; NonFiniteError on all ranks if one of them has a non-finite value.
        RanksDisagreeError: ranks that share sequences have other settings or other packed rows, under
        ``compare_ranks``. LostRankError: a collective failed, most often because another rank has ended.
        """
        with as_lost_rank_error():
            if self._check_ranks is not None and isinstance(segments, PackedSegments) and segments.groups:
                segments.check()
                self._check_ranks(segments, data, logprobs.device)
            batch_scalars = self.batch_scalars(data, logprobs.device)
            raw = take_packed(logprobs, data, segments, self._requested)._replace(batch_scalars=batch_scalars)
            return self._call(raw, segments, global_valid_seqs, global_valid_toks)

    def batch_scalars(self, data: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """Return the numbers that the pre-step pass computed over the whole batch, in the order of the settings.

        Returns: [k] on the device; None if the settings need none.
        Raises: DataError: the settings need a pre-step pass, but the batch has had none.
        """
        if self._prestep_reason is None:
            return None
        scalars = data if PREPARED_KEY in data else self._prepared_scalars
        if scalars is None or not all(key in scalars for key in self._batch_scalar_keys):
            key, reason = self._prestep_reason
            raise DataError(
                f"loss_fn.{key}: {reason} needs a pass over the whole batch before the step, but this batch has had "
                f"none: there is no data['{PREPARED_KEY}']. Start NeMo-RL with nemo-geomask run; in a training loop of "
                "your own call nemo_geomask.losses.PrestepPass on the batch and apply its changes; or remove the "
                "setting"
            )
        if not self._batch_scalar_keys:
            return None
        # All rows hold the same number. A batch without rows gets 1, which has no effect.
        values = [
            scalars[key][:1].float().sum() if len(scalars[key]) else torch.ones((), device=scalars[key].device)
            for key in self._batch_scalar_keys
        ]
        return torch.stack(values).to(device, non_blocking=True)

    def _call(
        self, raw: RawBatch, segments: Segments, global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, Metrics]:
        seqs = _as_count("global_valid_seqs", global_valid_seqs, raw.curr.device)
        toks = _as_count("global_valid_toks", global_valid_toks, raw.curr.device)
        loss, values = self._evaluate(raw, segments, segments.tensors, seqs, toks)
        labels = self._labels[tuple(raw.tensors)]
        if values.numel() != len(labels) + 2:  # the last two are the counts
            raise self._variant_error(
                f"reports {values.numel() - 2} numbers on this batch, but {len(labels)} on a batch of one token; the "
                "number of its metrics may depend on settings alone"
            )
        metrics = Metrics(labels, values)
        if self.config.nonfinite == "raise":
            raise_if_nonfinite(metrics)
        return loss, metrics

    def _metric_labels(self) -> dict[tuple[str, ...], tuple[Label, ...]]:
        """Return the labels of the metrics for each set of tensors that a batch may hold.

        This runs the variant, so that a variant that fails does so when the loss is built, and not in a worker.
        """
        try:
            return {
                names: metric_labels(self.config, self.variant, self.options, names)
                for names in possible_batch_keys(self._requested)
            }
        except GeomaskError:
            raise
        except Exception as error:
            raise self._variant_error(f"fails on a batch of one token: {type(error).__name__}: {error}") from error

    def _rank_check(self) -> RankCheck:
        """Return the comparison of this loss with those of the ranks that share its sequences."""
        # These settings may differ: none of them changes what is computed or what crosses ranks.
        settings = self.config.model_dump(mode="json", exclude={"compile", "record", "logprob_backend", "options"})
        compared = {f"loss_fn.{key}": value for key, value in settings.items()}
        compared["loss_fn.options"] = self.options.model_dump(mode="json")
        compared["the number of metrics"] = max(len(labels) for labels in self._labels.values())
        return RankCheck(compared, [TOKEN_MASK, "sample_mask", *(BATCH_KEYS[name] for name in self._requested)])

    def _variant_error(self, message: str) -> PluginError:
        return PluginError(Problem(("loss_fn.name",), f"the variant '{self.config.name}' {message}"))


def _as_count(name: str, value: Count, device: torch.device) -> Tensor:
    """Return a global count as a 0-d float32 tensor on the device."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        # The value of a tensor is not checked: it may be on a GPU, and the host would have to wait for it. Most counts
        # need no conversion, and this test is faster than a conversion that changes nothing.
        is_ready = value.dim() == 0 and value.dtype == torch.float32 and value.device == device
        return value if is_ready else value.detach().to(device, torch.float32).reshape(())
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return torch.tensor(value, dtype=torch.float32, device=device)
    actual = f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
    raise DataError(
        f"{name} must be one number of at least 0, the count over the whole optimiser step, all its microbatches and "
        f"ranks, but it is {actual}"
    )


def raise_if_nonfinite(metrics: Mapping[str, float]) -> None:
    """Raise NonFiniteError if the metrics count non-finite values, or DataError if a mask holds invalid values.

    This reads the metrics, so the host waits for the device.
    """
    _raise_if_masks_invalid(metrics)
    prefix = "geomask/nonfinite_"
    counts = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix) and count}
    if not counts:
        return
    sources = {
        "curr": "the log-probs given to the loss",
        **{name: f"data['{key}']" for name, key in BATCH_KEYS.items()},
    }
    listed = ", ".join(f"{count:.0f} in {sources[name]}" for name, count in counts.items())
    raise NonFiniteError(
        f"non-finite values at trained tokens: {listed}; loss_fn.nonfinite is 'raise'. Find their origin, or choose "
        "drop_sequence or drop_token"
    )


def _raise_if_masks_invalid(metrics: Mapping[str, float]) -> None:
    """Raise DataError if the metrics say that a mask holds values that are NaN or not from 0 to 1; the host reads."""
    for key in (TOKEN_MASK, "sample_mask"):
        if metrics.get(f"geomask/invalid_{key}"):
            raise DataError(
                f"data['{key}'] holds values that are NaN or not from 0 to 1; give 1 where to train, 0 elsewhere, or a "
                "weight between them"
            )
