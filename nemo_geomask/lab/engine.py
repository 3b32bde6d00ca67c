"""The training engine: log-probs of whole sequences and the loss of a microbatch, on packed tokens.

Tensor-parallel ranks run the same transformer body and each its own columns of the output layer, so the gradient of
the hidden states, of which each rank has the part through its columns, is summed over them. Context-parallel ranks run
the body on their share of every sequence; only attention looks beyond it, at the keys and values of all shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.arithmetic import linear
from nemo_geomask.lab.packed import Packing, lay_out, to_shards, vocabulary_shards
from nemo_geomask.lab.ranks import Ranks
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TrainEngine"]


class TrainEngine:
    """How the training model runs: without padding, on a share of each sequence and of the vocabulary.

    All parameters are on every rank; of the output layer's, a tensor-parallel rank uses its own rows alone.

    Args:
        ranks: the processes that share the work.
        precision: of matrix products, by autocast; what ``policy.precision`` says.

    Attributes:
        ranks: likewise.
        autocast: the context of every pass through the model.
        curr: [B, T] of a rollout batch; where it is set, :meth:`evaluate` puts the log-probs of this rank's tokens into
            the rows that ``batch["row"]`` names.
    """

    def __init__(self, ranks: Ranks | None = None, precision: str = "float32") -> None:
        self.ranks = Ranks() if ranks is None else ranks
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
        self.curr: Tensor | None = None

    @torch.no_grad()
    def sequence_logprobs(
        self, model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, micro_batch: int, *, entropy: bool = False
    ) -> Tensor:
        """Log-probs of [B, T] ids, or entropies, on all ranks; column 0, which nothing predicts, is 0."""
        whole = torch.zeros(input_ids.shape, dtype=torch.float32)
        dp = self.ranks.dp
        for rows in torch.split(torch.arange(len(input_ids)), micro_batch)[dp.rank :: dp.size]:
            packing = lay_out(lengths[rows], self.ranks.cp)
            ones = torch.ones_like(whole[rows])
            targets = packing.pack({"input_ids": input_ids[rows], "token_mask": ones, "sample_mask": ones[:, 0]})[
                "targets"
            ]
            values = self._forward(model, packing, input_ids[rows], targets, entropy=entropy)
            whole[rows] = packing.unpack(values, targets, ones)
        return self.ranks.assemble(whole)

    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """Loss of one microbatch and its metrics, whole over tensor- and context-parallel ranks.

        One rank's tokens are whole rows, and the loss is called as NeMo-RL calls it; shares go to
        :meth:`PolicyLoss.packed`.

        Args:
            model: the policy.
            loss: the loss.
            batch: [B, T] and [B] tensors under NeMo-RL's keys.
            documents: in the optimiser step, over all microbatches and ranks.
            tokens: trained tokens in the same.
        """
        packing = lay_out(batch["input_lengths"], self.ranks.cp)
        packed = packing.pack(batch)
        logprobs = self._forward(model, packing, batch["input_ids"], packed["targets"])
        rows = packing.unpack(logprobs, packed["targets"], batch["token_mask"])
        if self.curr is not None:
            self.curr[batch["row"]] = rows.detach()
        if self.ranks.tp.size * self.ranks.cp.size > 1:
            return loss.packed(logprobs, packed, packing.segments, documents, tokens)
        return loss(next_token_logprobs=rows[:, 1:], data=batch, global_valid_seqs=documents, global_valid_toks=tokens)

    def _forward(
        self, model: PreTrainedModel, packing: Packing, input_ids: Tensor, targets: Tensor, *, entropy: bool = False
    ) -> Tensor:
        """Log-probs [N] of the targets of this rank's tokens, or entropies there."""
        tp = self.ranks.tp
        # Padding repeats a row's last column; nothing that counts looks at it.
        ids = input_ids[packing.row, packing.position.clamp(max=input_ids.shape[1] - 1)]
        sizes = vocabulary_shards(model.lm_head.out_features, tp.size)
        columns = model.lm_head.weight.split(sizes)[tp.rank]
        with self.autocast:
            place = packing.position[None]
            body = model.model(input_ids=ids[None], position_ids=place, use_cache=False, packing=packing)
            logits = linear(to_shards(body.last_hidden_state[0], tp.group), columns)
        if entropy:
            return vocab_parallel_logprobs(logits, targets, entropy=True, group=tp.group, shard_sizes=sizes)[1]
        return vocab_parallel_logprobs(logits, targets, group=tp.group, shard_sizes=sizes)
