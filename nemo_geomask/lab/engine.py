"""The training engine: log-probs of whole sequences and the loss of a microbatch, however they are laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.model import token_statistics
from nemo_geomask.lab.ranks import Ranks
from nemo_geomask.lab.recipe import LabRecipe
from nemo_geomask.lab.routing import differs, routing
from nemo_geomask.lab.sampling import drawable, filtered
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PaddedEngine", "TrainEngine"]


class TrainEngine(ABC):
    """How the training model runs.

    Args:
        ranks: the processes that share the work.
        recipe: precision, router replay, and what the log-probs are of; None: the defaults.

    Attributes:
        ranks: likewise.
        autocast: the context of every pass through the model.
        filters: whether log-probs are those of the tokens that the generation engine's filter leaves.
        curr: [B, T] of a rollout batch; where it is set, :meth:`evaluate` puts the log-probs of this rank's tokens into
            the rows that ``batch["row"]`` names.
    """

    def __init__(self, ranks: Ranks | None = None, recipe: LabRecipe | None = None) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        recipe = LabRecipe() if recipe is None else recipe
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.policy.precision == "bfloat16")
        self.filters = recipe.policy.generation.filters and recipe.lab.filter_logprobs
        self._replays = recipe.policy.router_replay.enabled
        self._generation = recipe.policy.generation
        self.curr: Tensor | None = None

    @abstractmethod
    def prepare(self, model: PreTrainedModel) -> None:
        """Set up a model before its first pass through this engine; copies of it need no second time."""

    @abstractmethod
    def _scores(self, model: PreTrainedModel, batch: Mapping[str, Tensor], *, entropy: bool, whole: bool) -> Tensor:
        """[3, B, T] of this rank's tokens, see :meth:`scores`; 0 elsewhere, undefined beyond a length."""

    def _routes(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """[B, T, L, K] to replay."""
        return batch["routed_experts"] if self._replays else None

    def _scaled(self, logits: Tensor, *, whole: bool = False) -> Tensor:
        """Logits of what tokens are drawn from; ``whole``: without the filter."""
        if self.filters and not whole:
            return filtered(logits.float(), self._generation)
        return logits.float() / self._generation.temperature

    @abstractmethod
    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """Loss of one microbatch and its metrics, whole over tensor- and context-parallel ranks.

        Args:
            model: the policy.
            loss: the loss.
            batch: [B, T] and [B] tensors under NeMo-RL's keys.
            documents: in the optimiser step, over all microbatches and ranks.
            tokens: trained tokens in the same.
        """

    @torch.no_grad()
    def scores(
        self,
        model: PreTrainedModel,
        data: Mapping[str, Tensor],
        micro_batch: int,
        *,
        entropy: bool = False,
        whole: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a model says of a batch, [B, T] on all ranks; column 0, which nothing predicts, is 0.

        Args:
            model: the model.
            data: ``input_ids``, ``input_lengths`` and, where they are known, ``routed_experts``.
            micro_batch: rows of a pass.
            entropy: whether to compute it.
            whole: leave the generation engine's filter out, as NeMo-RL does for the reference policy.

        Returns:
            Log-probs, -inf where the filter leaves the token out; entropies, or 0; 1 where the model by itself would
            have sent the position that predicts the token through other experts than the generation engine did, or 0.
        """
        found = torch.zeros(3, *data["input_ids"].shape, dtype=torch.float32)
        dp = self.ranks.dp
        for rows in torch.split(torch.arange(found.shape[1]), micro_batch)[dp.rank :: dp.size]:
            part = {key: value[rows] for key, value in data.items()}
            found[:, rows] = self._scores(model, part, entropy=entropy, whole=whole)
        logprobs, entropies, differ = self.ranks.assemble(found)
        return logprobs, entropies, differ


class PaddedEngine(TrainEngine):
    """Whole padded rows and NeMo-RL's loss protocol; without tensor and context parallelism."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Nothing to do."""

    def _scores(self, model: PreTrainedModel, batch: Mapping[str, Tensor], *, entropy: bool, whole: bool) -> Tensor:
        logits, differ = self._forward(model, batch)
        found = token_statistics(self._scaled(logits, whole=whole), batch["input_ids"], entropy=entropy)
        return torch.nn.functional.pad(torch.stack([*found, differ]), (1, 0))

    def _forward(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        routes = self._routes(batch)
        with self.autocast, routing(model, None if routes is None else routes.flatten(0, 1)) as chosen:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        known = batch.get("routed_experts")
        if known is None:
            return logits, torch.zeros(logits.shape[:-1])
        own = torch.stack(chosen, dim=1).unflatten(0, known.shape[:2])
        return logits, differs(own, known)[:, :-1].float()

    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """See :meth:`TrainEngine.evaluate`."""
        logits, _ = self._forward(model, batch)
        logprobs, _ = token_statistics(self._scaled(logits), batch["input_ids"])
        logprobs = drawable(logprobs)
        if self.curr is not None:
            self.curr[batch["row"], 1:] = logprobs.detach()
        return loss(next_token_logprobs=logprobs, data=batch, global_valid_seqs=documents, global_valid_toks=tokens)
