"""The loss object that a trainer calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from nemo_geomask import functional as F
from nemo_geomask.config import LossConfig
from nemo_geomask.errors import DataError, GeomaskError, PluginError
from nemo_geomask.losses import protocol
from nemo_geomask.losses.batch import TokenBatch, read_nemo_rl, read_packed
from nemo_geomask.losses.correction import correct
from nemo_geomask.losses.diagnostics import report_batch, report_surrogate
from nemo_geomask.losses.rejection import reject
from nemo_geomask.losses.statistics import SequenceStatistics
from nemo_geomask.losses.variant import SurrogateInputs, Variant
from nemo_geomask.metrics import MetricSums, Normalizer
from nemo_geomask.segments import PackedSegments

__all__ = ["PREPARED", "PolicyLoss"]

# Key of a batch that BeforeStep has looked at.
PREPARED = "geomask_prepared"


class PolicyLoss:
    r"""Weighted, masked surrogate plus KL to the reference, under NeMo-RL's loss protocol.

    .. math:: L = \sum_t c_t\,\bigl(w_t\,k_t\,\ell_t + \beta\,\mathrm{KL}_t\bigr) + \mu\,\mathrm{NLL}^+

    with the variant's surrogate :math:`\ell`, the weight :math:`w` against the mismatch, the masks' verdict
    :math:`k \in \{0, 1\}` (selected, not multiplied) and the normalisation's coefficient :math:`c`. Stateless between
    calls and picklable; it needs torch and pydantic where it is unpickled, and the module that defines the variant.

    Args:
        config: settings in force, the variant's defaults applied.
        variant: the objective.
        options: the variant's own settings.
        use_fused_linear_logprobs: set where NeMo-RL computes log-probs by its fused linear path.
    """

    def __init__(
        self,
        config: LossConfig,
        variant: Variant,
        options: BaseModel,
        *,
        use_fused_linear_logprobs: bool = False,
    ) -> None:
        self.config = config
        self.variant = variant
        self.options = options
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        # What a trainer's integration sends along to look at each batch; see BeforeStep.
        self.before_step: Any = None
        self._prepared = False
        self._normalizers = self._declare()

    # NeMo-RL compares these by identity with its own enums, see the protocol module.
    @property
    def loss_type(self) -> Any:
        """``LossType``: which global count divides the loss."""
        by_token = self.config.normalization == "tokens"
        return protocol.resolve(protocol.LossType.TOKEN_LEVEL if by_token else protocol.LossType.SEQUENCE_LEVEL)

    @property
    def input_type(self) -> Any:
        """``LossInputType.LOGPROB``."""
        return protocol.resolve(protocol.LossInputType.LOGPROB)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """``MetricNormalizer`` of every metric that a call returns."""
        return {name: protocol.resolve(protocol.MetricNormalizer(kind)) for name, kind in self._normalizers.items()}

    @property
    def reference_policy_kl_penalty(self) -> float:
        """β; 0 where no reference log-probs are needed."""
        return self.config.kl_coefficient

    def for_prepared_batches(self) -> PolicyLoss:
        """This loss for a trainer that has each batch looked at by itself, but can add no mark to it."""
        loss = copy.copy(self)
        loss.before_step, loss._prepared = None, True
        return loss

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of one microbatch.

        Args:
            next_token_logprobs: [B, T-1], floating point, log π_θ of tokens 1 to T-1, with gradient.
            data: the batch, see :func:`nemo_geomask.losses.batch.read_nemo_rl`.
            global_valid_seqs: sum of ``sample_mask`` over the optimiser step, all microbatches and ranks.
            global_valid_toks: sum of ``token_mask[:, 1:] * sample_mask`` over the same.

        Returns:
            The loss, a float32 scalar on the graph, and the metrics as floats. The losses and metrics of the
            microbatches of a step add up (extrema aside).

        Raises:
            DataError: ``batch_veto`` or ``denominator: kept`` is set and :class:`~nemo_geomask.losses.BeforeStep` has
                not seen the batch.
            DataError, ShapeError, NonFiniteError: see :func:`~nemo_geomask.losses.batch.read_nemo_rl`.
        """
        self._check_prepared(data)
        return self._call(read_nemo_rl(next_token_logprobs, data, self.config), global_valid_seqs, global_valid_toks)

    def packed(
        self,
        logprobs: Tensor,
        data: Mapping[str, Any],
        segments: PackedSegments,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of packed sequences, whole or this rank's share of them.

        Every rank of the segments' groups must call this together. The loss value and the metrics are those of the
        whole, the same on all ranks; the gradient is that of the whole with respect to this rank's log-probs.

        Args:
            logprobs: [N], floating point, log π_θ of the token that each position is about, with gradient.
            data: as for calling the loss, but token tensors are [N] and aligned with ``logprobs`` (no shift).
            segments: who belongs to which sequence.
            global_valid_seqs: as for calling the loss.
            global_valid_toks: as for calling the loss.

        Raises:
            DataError: as for calling the loss.
            DataError, ShapeError: see :func:`~nemo_geomask.losses.batch.read_packed`.
            NonFiniteError: under ``nonfinite: raise``, on all ranks where it holds on one.
        """
        self._check_prepared(data)
        return self._call(read_packed(logprobs, data, segments, self.config), global_valid_seqs, global_valid_toks)

    def _check_prepared(self, data: Mapping[str, Any]) -> None:
        if self._prepared or not self.config.looks_before_step or PREPARED in data:
            return
        settings = "batch_veto" if self.config.batch_veto is not None else "denominator: kept"
        raise DataError(
            f"loss_fn.{settings} needs a look at the whole batch before the step, but this batch has had none: there "
            f"is no data['{PREPARED}']. Run NeMo-RL by nemo-geomask run, call nemo_geomask.losses.BeforeStep on the "
            f"batch and take over its changes in a loop of your own, or remove loss_fn.{settings}"
        )

    def _call(
        self, batch: TokenBatch, global_valid_seqs: Tensor | float, global_valid_toks: Tensor | float
    ) -> tuple[Tensor, dict[str, float]]:
        seqs = _count("global_valid_seqs", global_valid_seqs, batch.weight.device)
        toks = _count("global_valid_toks", global_valid_toks, batch.weight.device)
        loss, metrics = self._evaluate(batch, seqs, toks)
        values, whole = metrics.read(global_seqs=seqs, global_toks=toks)
        # The value of all ranks, the gradient of this rank's part. A trainer may divide it in place, as no view can be.
        whole_loss = F.with_derivative(loss, value=whole["loss"].to(loss.dtype), derivative=torch.ones_like(loss))
        return whole_loss.clone(), values

    def _evaluate(self, read: TokenBatch, seqs: Tensor, toks: Tensor) -> tuple[Tensor, MetricSums]:
        config = self.config
        pool = self.variant.pool(self._inputs(read)) if self.variant.pool is not None else {}
        statistics = SequenceStatistics(read, config, pool)
        batch = statistics.batch
        metrics = MetricSums(batch.weight, batch.sample_mask, batch.segments)
        coefficient = F.token_coefficients(
            config.normalization,
            mask=batch.weight,
            tokens_of_sequence=batch.segments.spread(statistics.verdict.tokens_of_sequence),
            global_seqs=seqs,
            global_toks=toks,
            constant=config.loss_normalization_constant,
        )
        surrogate = self.variant.surrogate(self._inputs(batch), statistics.variant_means())
        correction = correct(batch, statistics, config)
        kept = reject(batch, statistics, config, metrics)
        # A weight of 0 removes its token too; 0 times a loss that overflowed would be NaN.
        counted = kept & correction.weight.bool()
        loss = (coefficient * F.select((correction.weight * surrogate.loss).expand_as(counted), counted)).sum()
        kl = self._kl(batch, coefficient)
        if kl is not None:
            loss = loss + config.kl_coefficient * kl
        nll = self._positive_nll(batch, statistics, coefficient)
        if nll is not None:
            loss = loss + config.positive_example_nll_weight * nll

        zero = torch.zeros_like(toks)
        own: Normalizer = "tokens" if config.normalization == "tokens" else "sequences"
        metrics.part("loss", loss, own)
        metrics.part("kl_penalty", zero if kl is None else kl, own)
        local = config.positive_example_nll_normalization == "microbatch"
        metrics.part("positive_nll_loss", zero if nll is None else nll, "none" if local else own)
        correction.report(metrics)
        report_surrogate(surrogate, batch, metrics)
        report_batch(batch, statistics.verdict, config.reference_policy_kl_type, metrics)
        return loss, metrics

    def _inputs(self, batch: TokenBatch) -> SurrogateInputs:
        return SurrogateInputs(batch.curr, batch.log_ratio, batch.advantages, self.config, self.options)

    def _kl(self, batch: TokenBatch, coefficient: Tensor) -> Tensor | None:
        config = self.config
        if batch.ref is None:
            return None
        kl = F.kl_penalty(
            curr=batch.curr_kl,
            ref=batch.ref,
            prev=batch.prev,
            gen=batch.gen,
            value=config.reference_policy_kl_type,
            gradient=config.reference_policy_kl_gradient,
            importance_weighted=config.use_on_policy_kl_approximation,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )
        return (coefficient * kl).sum()

    def _positive_nll(self, batch: TokenBatch, statistics: SequenceStatistics, coefficient: Tensor) -> Tensor | None:
        if batch.rewards is None:
            return None
        positive = (batch.rewards > 0).float()
        if self.config.positive_example_nll_normalization == "microbatch":
            coefficient = batch.weight * F.inverse_count((statistics.count * positive).sum())
        return -(batch.curr * coefficient * batch.segments.spread(positive)).sum()

    def _declare(self) -> dict[str, Any]:
        # The metrics of a call depend on the settings alone; one call on a token finds them, so that no second table
        # has to agree with the code, and a variant that cannot run fails here and not in a worker.
        one = torch.zeros(1, 1)
        names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        data = {**{name: torch.zeros(1, 2) for name in names}, "token_mask": torch.ones(1, 2)}
        data |= {"sample_mask": torch.ones(1), "rewards": torch.zeros(1)}
        count = torch.ones(())
        batch = read_nemo_rl(one, data, self.config)
        try:
            return dict(self._evaluate(batch, count, count)[1].normalizers())
        except GeomaskError:
            raise
        except Exception as error:
            raise PluginError(
                f"the variant '{self.config.name}' fails on a batch of one token: {type(error).__name__}: {error}"
            ) from error


def _count(name: str, value: Tensor | float, device: torch.device) -> Tensor:
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        found = "None" if value is None else f"a tensor {list(value.shape)}"
        raise DataError(f"{name} must be one number, the count over the whole optimiser step, but it is {found}")
    return torch.as_tensor(value, device=device).float().reshape(())
