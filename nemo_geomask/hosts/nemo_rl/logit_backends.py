"""``logprob_backend`` other than ``nemo_rl``: the loss takes logits and computes its log-probs itself.

NeMo-RL's own path gathers one log-prob per token over the context-parallel ranks, and calls the loss once for each
packed sequence. Here the tokens stay on their ranks, and the loss is called once for a packed microbatch. Four numbers
per token cross the tensor-parallel group, and statistics [k, S] of the sequences cross the context-parallel group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_geomask.data_keys import TOKEN_MASK
from nemo_geomask.errors import ConfigError, Problem, ShapeError
from nemo_geomask.hosts.logprob_libraries import logprob_backend
from nemo_geomask.hosts.nemo_rl.current_logprobs import ENTROPY, KeepingLoss, add_fingerprints
from nemo_geomask.hosts.nemo_rl.hidden_states import HiddenStates, refuse_if
from nemo_geomask.losses import PolicyLoss, protocol
from nemo_geomask.losses.packing import IGNORE, check_rows, pack_rows
from nemo_geomask.metrics import Metrics
from nemo_geomask.segments import PackedSegments

Group = dist.ProcessGroup | None
Logits = Tensor | HiddenStates
Counts = tuple[Tensor | float, Tensor | float]  # valid sequences and tokens of the optimiser step


class LogitLoss:
    """A policy loss that NeMo-RL's workers call with logits.

    Under tensor and context parallelism it finds the groups itself: in the mesh of a DTensor, or in Megatron's
    ``parallel_state``.

    Args:
        loss: from :func:`nemo_geomask.build_loss`; its ``logprob_backend`` computes the log-probs.

    Attributes:
        takes_hidden: True if the workers pass hidden states in place of logits, see
            :mod:`nemo_geomask.hosts.nemo_rl.hidden_states`.

    Raises:
        ConfigError: ``use_fused_linear_logprobs`` is set, which forms no logits.
        MissingDependencyError: the back end's library can't be imported.
    """

    def __init__(self, loss: PolicyLoss) -> None:
        config = loss.config
        if loss.use_fused_linear_logprobs:
            message = (
                f"logprob_backend: {config.logprob_backend} needs logits, which NeMo-RL's fused linear log-probs "
                "never form; turn those off, or set logprob_backend: nemo_rl"
            )
            raise ConfigError(Problem(("loss_fn.logprob_backend",), message))
        self.loss = loss
        self.config = config
        self.takes_hidden = config.logprob_backend == "geomask_linear"
        self._logprobs: Callable[..., Any] = (
            HiddenStates.logprobs if self.takes_hidden else logprob_backend(config.logprob_backend)
        )
        self._keeps_entropy = isinstance(loss, KeepingLoss) and config.record is not None and config.record.entropy

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process looks up the back end's functions itself.
        return LogitLoss, (self.loss,)

    def for_prepared_batches(self, *changes: Mapping[str, Tensor]) -> LogitLoss:
        """Return this loss for batches after the pre-step pass.

        See :meth:`nemo_geomask.losses.PolicyLoss.for_prepared_batches`.
        """
        return LogitLoss(self.loss.for_prepared_batches(*changes))

    @property
    def input_type(self) -> Any:
        """``LossInputType.LOGIT``."""
        return protocol.resolve(protocol.LossInputType.LOGIT)

    def __getattr__(self, name: str) -> Any:
        """Return what else NeMo-RL reads of a loss."""
        return getattr(self.loss, name)

    def __call__(
        self,
        logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        *,
        vocab_parallel_group: Group = None,
        context_parallel_group: Group = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute loss and metrics of a padded microbatch.

        Args:
            logits: [B, P/CP, V/TP], already divided by the temperature: this rank's columns of its load-balanced
                shard of each row, where P ≥ T is the padded length; or a DTensor of them over mesh dimensions ``tp``
                and ``cp``.
            data: see :func:`nemo_geomask.losses.raw_batch.take_padded`, and ``input_ids`` [B, T].
            global_valid_seqs: as for :class:`~nemo_geomask.losses.PolicyLoss`.
            global_valid_toks: as for :class:`~nemo_geomask.losses.PolicyLoss`.
            vocab_parallel_group: tensor-parallel group; not used for a DTensor.
            context_parallel_group: context-parallel group; not used for a DTensor. NeMo-RL divides the loss by its
                size; the loss is scaled so that each rank then gets the gradient of the complete loss.

        If neither group is given, they are Megatron's, or none where Megatron has none.

        Raises:
            ShapeError, DataError: tensors do not fit or are missing, or targets are outside the vocabulary.
        """
        counts = global_valid_seqs, global_valid_toks
        if isinstance(logits, DTensor):
            return self._sharded_rows(logits, data, counts)
        if vocab_parallel_group is None and context_parallel_group is None:
            vocab_parallel_group, context_parallel_group = _megatron_groups()
        local = self._local(logits)
        size = _size(context_parallel_group)
        if size == 1:
            return self._padded(local, data, vocab_parallel_group, counts)
        rows, columns = local.shape[:2]
        offsets = torch.arange(rows + 1, device="cpu") * columns * size
        result = self._packed(local, data, offsets, None, vocab_parallel_group, context_parallel_group, counts)
        return _scale_gradient(*result, size)

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
        """Compute loss and metrics of a packed microbatch, in one call for all sequences.

        Args:
            logits: [1, N/CP, V/TP], this rank's shard of the packed row; positions behind its last sequence are
                ignored.
            data: rows [B, T], as for calling the loss.
            global_valid_seqs: as for calling the loss.
            global_valid_toks: as for calling the loss.
            cu_seqlens_q: [B+1], offsets of the sequences without padding.
            cu_seqlens_q_padded: [B+1], offsets in the packed row; None: there is no padding.
            vocab_parallel_group: as for calling the loss.
            context_parallel_group: as for calling the loss.
        """
        local = self._local(logits)
        if isinstance(logits, DTensor):
            vocab_parallel_group = _mesh_group(logits, "tp")
        offsets = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).cpu()
        size = _size(context_parallel_group)
        # NeMo-RL's DTensor workers pad a short row to a minimal length.
        columns = int(offsets[-1]) // size
        local = local.first(columns) if isinstance(local, HiddenStates) else local[:, :columns]
        counts = global_valid_seqs, global_valid_toks
        lengths = cu_seqlens_q.diff()
        result = self._packed(local, data, offsets, lengths, vocab_parallel_group, context_parallel_group, counts)
        return _scale_gradient(*result, size)

    def _local(self, logits: Tensor) -> Logits:
        """Return this rank's logits, or the hidden states in their place; raise WorkerError for the wrong ones."""
        if self.takes_hidden:
            return HiddenStates.require(logits)
        HiddenStates.refuse(logits, self.config.name)
        return logits.to_local() if isinstance(logits, DTensor) else logits

    def _padded(self, logits: Logits, data: Mapping[str, Any], group: Group, counts: Counts) -> tuple[Tensor, Metrics]:
        rows, width = data["input_ids"].shape
        if len(logits.shape) != 3 or logits.shape[0] != rows or logits.shape[1] < width:
            raise ShapeError(
                f"logits must be [{rows}, {width} or more, V/TP] to fit data['input_ids'], but they are "
                f"{list(logits.shape)}"
            )
        mask = data[TOKEN_MASK][:, 1:].bool() & data["sample_mask"].bool().unsqueeze(-1)
        targets = torch.full(logits.shape[:2], IGNORE, dtype=torch.int64, device=logits.device)
        targets[:, : width - 1] = torch.where(mask, data["input_ids"][:, 1:], IGNORE).to(logits.device)
        logprobs, entropy = self._logprobs_and_entropy(logits, targets, group)
        if entropy is not None:
            data = {**data, ENTROPY: entropy[:, : width - 1]}
        return self.loss(logprobs[:, : width - 1], data, *counts)

    def _packed(
        self,
        logits: Logits,
        data: Mapping[str, Any],
        offsets: Tensor,
        lengths: Tensor | None,
        vocab_group: Group,
        context_group: Group,
        counts: Counts,
    ) -> tuple[Tensor, Metrics]:
        """Compute loss and metrics of packed rows, or of rows that context parallelism shards.

        Args:
            logits: of this rank's tokens.
            data: rows [B, T].
            offsets: [B+1] on the host, offsets of the sequences in the packed row.
            lengths: [B], lengths of the sequences without padding; None: T.
            vocab_group: tensor-parallel group.
            context_group: context-parallel group.
            counts: of the optimiser step.
        """
        size = _size(context_group)
        segments = PackedSegments(
            offsets,
            device=logits.device,
            cp_rank=0 if context_group is None else dist.get_rank(context_group),
            cp_size=size,
            groups=(context_group,) if context_group is not None and size > 1 else (),
        )
        if math.prod(logits.shape[:-1]) != segments.tokens:
            raise ShapeError(
                f"logits must hold {segments.tokens} rows, this rank's shard of the packed tokens, but they are "
                f"{list(logits.shape)}"
            )
        if lengths is None:
            lengths = torch.full((segments.count,), data["input_ids"].shape[1])
        lengths = lengths.to(logits.device, torch.int64)
        add_fingerprints(self.loss, data)
        packed = pack_rows(data, segments, starts=segments.cu_seqlens[:-1], lengths=lengths)
        check_rows(data, lengths=lengths, vocab_size=logits.shape[-1] * _size(vocab_group))
        targets = packed["targets"].view(logits.shape[:-1])
        logprobs, entropy = self._logprobs_and_entropy(logits, targets, vocab_group)
        if entropy is not None:
            packed[ENTROPY] = entropy.reshape(-1)
        return self.loss.packed(logprobs.reshape(-1), packed, segments, *counts)

    def _logprobs_and_entropy(self, logits: Logits, targets: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs [B, S], and entropies [B, S] if they are recorded."""
        if not self._keeps_entropy:
            return self._logprobs(logits, targets, group=group, ignore_index=IGNORE), None
        logprobs, entropy = self._logprobs(logits, targets, group=group, ignore_index=IGNORE, entropy=True)
        return logprobs, entropy.detach()

    def _sharded_rows(self, logits: DTensor, data: Mapping[str, Any], counts: Counts) -> tuple[Tensor, Metrics]:
        """Compute loss and metrics of the padded rows of a DTensor worker."""
        group, context_group = _mesh_group(logits, "tp"), _mesh_group(logits, "cp")
        size = _size(context_group)
        refuse_if(self.takes_hidden and size > 1, "context parallelism of DTensor workers")
        local = self._local(logits)
        if size == 1:
            return self._padded(local, data, group, counts)
        # NeMo-RL shards tensors over these ranks as DTensors; of the tensors needed here, that is only input_ids.
        gathered = dict(data)
        order = torch.argsort(data["seq_index"])
        for key, value in data.items():
            if isinstance(value, DTensor):
                gathered[key] = value.full_tensor()[:, order]
        rows, columns = local.shape[:2]
        offsets = torch.arange(rows + 1, device="cpu") * columns * size
        # FSDP averages gradients over these ranks and NeMo-RL multiplies by their number, so nothing is scaled here.
        return self._packed(local, gathered, offsets, None, group, context_group, counts)


def _size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _megatron_groups() -> tuple[Group, Group]:
    """Return Megatron's tensor-parallel and context-parallel groups; None for each that does not exist here."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None, None
    return (
        state.get_tensor_model_parallel_group(check_initialized=False),
        state.get_context_parallel_group(check_initialized=False),
    )


def _mesh_group(logits: DTensor, name: str) -> Group:
    mesh = logits.device_mesh
    return mesh.get_group(name) if name in (mesh.mesh_dim_names or ()) else None


def _scale_gradient(loss: Tensor, metrics: Metrics, size: int) -> tuple[Tensor, Metrics]:
    """Multiply the loss's gradient by the context-parallel size, by which NeMo-RL divides the loss."""
    return loss.detach() + size * (loss - loss.detach()), metrics
