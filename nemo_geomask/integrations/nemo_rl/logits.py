"""``logprob_backend`` other than ``nemo_rl``: the loss takes the logits and computes its log-probs itself.

NeMo-RL's own path gathers one log-prob a token over the context-parallel ranks, and calls the loss once for each
packed sequence. Here the tokens stay where they are: four numbers a token cross the tensor-parallel group, [k, S]
statistics the context-parallel one, and a packed microbatch is one call.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_geomask.errors import ConfigError, Problem, ShapeError
from nemo_geomask.integrations.logprobs import logprob_backend
from nemo_geomask.integrations.nemo_rl import current, hidden
from nemo_geomask.integrations.nemo_rl.workers import WorkerError
from nemo_geomask.integrations.packing import IGNORE, check_rows, pack_rows
from nemo_geomask.losses import PolicyLoss, protocol
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

__all__ = ["LogitLoss", "scored"]

Group = dist.ProcessGroup | None
Logits = Tensor | hidden.Hidden  # or what stands for them


def scored(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Log-probs [B, S] of a forward pass, from this rank's columns [B, S, V/TP]; 0 for targets outside the vocabulary,
    as NeMo-RL has them."""
    inside = (targets >= 0) & (targets < logits.shape[-1] * _size(group))
    # Not validated: an error on the ranks of one context-parallel share would leave the others waiting.
    return vocab_parallel_logprobs(
        logits, targets.where(inside, IGNORE), group=group, ignore_index=IGNORE, validate=False
    )


class _Unknown(enum.Enum):
    UNKNOWN = enum.auto()


UNKNOWN = _Unknown.UNKNOWN


class LogitLoss:
    """A policy loss that NeMo-RL's workers call with logits.

    The workers must be prepared to hand over the process groups and packed rows whole, see
    :mod:`nemo_geomask.integrations.nemo_rl.worker`.

    Args:
        loss: from :func:`nemo_geomask.build_loss`; its ``logprob_backend`` names what computes the log-probs.

    Attributes:
        takes_hidden: the workers hand over hidden states in the logits' place, see
            :mod:`nemo_geomask.integrations.nemo_rl.hidden`.

    Raises:
        ConfigError: ``use_fused_linear_logprobs`` is set, under which there are no logits.
        MissingDependencyError: the backend's library can't be imported.
    """

    def __init__(self, loss: PolicyLoss) -> None:
        if loss.use_fused_linear_logprobs:
            message = (
                f"logprob_backend: {loss.config.logprob_backend} needs logits, which NeMo-RL's fused linear log-probs "
                "never form; turn those off, or set logprob_backend: nemo_rl"
            )
            raise ConfigError(Problem(("loss_fn.logprob_backend",), message))
        self.loss = loss
        self.config = loss.config
        self.takes_hidden = loss.config.logprob_backend == "geomask_linear"
        self._logprobs: Callable[..., Any] = (
            hidden.Hidden.logprobs if self.takes_hidden else logprob_backend(loss.config.logprob_backend)
        )

        record = loss.config.record
        self._entropy = isinstance(loss, current.KeepingLoss) and record is not None and record.entropy

    def __reduce__(self) -> tuple[Any, ...]:
        # Built anew where it arrives, with the backend's functions there.
        return LogitLoss, (self.loss,)

    def for_prepared_batches(self, *changes: Mapping[str, Tensor]) -> LogitLoss:
        """See :meth:`nemo_geomask.losses.PolicyLoss.for_prepared_batches`."""
        return LogitLoss(self.loss.for_prepared_batches(*changes))

    @property
    def loss_type(self) -> Any:
        """``LossType``: which global count divides the loss."""
        return self.loss.loss_type

    @property
    def input_type(self) -> Any:
        """``LossInputType.LOGIT``."""
        return protocol.resolve(protocol.LossInputType.LOGIT)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """``MetricNormalizer`` of every metric that a call returns."""
        return self.loss.metric_normalizations

    @property
    def reference_policy_kl_penalty(self) -> float:
        """β; 0 where no reference log-probs are needed."""
        return self.loss.reference_policy_kl_penalty

    @property
    def use_fused_linear_logprobs(self) -> bool:
        """False: this loss takes logits."""
        return False

    def __call__(
        self,
        logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        vocab_parallel_group: Group | _Unknown = UNKNOWN,
        context_parallel_group: Group | _Unknown = UNKNOWN,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of a padded microbatch.

        Args:
            logits: [B, P/CP, V/TP], divided by the temperature already: this rank's columns and its load-balanced
                share of each row; P ≥ T is the padded length. Or a DTensor of them, over meshes ``tp`` and ``cp``.
            data: see :func:`nemo_geomask.losses.batch.take_padded`, and ``input_ids`` [B, T].
            global_valid_seqs: as for :class:`~nemo_geomask.losses.PolicyLoss`.
            global_valid_toks: likewise.
            vocab_parallel_group: Megatron's tensor-parallel group, None where there is none; a DTensor knows its own.
            context_parallel_group: Megatron's context-parallel group, or None; the loss is then scaled so that dividing
                it by the group's size, as NeMo-RL does, gives each rank the gradient of the whole.

        Raises:
            ShapeError, DataError: tensors that don't fit, missing ones, targets outside the vocabulary.
            WorkerError: nobody says what the groups are, as in a worker that is not prepared.
        """
        if isinstance(logits, DTensor):
            return self._dtensor(logits, data, global_valid_seqs, global_valid_toks)
        if isinstance(vocab_parallel_group, _Unknown) or isinstance(context_parallel_group, _Unknown):
            raise WorkerError(
                f"loss_fn.logprob_backend: {self.config.logprob_backend} needs the tensor- and context-parallel groups "
                "of the logits, but the loss was called without: this worker is not prepared. NeMo-RL's policy workers "
                "are, by nemo-geomask run or nemo_geomask.install() in the driver; in a worker of your own, call "
                "nemo_geomask.integrations.nemo_rl.prepare_worker(), or pass vocab_parallel_group and "
                "context_parallel_group (None: the logits are whole)"
            )
        opened = self._opened(logits)
        size = _size(context_parallel_group)
        if size > 1:
            rows, share = opened.shape[:2]
            offsets = torch.arange(rows + 1) * share * size
            result = self._packed(
                opened, data, offsets, None, vocab_parallel_group, context_parallel_group,
                global_valid_seqs, global_valid_toks,
            )  # fmt: skip
            return _for_division(*result, size)
        return self._padded(opened, data, vocab_parallel_group, global_valid_seqs, global_valid_toks)

    def packed(
        self,
        logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_q_padded: Tensor | None,
        vocab_parallel_group: Group = None,
        context_parallel_group: Group = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of a packed microbatch, in one call whatever the number of sequences.

        Args:
            logits: [1, N/CP, V/TP], this rank's share of the packed row; what is behind its last sequence is not read.
            data: rows [B, T], as for calling the loss.
            global_valid_seqs: as for calling the loss.
            global_valid_toks: likewise.
            cu_seqlens_q: [B+1], offsets of the sequences without padding.
            cu_seqlens_q_padded: [B+1], offsets in the packed row; None: there is no padding.
            vocab_parallel_group: as for calling the loss.
            context_parallel_group: as for calling the loss.
        """
        opened = self._opened(logits)
        if isinstance(logits, DTensor):
            vocab_parallel_group = _group(logits, "tp")
        offsets = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).cpu()
        # NeMo-RL's DTensor workers fill a short row up to a minimal length.
        share = int(offsets[-1]) // _size(context_parallel_group)
        opened = opened.first(share) if isinstance(opened, hidden.Hidden) else opened[:, :share]
        result = self._packed(
            opened, data, offsets, cu_seqlens_q.diff(), vocab_parallel_group, context_parallel_group,
            global_valid_seqs, global_valid_toks,
        )  # fmt: skip
        return _for_division(*result, _size(context_parallel_group))

    def _opened(self, logits: Tensor) -> Logits:
        if self.takes_hidden:
            return hidden.Hidden.required_of(logits)
        hidden.Hidden.refused_of(logits, self.config.name)
        return logits.to_local() if isinstance(logits, DTensor) else logits

    def _padded(
        self,
        logits: Logits,
        data: Mapping[str, Any],
        group: Group,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, Metrics]:
        width = data["input_ids"].shape[1]
        _check_shape(logits, data)
        mask = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool().unsqueeze(-1)
        targets = torch.full(logits.shape[:2], IGNORE, dtype=torch.int64, device=logits.device)
        targets[:, : width - 1] = torch.where(mask, data["input_ids"][:, 1:], IGNORE).to(logits.device)
        logprobs, entropy = self._scored(logits, targets, group)
        if entropy is not None:
            data = {**data, current.ENTROPY: entropy[:, : width - 1]}
        return self.loss(logprobs[:, : width - 1], data, global_valid_seqs, global_valid_toks)

    def _scored(self, logits: Logits, targets: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and entropies where those are recorded."""
        if not self._entropy:
            return self._logprobs(logits, targets, group=group, ignore_index=IGNORE), None
        logprobs, entropy = self._logprobs(logits, targets, group=group, ignore_index=IGNORE, entropy=True)
        return logprobs, entropy.detach()

    def _packed(
        self,
        logits: Logits,
        data: Mapping[str, Any],
        offsets: Tensor,
        lengths: Tensor | None,
        vocab_group: Group,
        context_group: Group,
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, Metrics]:
        size = _size(context_group)
        segments = PackedSegments(
            offsets,
            device=logits.device,
            cp_rank=0 if context_group is None else dist.get_rank(context_group),
            cp_size=size,
            groups=(context_group,) if context_group is not None and size > 1 else (),
        )
        count = segments.tokens
        if math.prod(logits.shape[:-1]) != count:
            raise ShapeError(
                f"logits must hold {count} rows, this rank's share of the packed tokens, but they are "
                f"{list(logits.shape)}"
            )
        if lengths is None:
            lengths = torch.full((segments.count,), data["input_ids"].shape[1])
        lengths = lengths.to(logits.device, torch.int64)
        current.mark(self.loss, data)
        packed = pack_rows(data, segments, starts=segments.cu_seqlens[:-1], lengths=lengths)
        check_rows(data, lengths=lengths, vocab_size=logits.shape[-1] * _size(vocab_group))
        targets = packed["targets"].view(logits.shape[:-1])
        logprobs, entropy = self._scored(logits, targets, vocab_group)
        if entropy is not None:
            packed[current.ENTROPY] = entropy.reshape(-1)
        return self.loss.packed(logprobs.reshape(-1), packed, segments, global_valid_seqs, global_valid_toks)

    def _dtensor(
        self,
        logits: DTensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
    ) -> tuple[Tensor, Metrics]:
        group, context = (_group(logits, name) for name in ("tp", "cp"))
        hidden.refuse_if(self.takes_hidden and _size(context) > 1 and "context parallelism of DTensor workers")
        local = self._opened(logits)
        if _size(context) == 1:
            return self._padded(local, data, group, global_valid_seqs, global_valid_toks)
        # NeMo-RL has put what it sharded over the ranks into DTensors; only input_ids is among what is needed here.
        whole = dict(data)
        order = torch.argsort(data["seq_index"])
        for key, value in data.items():
            if isinstance(value, DTensor):
                whole[key] = value.full_tensor()[:, order]
        rows, share = local.shape[:2]
        offsets = torch.arange(rows + 1) * share * _size(context)
        # FSDP averages gradients over these ranks and NeMo-RL multiplies by their number: no factor here.
        return self._packed(local, whole, offsets, None, group, context, global_valid_seqs, global_valid_toks)


def _size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _group(logits: DTensor, name: str) -> Group:
    mesh = logits.device_mesh
    return mesh.get_group(name) if name in (mesh.mesh_dim_names or ()) else None


def _for_division(value: Tensor, metrics: Metrics, size: int) -> tuple[Tensor, Metrics]:
    """The gradient times the context-parallel size, by which NeMo-RL divides the loss."""
    return value.detach() + size * (value - value.detach()), metrics


def _check_shape(logits: Logits, data: Mapping[str, Any]) -> None:
    rows, columns = data["input_ids"].shape
    if len(logits.shape) != 3 or logits.shape[0] != rows or logits.shape[1] < columns:
        raise ShapeError(
            f"logits must be [{rows}, {columns} or more, V/TP] to fit data['input_ids'], but they are "
            f"{list(logits.shape)}"
        )
