"""The training engine under tensor and context parallelism, on packed shares of the sequences.

Tensor-parallel ranks run the same transformer body and each its own columns of the output layer, so the gradient of
the hidden states, of which each rank has the part through its columns, is summed over them. Context-parallel ranks run
the body on their share of every sequence; only attention looks beyond it, at the keys and values of all shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nemo_geomask.integrations.packing import pack_rows
from nemo_geomask.lab.engine import TrainEngine
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.ranks import Axis
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PackedEngine", "Packing", "lay_out", "vocabulary_shards"]

_ATTENTION = "nemo_geomask_packed"


@dataclass(frozen=True)
class Packing:
    """Sequences one after another, each padded to a multiple of 2·CP, and this rank's share of them.

    Attributes:
        lengths: [S] tokens of each sequence, without padding.
        segments: whose tokens this rank holds, N of them.
        row: [N] sequence of each token.
        position: [N] its place in the sequence.
        queries: [S, Q] where this rank's tokens of each sequence lie in its share, filled up with the last.
        slots: [N] where each token lies in the flattened ``queries``.
        keys: [S, K] where the whole sequence's tokens lie in the shares of all ranks put one after another, filled up
            with the last.
        visible: [S, 1, Q, K] bool, what each query may attend to: its own sequence up to itself.
        cp: the context-parallel axis.
    """

    lengths: Tensor
    segments: PackedSegments
    row: Tensor
    position: Tensor
    queries: Tensor
    slots: Tensor
    keys: Tensor
    visible: Tensor
    cp: Axis

    def pack(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """NeMo-RL's rows as this rank's tokens, see :func:`nemo_geomask.integrations.packing.pack_rows`."""
        return pack_rows(data, self.segments, starts=self.segments.cu_seqlens[:-1], lengths=self.lengths)

    def unpack(self, values: Tensor, targets: Tensor, like: Tensor) -> Tensor:
        """This rank's values [N] of the tokens that it predicts as rows [B, T], as wide as ``like``; 0 elsewhere."""
        rows, predicts = torch.zeros_like(like), targets >= 0
        rows[self.row[predicts], self.position[predicts] + 1] = values[predicts]
        return rows


def lay_out(lengths: Tensor, cp: Axis) -> Packing:
    """Lay out sequences of the given lengths [S], each at least 1."""
    padded = -(-lengths // (2 * cp.size)) * (2 * cp.size)
    offsets = _offsets(padded)
    groups = () if cp.group is None else (cp.group,)
    shares = [PackedSegments(offsets, cp_rank=rank, cp_size=cp.size, groups=groups) for rank in range(cp.size)]
    segments = shares[cp.rank]
    row = segments.spread(torch.arange(len(lengths)))
    position = segments.token_index - offsets[row]
    local = padded // cp.size
    queries = _rows(_offsets(local), local)
    # Position in the whole packed row to position among the shares put one after another.
    where = torch.cat([share.token_index for share in shares]).argsort()
    keys = where[_rows(offsets, padded)]
    # A key that fills up comes after every query of its sequence, so the causal rule hides it too.
    visible = torch.arange(keys.shape[1]) <= position[queries][:, None, :, None]
    slots = torch.arange(len(row)) + (torch.arange(len(lengths)) * queries.shape[1] - _offsets(local)[:-1])[row]
    return Packing(lengths, segments, row, position, queries, slots, keys, visible, cp)


def vocabulary_shards(vocab_size: int, tp: int) -> list[int]:
    """Columns of each tensor-parallel rank: as even as can be, the first ranks one more."""
    return [vocab_size // tp + (rank < vocab_size % tp) for rank in range(tp)]


class PackedEngine(TrainEngine):
    """Packed context-parallel shares, vocabulary-parallel log-probs and :meth:`PolicyLoss.packed`.

    All parameters are on every rank; of the output layer's, a rank uses its own rows alone.
    """

    def prepare(self, model: PreTrainedModel) -> None:
        """Let the model's attention look across the shares."""
        require("transformers").AttentionInterface.register(_ATTENTION, _attention)
        model.set_attn_implementation(_ATTENTION)

    def _scores(self, model: PreTrainedModel, batch: Mapping[str, Tensor], *, entropy: bool, whole: bool) -> Tensor:
        packing = lay_out(batch["input_lengths"], self.ranks.cp)
        ones = torch.ones(batch["input_ids"].shape, dtype=torch.float32)
        everything = {"token_mask": ones, "sample_mask": ones[:, 0]}
        targets = packing.pack({"input_ids": batch["input_ids"], **everything})["targets"]
        logits, differ = self._forward(model, packing, batch)
        found = self._statistics(self._scaled(logits, whole=whole), targets, entropy=entropy)
        return torch.stack([packing.unpack(values, targets, ones) for values in (*found, differ)])

    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """See :meth:`TrainEngine.evaluate`."""
        packing = lay_out(batch["input_lengths"], self.ranks.cp)
        packed = packing.pack(batch)
        logits, _ = self._forward(model, packing, batch)
        logprobs = drawable(self._statistics(self._scaled(logits), packed["targets"])[0])
        if self.curr is not None:
            self.curr[batch["row"]] = packing.unpack(logprobs.detach(), packed["targets"], batch["token_mask"])
        return loss.packed(logprobs, packed, packing.segments, documents, tokens)

    def _forward(
        self, model: PreTrainedModel, packing: Packing, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V/TP] of this rank's tokens and columns; where their routes differ from the engine's, [N]."""
        tp = self.ranks.tp
        # Padding repeats a row's last column; nothing that counts looks at it.
        where = packing.row, packing.position.clamp(max=batch["input_ids"].shape[1] - 1)
        sizes = vocabulary_shards(model.lm_head.out_features, tp.size)
        columns = model.lm_head.weight.split(sizes)[tp.rank]
        routes = self._routes(batch)
        with self.autocast, routing(model, None if routes is None else routes[where]) as chosen:
            ids, place = batch["input_ids"][where][None], packing.position[None]
            body = model.model(input_ids=ids, position_ids=place, use_cache=False, packing=packing)
            hidden: Tensor = body.last_hidden_state[0]
            if tp.group is not None:
                hidden = _ToShards.apply(hidden, tp.group)  # type: ignore[no-untyped-call]
            logits = F.linear(hidden, columns)
        known = batch.get("routed_experts")
        differ = torch.zeros(len(logits)) if known is None else differs(torch.stack(chosen, 1), known[where]).float()
        return logits, differ

    def _statistics(self, logits: Tensor, targets: Tensor, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the targets, and entropies or 0."""
        tp = self.ranks.tp
        sizes = vocabulary_shards(sum(...), tp.size)
        if entropy:
            return vocab_parallel_logprobs(logits, targets, entropy=True, group=tp.group, shard_sizes=sizes)
        logprobs = vocab_parallel_logprobs(logits, targets, group=tp.group, shard_sizes=sizes)
        return logprobs, torch.zeros_like(logprobs)


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def _rows(offsets: Tensor, lengths: Tensor) -> Tensor:
    """[S, longest] consecutive positions from each offset, filled up with the last."""
    columns = torch.arange(int(lengths.max()))
    return offsets[:-1, None] + columns.minimum(lengths[:, None] - 1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, by the signature that ``transformers`` calls.

    Args:
        module: the layer, for its number of query heads to a key head.
        query: [1, H, N, D] of this rank's tokens, rotated by their places in the sequence.
        key: [1, G, N, D], likewise.
        value: [1, G, N, D].
        attention_mask: None; the packing says who sees whom.
        packing: passed through the model by keyword.
        scaling: of the scores.

    Returns:
        [1, N, H, D] and no weights.
    """
    groups: Any = module.num_key_value_groups
    both = torch.stack([key[0], value[0]]).permute(2, 0, 1, 3)  # [N, 2, G, D]
    if packing.cp.group is not None:
        both = _FromShares.apply(both, packing.cp)  # type: ignore[no-untyped-call]
    keys, values = (
        tokens.transpose(1, 2).repeat_interleave(groups, dim=1) for tokens in _take(both, packing.keys).unbind(2)
    )  # [S, H, K, D]
    queries = _take(query[0].transpose(0, 1), packing.queries).transpose(1, 2)  # [S, H, Q, D]
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=packing.visible, scale=scaling)
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, packing.slots)[None], None


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """[N, …] at [S, K] to [S, K, …]; by index_select, whose gradient is the faster one."""
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


class _FromShares(torch.autograd.Function):
    """[N, …] of each context-parallel rank one after another; the gradient is summed over the ranks that looked."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        share = share.contiguous()
        parts = [torch.empty_like(share) for _ in range(cp.size)]
        dist.all_gather(parts, share, group=cp.group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.cp.group)
        return whole.chunk(ctx.cp.size)[ctx.cp.rank], None


class _ToShards(torch.autograd.Function):
    """Hidden states on their way into the sharded output layer: what comes back through the shards is summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
