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
from nemo_geomask.errors import DataError, GeomaskError, NonFiniteError, PluginError, Problem
from nemo_geomask.losses import protocol
from nemo_geomask.losses.batch import KEYS, Raw, held, keys_read, take_packed, take_padded
from nemo_geomask.losses.compiled import Compiled
from nemo_geomask.losses.evaluate import evaluate, labels_of
from nemo_geomask.losses.variant import Variant
from nemo_geomask.metrics import Label, Metrics
from nemo_geomask.segments import PackedSegments, PaddedSegments, Segments
from nemo_geomask.segments.base import NONE

__all__ = ["BOUND", "PREPARED", "PolicyLoss", "refuse_nonfinite"]

# Keys of a batch that BeforeStep has looked at, [B]: that it has, and the bound of each mask with a budget, by label.
PREPARED, BOUND = "geomask_prepared", "geomask_bound_"
Count = Tensor | float


class PolicyLoss:
    r"""Weighted, masked surrogate plus KL to the reference, under NeMo-RL's loss protocol.

    .. math:: L = \sum_t c_t\,\bigl(w_t\,k_t\,\ell_t + \beta\,\mathrm{KL}_t\bigr) + \mu\,\mathrm{NLL}^+

    with the variant's surrogate :math:`\ell`, the weight :math:`w` against the mismatch, what the masks keep,
    :math:`k \in \{0, 1\}` (selected, not multiplied), and the normalisation's coefficient :math:`c`. Picklable; it
    needs torch and pydantic where it is unpickled, and the module that defines the variant.

    Args:
        config: settings in force, the variant's defaults applied.
        variant: the objective.
        options: the variant's own settings.
        use_fused_linear_logprobs: set where NeMo-RL computes log-probs by its fused linear path.
    """

    def __init__(
        self, config: LossConfig, variant: Variant, options: BaseModel, *, use_fused_linear_logprobs: bool = False
    ) -> None:
        self.config, self.variant, self.options = config, variant, options
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self._keys = keys_read(config)
        self._prepared: Mapping[str, Tensor] | None = None
        self._budgets = [f"{BOUND}{label}" for label in config.told]
        self._looks = next(iter(config.looks.items()), None)
        self._evaluate = Compiled(functools.partial(evaluate, config, variant, options), config.compile, config.name)
        self._labels = self._declare()

    def __repr__(self) -> str:
        changed = self.config.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        settings = "".join(f", {key}={value!r}" for key, value in changed.items())
        return f"{type(self).__name__}(name={self.config.name!r}{settings})"

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
        labels = self._labels[self._keys]
        found = {name: label.divided_by for label in labels for name in label.names}
        return {name: protocol.resolve(protocol.MetricNormalizer(kind)) for name, kind in found.items()}

    @property
    def reference_policy_kl_penalty(self) -> float:
        """β; 0 where no reference log-probs are needed."""
        return self.config.kl_coefficient

    def for_prepared_batches(self, changes: Mapping[str, Tensor] = NONE) -> PolicyLoss:
        """This loss for a trainer that has each batch looked at by itself, but can add no key to it.

        Args:
            changes: what the batch is changed by, see :class:`~nemo_geomask.losses.Decision`.
        """
        loss = copy.copy(self)
        loss._prepared = {key: changes[key][:1].clone() for key in self._budgets if key in changes}
        return loss

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of one microbatch.

        Args:
            next_token_logprobs: [B, T-1], floating point, log π_θ of tokens 1 to T-1, with gradient.
            data: the batch, see :func:`nemo_geomask.losses.batch.take_padded`.
            global_valid_seqs: sum of ``sample_mask`` over the optimiser step, all microbatches and ranks.
            global_valid_toks: sum of ``token_mask[:, 1:] * sample_mask`` over the same.

        Returns: the loss, a float32 scalar on the graph, and the metrics, which stay on the device until one is read.
        The losses and metrics of the microbatches of a step add up (extrema aside). Trained tokens under a count of 0
        give a loss of NaN.
        Raises: MissingDataError: a tensor is missing. ShapeError: one has another shape or dtype. DataError: a global
        count is no number of at least 0; :class:`~nemo_geomask.losses.BeforeStep` has not seen the batch, which
        ``batch_veto``, ``denominator: kept`` or a mask's budget asks for. NonFiniteError: under ``nonfinite: raise``.
        """
        bounds = self.bounds(data, next_token_logprobs.device)
        raw = take_padded(next_token_logprobs, data, self._keys)._replace(bounds=bounds)
        return self._call(raw, PaddedSegments(), global_valid_seqs, global_valid_toks)

    def packed(
        self,
        logprobs: Tensor,
        data: Mapping[str, Any],
        segments: PackedSegments,
        global_valid_seqs: Count,
        global_valid_toks: Count,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of packed sequences, whole or this rank's share of them.

        Every rank of the segments' groups must call this together. The loss value and the metrics are those of the
        whole, the same on all ranks; the gradient is that of the whole with respect to this rank's log-probs.

        Args:
            logprobs: [N], floating point, log π_θ of the token that each position is about, with gradient.
            data: as for calling the loss, but token tensors are [N] and aligned with ``logprobs`` (no shift).
            segments: who belongs to which sequence.
            global_valid_seqs, global_valid_toks: as for calling the loss.

        Raises: as calling the loss; NonFiniteError on all ranks where it holds on one.
        """
        bounds = self.bounds(data, logprobs.device)
        raw = take_packed(logprobs, data, segments, self._keys)._replace(bounds=bounds)
        return self._call(raw, segments, global_valid_seqs, global_valid_toks)

    def bounds(self, data: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """Those that the batch set before the step; raises where it has not been looked at."""
        if self._looks is None:
            return None
        found = data if PREPARED in data else self._prepared
        if found is not None and all(key in found for key in self._budgets):
            # The same in every row; where there is none, there is nothing to bound.
            bounds = [(found[key][:1].float().sum() if len(found[key]) else torch.ones(())) for key in self._budgets]
            return torch.stack(bounds).to(device, non_blocking=True) if bounds else None
        key, words = self._looks
        raise DataError(
            f"loss_fn.{key}: {words} needs a look at the whole batch before the step, but this batch has had none: "
            f"there is no data['{PREPARED}']. Run NeMo-RL by nemo-geomask run, call nemo_geomask.losses.BeforeStep on "
            f"the batch and take over its changes in a loop of your own, or remove it"
        )

    def _call(
        self, raw: Raw, segments: Segments, global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, Metrics]:
        seqs = _count("global_valid_seqs", global_valid_seqs, raw.curr.device)
        toks = _count("global_valid_toks", global_valid_toks, raw.curr.device)
        loss, values = self._evaluate(raw, segments, segments.tensors, seqs, toks)
        labels = self._labels[tuple(raw.others)]
        if values.numel() != len(labels) + 2:  # and the counts
            reported = f"reports {values.numel() - 2} numbers on this batch, but {len(labels)} on one of one token"
            message = f"the variant '{self.config.name}' {reported}; what it reports may depend on settings alone"
            raise PluginError(Problem(("loss_fn.name",), message))
        metrics = Metrics(labels, values)
        if self.config.nonfinite == "raise":
            refuse_nonfinite(metrics)
        return loss, metrics

    def _declare(self) -> dict[tuple[str, ...], tuple[Label, ...]]:
        # A variant that cannot run fails here and not in a worker.
        try:
            return {some: labels_of(self.config, self.variant, self.options, some) for some in held(self._keys)}
        except GeomaskError:
            raise
        except Exception as error:
            name = self.config.name
            message = f"the variant '{name}' fails on a batch of one token: {type(error).__name__}: {error}"
            raise PluginError(Problem(("loss_fn.name",), message)) from error


def _count(name: str, value: Count, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        # Its value is not looked at: it may be on a device that the host does not wait for. Mostly it is one already,
        # and a tensor's method costs more than a look at it.
        fits = value.dim() == 0 and value.dtype == torch.float32 and value.device == device
        return value if fits else value.detach().to(device, torch.float32).reshape(())
    if isinstance(value, (int, float)) and 0 <= value < math.inf:
        return torch.tensor(value, dtype=torch.float32, device=device)
    found = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else str(value)
    raise DataError(
        f"{name} must be one number of at least 0, the count over the whole optimiser step, all its microbatches and "
        f"ranks, but it is {found}"
    )


def refuse_nonfinite(metrics: Mapping[str, float]) -> None:
    """Raise NonFiniteError where the metrics count non-finite values; reads them."""
    prefix = "geomask/nonfinite_"
    found = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix) and count}
    if not found:
        return
    where = {"curr": "the log-probs given to the loss", **{name: f"data['{key}']" for name, key in KEYS.items()}}
    listed = ", ".join(f"{count:.0f} in {where[name]}" for name, count in found.items())
    raise NonFiniteError(
        f"non-finite values at trained tokens: {listed}; loss_fn.nonfinite is 'raise'. Find their origin, or choose "
        "drop_sequence or drop_token"
    )
