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
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.routing import differs, routing
from nemo_geomask.lab.sampling import drawable, filtered
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
        recipe: precision, router replay, and what the log-probs are of; None: the defaults.

    Attributes:
        ranks: likewise.
        filters: whether log-probs are those of the tokens that the generation engine's top-p and top-k leave.
        curr: [B, T] of a rollout batch; where it is set, :meth:`evaluate` puts the log-probs of this rank's tokens into
            the rows that ``batch["row"]`` names.
    """

    def __init__(self, ranks: Ranks | None = None, recipe: LabRecipe | None = None) -> None:
        recipe = LabRecipe() if recipe is None else recipe
        self.ranks = Ranks() if ranks is None else ranks
        self.filters = recipe.policy.generation.filters and recipe.lab.filter_logprobs
        self.curr: Tensor | None = None
        self._policy = recipe.policy
        self._autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.policy.precision == "bfloat16")

    @torch.no_grad()
    def scores(
        self,
        model: PreTrainedModel,
        data: Mapping[str, Tensor],
        micro_batch: int,
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a model says of a batch, [B, T] on all ranks; column 0, which nothing predicts, is 0.

        Args:
            model: the model.
            data: ``input_ids``, ``input_lengths`` and, where they are known, ``routed_experts``.
            micro_batch: rows of a pass.
            entropy: whether to compute it.

        Returns:
            Log-probs, -inf where the filter leaves the token out; entropies, or 0; 1 where the model by itself would
            have sent the position that predicts the token through other experts than the generation engine did, or 0.
        """
        found = torch.zeros(3, *data["input_ids"].shape, dtype=torch.float32)
        dp = self.ranks.dp
        for rows in torch.split(torch.arange(found.shape[1]), micro_batch)[dp.rank :: dp.size]:
            part = {key: value[rows] for key, value in data.items()}
            packing = lay_out(part["input_lengths"], self.ranks.cp)
            ones = torch.ones_like(found[0, rows])
            targets = packing.pack({**part, "token_mask": ones, "sample_mask": ones[:, 0]})["targets"]
            values = self._forward(model, packing, part, targets, entropy=entropy)
            found[:, rows] = torch.stack([packing.unpack(value, targets, ones) for value in values])
        logprobs, entropies, differ = self.ranks.assemble(found)
        return logprobs, entropies, differ

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
        logprobs, _, _ = self._forward(model, packing, batch, packed["targets"])
        if self.filters:
            logprobs = drawable(logprobs)
        rows = packing.unpack(logprobs, packed["targets"], batch["token_mask"])
        if self.curr is not None:
            self.curr[batch["row"]] = rows.detach()
        if self.ranks.tp.size * self.ranks.cp.size > 1:
            return loss.packed(logprobs, packed, packing.segments, documents, tokens)
        return loss(next_token_logprobs=rows[:, 1:], data=batch, global_valid_seqs=documents, global_valid_toks=tokens)

    def _forward(
        self,
        model: PreTrainedModel,
        packing: Packing,
        batch: Mapping[str, Tensor],
        targets: Tensor,
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`scores` returns, [N] each, of the targets of this rank's tokens."""
        tp, generation = self.ranks.tp, self._policy.generation
        # Padding repeats a row's last column; nothing that counts looks at it.
        where = packing.row, packing.position.clamp(max=batch["input_ids"].shape[1] - 1)
        sizes = vocabulary_shards(model.lm_head.out_features, tp.size)
        columns = model.lm_head.weight.split(sizes)[tp.rank]
        routes = batch["routed_experts"][where] if "routed_experts" in batch else None
        with self._autocast, routing(model, routes if self._policy.router_replay.enabled else None) as chosen:
            ids, place = batch["input_ids"][where][None], packing.position[None]
            body = model.model(input_ids=ids, position_ids=place, use_cache=False, packing=packing)
            logits = linear(to_shards(body.last_hidden_state[0], tp.group), columns).float()
        if self.filters:
            logits = filtered(logits, generation)
        elif generation.temperature != 1:
            logits = logits / generation.temperature
        differ = torch.zeros(len(ids[0])) if routes is None else differs(torch.stack(chosen, dim=1), routes).float()
        if entropy:
            both = vocab_parallel_logprobs(logits, targets, entropy=True, group=tp.group, shard_sizes=sizes)
            return *both, differ
        logprobs = vocab_parallel_logprobs(logits, targets, group=tp.group, shard_sizes=sizes)
        return logprobs, torch.zeros_like(differ), differ
