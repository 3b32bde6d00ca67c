"""The training engine: log-probs of complete sequences and the loss of a microbatch, on packed tokens.

Tensor-parallel ranks run the same transformer body, and each computes the output layer for its shard of the vocabulary.
The gradient of the hidden states is therefore summed over these ranks. Context-parallel ranks run the body on their
shard of every sequence; only attention uses the keys and values of all shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.data_keys import TOKEN_MASK
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments.packed_reductions import gather_ranks
from nemo_geomask.tools.lab.arithmetic import linear
from nemo_geomask.tools.lab.generation_engine import filter_logits, zero_filtered
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.packed_rows import Packing, pack_sequences, vocabulary_shards
from nemo_geomask.tools.lab.policy_model import hook_routers, routes_differ
from nemo_geomask.tools.lab.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenScores(NamedTuple):
    """Scores of tokens, in rows [B, T] or packed [N].

    Attributes:
        routes_differ: 1 where this model's routers select other experts than the generation engine's did, at the
            position that predicts the token, otherwise 0.
    """

    logprobs: Tensor  # log-probs, -inf where the filter excludes the token
    entropies: Tensor  # entropies, or 0 if they were not requested
    routes_differ: Tensor


class TrainingEngine:
    """Engine that runs the policy for training, without padding, on this rank's shards of sequences and vocabulary.

    Every rank has all parameters, but a tensor-parallel rank uses only its rows of the output layer.

    Attributes:
        ranks: the processes that divide the work; by default this one alone.
        is_filtered: True if log-probs are normalised over the tokens that the generation engine's top-p and top-k keep.
        recorded_curr: [B, T] of a rollout batch, into which :meth:`evaluate` writes the log-probs of this rank's
            tokens, at the rows ``batch["row"]``; None if they are not recorded.
    """

    def __init__(self, ranks: Ranks | None = None, recipe: LabRecipe | None = None) -> None:
        recipe = LabRecipe() if recipe is None else recipe
        self.ranks = Ranks() if ranks is None else ranks
        self.is_filtered = recipe.policy.generation.has_filters and recipe.lab.filter_logprobs
        self.recorded_curr: Tensor | None = None
        self._policy = recipe.policy
        self._autocast = torch.autocast(
            recipe.lab.device, dtype=torch.bfloat16, enabled=recipe.policy.precision == "bfloat16"
        )

    @torch.no_grad()
    def score_batch(
        self,
        model: PreTrainedModel,
        data: Mapping[str, Tensor],
        micro_batch: int,
        *,
        entropy: bool = False,
    ) -> TokenScores:
        """Compute log-probs, entropies (if requested) and differing routes of a batch on the CPU, on all ranks.

        ``data`` has ``input_ids``, ``input_lengths`` and, if the engine reported them, ``routed_experts``. A forward
        pass has ``micro_batch`` rows.

        Returns: tensors [B, T] on the CPU, 0 in column 0, which no token predicts.
        """
        scores = torch.zeros(3, *data["input_ids"].shape, dtype=torch.float32)
        dp = self.ranks.dp
        for rows in torch.split(torch.arange(scores.shape[1]), micro_batch)[dp.rank :: dp.size]:
            part = {key: value[rows].to(model.device) for key, value in data.items()}
            packing = pack_sequences(part["input_lengths"], self.ranks.cp)
            all_tokens = torch.ones_like(part["input_ids"], dtype=torch.float32)
            targets = packing.pack({**part, TOKEN_MASK: all_tokens, "sample_mask": all_tokens[:, 0]})["targets"]
            values = self._forward(model, packing, part, targets, entropy=entropy)
            scores[:, rows] = torch.stack([packing.unpack(value, targets, all_tokens) for value in values]).cpu()
        return TokenScores(*self.ranks.sum_shards(scores))

    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss of a microbatch on the CPU, and its metrics, summed over tensor- and context-parallel ranks.

        A single rank has complete rows and calls the loss as NeMo-RL does. Several ranks have shards of the rows and
        call :meth:`PolicyLoss.packed`. ``documents`` and ``tokens`` are the numbers of responses and trained tokens in
        the optimiser step, over all microbatches and ranks.
        """
        data = {key: value.to(model.device) for key, value in batch.items()}
        packing = pack_sequences(data["input_lengths"], self.ranks.cp)
        packed = packing.pack(data)
        logprobs = self._forward(model, packing, data, packed["targets"]).logprobs
        if self.is_filtered:
            logprobs = zero_filtered(logprobs)
        rows = packing.unpack(logprobs, packed["targets"], data[TOKEN_MASK])
        if self.recorded_curr is not None:
            self.recorded_curr[batch["row"]] = rows.detach().cpu()
        if self.ranks.tp.size * self.ranks.cp.size > 1:
            return loss.packed(logprobs, packed, packing.segments, documents, tokens)
        return loss(next_token_logprobs=rows[:, 1:], data=data, global_valid_seqs=documents, global_valid_toks=tokens)

    def _forward(
        self,
        model: PreTrainedModel,
        packing: Packing,
        batch: Mapping[str, Tensor],
        targets: Tensor,
        *,
        entropy: bool = False,
    ) -> TokenScores:
        """Return the scores [N] of the targets of this rank's tokens."""
        tp, generation = self.ranks.tp, self._policy.generation
        # Padding tokens repeat the row's last column; no valid token depends on them.
        index = packing.row, packing.position.clamp(max=batch["input_ids"].shape[1] - 1)
        sizes = vocabulary_shards(model.lm_head.out_features, tp.size)
        columns = model.lm_head.weight.split(sizes)[tp.rank]
        routes = batch["routed_experts"][index] if "routed_experts" in batch else None
        with self._autocast, hook_routers(model, routes if self._policy.router_replay.enabled else None) as chosen:
            ids, position = batch["input_ids"][index][None], packing.position[None]
            body = model.model(input_ids=ids, position_ids=position, use_cache=False, packing=packing)
            logits = linear(_sum_gradient_over_ranks(body.last_hidden_state[0], tp.group), columns).float()
        if self.is_filtered:
            logits = filter_logits(logits, generation)
        elif generation.temperature != 1:
            logits = logits / generation.temperature
        differ = torch.zeros(len(ids[0]), device=ids.device)
        if routes is not None:
            differ = routes_differ(torch.stack(chosen, dim=1), routes).float()
        if entropy:
            logprobs_and_entropy = vocab_parallel_logprobs(
                logits, targets, entropy=True, group=tp.group, shard_sizes=sizes
            )
            return TokenScores(*logprobs_and_entropy, differ)
        logprobs = vocab_parallel_logprobs(logits, targets, group=tp.group, shard_sizes=sizes)
        return TokenScores(logprobs, torch.zeros_like(differ), differ)


def _sum_gradient_over_ranks(values: Tensor, group: Any) -> Tensor:
    """Return the values, whose gradient is summed over ranks: what a layer sharded by columns does to its input."""
    if group is None:
        return values
    result: Tensor = _SumGradientOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _SumGradientOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_ranks(grads[0], ctx.group).sum(dim=0), None
