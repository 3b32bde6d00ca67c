"""The training engine: log-probs of whole sequences and the loss of a microbatch, however they are laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.model import token_logprobs
from nemo_geomask.lab.ranks import Ranks
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PaddedEngine", "TrainEngine"]


class TrainEngine(ABC):
    """How the training model runs.

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

    @abstractmethod
    def prepare(self, model: PreTrainedModel) -> None:
        """Set up a model before its first pass through this engine; copies of it need no second time."""

    @abstractmethod
    def logprobs(self, model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, *, entropy: bool = False) -> Tensor:
        """Log-probs of this rank's tokens among [B, T] ids, or entropies; 0 elsewhere, undefined beyond a length."""

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
    def sequence_logprobs(
        self, model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, micro_batch: int, *, entropy: bool = False
    ) -> Tensor:
        """Log-probs of [B, T] ids, or entropies, on all ranks; column 0, which nothing predicts, is 0."""
        whole = torch.zeros(input_ids.shape, dtype=torch.float32)
        dp = self.ranks.dp
        for rows in torch.split(torch.arange(len(input_ids)), micro_batch)[dp.rank :: dp.size]:
            whole[rows] = self.logprobs(model, input_ids[rows], lengths[rows], entropy=entropy)
        return self.ranks.assemble(whole)


class PaddedEngine(TrainEngine):
    """Whole padded rows and NeMo-RL's loss protocol; without tensor and context parallelism."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Nothing to do."""

    def logprobs(self, model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, *, entropy: bool = False) -> Tensor:
        """See :meth:`TrainEngine.logprobs`."""
        with self.autocast:
            return torch.nn.functional.pad(token_logprobs(model, input_ids, entropy=entropy), (1, 0))

    def evaluate(
        self, model: PreTrainedModel, loss: PolicyLoss, batch: Mapping[str, Tensor], documents: int, tokens: int
    ) -> tuple[Tensor, Metrics]:
        """See :meth:`TrainEngine.evaluate`."""
        with self.autocast:
            logprobs = token_logprobs(model, batch["input_ids"])
        if self.curr is not None:
            self.curr[batch["row"], 1:] = logprobs.detach()
        return loss(next_token_logprobs=logprobs, data=batch, global_valid_seqs=documents, global_valid_toks=tokens)
