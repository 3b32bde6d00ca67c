"""Batches in NeMo-RL's layout for the tests: [B, T] data, [B, T-1] log-probs, token t+1 at position t."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_geomask import build_loss
from nemo_geomask.segments import PackedSegments

TOKEN_KEYS = (
    "advantages",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "token_mask",
    "token_weight_versions",
)


@dataclass(frozen=True)
class Batch:
    curr: Tensor
    data: dict[str, Tensor]
    seqs: float
    toks: float

    def with_data(self, **changes: Tensor) -> Batch:
        return replace(self, data={**self.data, **changes})

    def rows(self, index: Any) -> Batch:
        """The rows of a permutation or a slice, under the same global counts."""
        return replace(self, curr=self.curr[index], data={key: value[index] for key, value in self.data.items()})


def for_promises(batch: Batch) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """The batch and its counts as the checks of nemo_geomask.testing take them."""
    unused = torch.zeros(len(batch.curr), 1)
    return {"curr": torch.cat([unused, batch.curr], dim=1), **batch.data}, (
        torch.tensor(batch.seqs),
        torch.tensor(batch.toks),
    )


def packed_rows(batch: Batch, *, cp_rank: int = 0, cp_size: int = 1, groups: Any = ()) -> tuple[Any, Any, Any]:
    """The padded rows as packed ones: log-probs, data and segments of this rank."""
    rows, width = batch.curr.shape
    whole = {key: value[:, 1:].reshape(-1) for key, value in batch.data.items() if value.dim() == 2}
    whole |= {key: value for key, value in batch.data.items() if value.dim() == 1}
    offsets = [width * row for row in range(rows + 1)]
    segments = PackedSegments(offsets, cp_rank=cp_rank, cp_size=cp_size, groups=groups)
    index = segments.token_index
    mine = {key: value[index] if key in TOKEN_KEYS else value for key, value in whole.items()}
    return batch.curr.reshape(-1)[index], mine, segments


@dataclass(frozen=True)
class Result:
    loss: Tensor
    grad: Tensor
    metrics: dict[str, float]


def rollouts(
    seed: int = 0,
    *,
    width: int = 14,
    mismatch: float = 0.25,
    staleness: float = 0.5,
    offsets: tuple[float, ...] = (0.3, -0.3, 0.3, -0.3, 0.05, -0.02),
    more_seqs: float = 3.0,
    more_toks: float = 17.0,
) -> Batch:
    """Uneven rows, one for each offset, of which every other pair has a negative advantage, then an empty response
    and a row whose sample mask is 0. Odd rows have prompt tokens in the middle, as in a multi-turn chat.

    Each row's mismatch has its offset as mean, so that bounds on sequence statistics separate rows. The global counts
    are larger than the batch's own, as in a step of several microbatches.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=draw)

    rows = len(offsets) + 2
    gen = -(0.2 + 3.0 * torch.rand(rows, width, generator=draw))
    shift = torch.tensor([*offsets, 0.1, 0.1]).unsqueeze(-1)
    prev = gen + 0.7 * shift + normal(mismatch)
    curr = prev + 0.8 * shift + normal(staleness)
    ref = curr + normal(0.6)
    sign = torch.tensor([1.0 if (row // 2) % 2 == 0 else -1.0 for row in range(rows)]).unsqueeze(-1)
    advantages = sign * (0.4 + torch.rand(rows, width, generator=draw)) + normal(0.3)

    token_mask = torch.zeros(rows, width)
    for row in range(rows):
        start = 2 + row % 3
        end = max(width - row, start + 2)
        token_mask[row, start:end] = 1.0
        if row % 2:
            middle = start + (end - start) // 2
            token_mask[row, middle : middle + 2] = 0.0
    token_mask[-2] = 0.0
    token_mask[0, 0] = 1.0  # the first token has no log-prob and never counts
    sample_mask = torch.ones(rows)
    sample_mask[-1] = 0.0
    data = {
        "input_ids": torch.randint(0, 50, (rows, width), generator=draw),
        "advantages": advantages,
        "prev_logprobs": prev,
        "generation_logprobs": gen,
        "reference_policy_logprobs": ref,
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "rewards": torch.where(torch.arange(rows) % 3 == 0, 1.0, -0.5),
        # From four updates behind the policy that trains to one ahead of it.
        "token_weight_versions": ((torch.arange(width) + torch.arange(rows).unsqueeze(1)) % 6 + 3).float(),
        "training_weight_version": torch.full((rows,), 7),
    }
    toks = float((token_mask[:, 1:] * sample_mask.unsqueeze(-1)).sum())
    return Batch(curr[:, 1:].contiguous(), data, float(sample_mask.sum()) + more_seqs, toks + more_toks)


def one_row(*, curr: Any, prev: Any, gen: Any = None, ref: Any = None, advantage: Any = 1.0, pad: int = 0) -> Batch:
    """A single sequence whose every token trains, then ``pad`` padding columns of zeros."""
    curr = torch.as_tensor(curr, dtype=torch.float32)
    prev = torch.as_tensor(prev, dtype=torch.float32)
    gen = prev if gen is None else torch.as_tensor(gen, dtype=torch.float32)
    ref = curr if ref is None else torch.as_tensor(ref, dtype=torch.float32)
    advantages = torch.as_tensor(advantage, dtype=torch.float32).expand(curr.shape)

    def column(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1), values, torch.zeros(pad)]).unsqueeze(0)

    data = {
        "advantages": column(advantages),
        "prev_logprobs": column(prev),
        "generation_logprobs": column(gen),
        "reference_policy_logprobs": column(ref),
        "token_mask": column(torch.ones_like(curr)),
        "sample_mask": torch.ones(1),
    }
    return Batch(column(curr)[:, 1:], data, 1.0, float(curr.numel()))


def stack(*batches: Batch) -> Batch:
    """Rows of equal width in one batch; the counts add up."""
    keys = set.intersection(*(set(batch.data) for batch in batches))
    data = {key: torch.cat([batch.data[key] for batch in batches]) for key in keys}
    curr = torch.cat([batch.curr for batch in batches])
    return Batch(curr, data, sum(b.seqs for b in batches), sum(b.toks for b in batches))


def evaluate(config: Any, batch: Batch) -> Result:
    """The library's answer; ``config`` is a mapping or a loss."""
    loss_fn = build_loss(config) if isinstance(config, Mapping) else config
    curr = batch.curr.detach().clone().requires_grad_()
    seqs, toks = (torch.tensor(count, device=curr.device) for count in (batch.seqs, batch.toks))
    loss, metrics = loss_fn(curr, batch.data, seqs, toks)
    loss.backward()
    assert curr.grad is not None
    return Result(loss.detach(), curr.grad, metrics)


# Variants and the flags of clipped_pg that select another surrogate. Bounds are such that clips decide on rollouts().
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual_clip": {"ratio_clip_c": 1.4},
    "sequence_ratio": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "no_ratio": {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "cispo_flag": {"use_cispo": True, "ratio_clip_min": 0.3, "ratio_clip_max": 0.4},
    "gspo": {"name": "gspo"},
    "gspo_dual": {"name": "gspo", "ratio_clip_min": 0.1, "ratio_clip_max": 0.1, "ratio_clip_c": 1.15},
    "gspo_token": {"name": "gspo_token", "ratio_clip_min": 0.1, "ratio_clip_max": 0.1},
    "gmpo": {"name": "gmpo"},
    "cispo": {"name": "cispo", "ratio_clip_max": 0.5},
    "sapo": {"name": "sapo", "options": {"tau_pos": 1.0, "tau_neg": 1.5}},
    "dppo": {"name": "dppo", "ratio_anchor": "prev", "options": {"delta": 0.12, "delta_low": 0.07, "cap": 1.7}},
    "ipo": {"name": "ipo", "ratio_anchor": "prev", "options": {"eps": 0.12, "kl_tau": 0.3}},
    "vespo": {"name": "vespo", "ratio_anchor": "prev"},
    "topr": {"name": "topr", "ratio_anchor": "prev"},
    "dro": {"name": "dro", "options": {"beta": 0.4}},
    "reinforce": {"name": "reinforce"},
}

BUDGETS: dict[str, dict[str, Any]] = {
    "m2po": {"preset": "m2po"},
    "worst_tokens": {"log_ratio": "mismatch", "level": "token", "statistic": "prob_diff", "drop_at_most": 0.1},
    "worst_sequences": {"log_ratio": "mismatch", "level": "sequence_mean", "drop_at_most": 0.3},
    "worst_token_of_sequences": {"log_ratio": "mismatch", "level": "sequence_max", "drop_at_most": 0.3},
    "mean_of_sequences": {"log_ratio": "mismatch", "level": "sequence_mean", "statistic": "k3", "until_mean": 0.03},
    "prefixes": {"log_ratio": "mismatch", "level": "prefix_sum", "until_mean": 0.5},
}

MASKS: dict[str, dict[str, Any]] = {
    "geometric": {"preset": "geometric", "min": 0.85, "max": 1.2},
    "product": {"preset": "product", "min": 0.2, "max": 3.0},
    "icepop": {"preset": "icepop", "min": 0.7, "max": 1.6},
    "veto": {"preset": "veto", "min": 0.55, "max": 1.9},
    "opsm": {"preset": "opsm", "delta": 0.1},
    "opsm_policy": {"preset": "opsm", "delta": 0.1, "log_ratio": "policy"},
    "k2_mean": {"preset": "trust_region", "statistic": "k2", "level": "sequence_mean", "max": 0.04},
    "k3_mean": {"preset": "trust_region", "statistic": "k3", "level": "sequence_mean", "max": 0.05},
    "k2_worst": {"preset": "trust_region", "statistic": "k2", "level": "sequence_max", "max": 0.15},
    "k3_worst": {"preset": "trust_region", "statistic": "k3", "level": "sequence_max", "max": 0.2},
    "dppo_tv": {"preset": "dppo_tv", "delta": 0.1, "delta_low": 0.05},
    "dppo_kl": {"preset": "dppo_kl", "delta": 0.02, "log_ratio": "policy"},
    "kpop": {"preset": "kpop", "max": 0.01},
    "cppo": {"preset": "cppo", "delta": 0.12, "delta_low": 0.08, "budget_min": 0.01},
    "vaco": {"preset": "vaco", "statistic": "prob_diff", "delta": 0.08},
    "vaco_kl": {"preset": "vaco", "statistic": "binary_kl", "delta": 0.03, "log_ratio": "total"},
    "vaco_ratio": {"preset": "vaco", "statistic": "ratio_diff", "delta": 0.25, "log_ratio": "policy"},
    "prefix_sum": {"log_ratio": "total", "level": "prefix_sum", "min": 0.3, "max": 3.0, "when": "pushing"},
    "prefix_mean": {"log_ratio": "mismatch", "level": "prefix_mean", "min": 0.8, "max": 1.3},
    "prefix_lowest": {"log_ratio": "total", "level": "prefix_min", "min": 0.4, "when": "negative_advantage"},
    "turn": {"log_ratio": "total", "level": "turn", "min": 0.4, "max": 2.0, "when": "pushing"},
    "turn_mean": {"log_ratio": "mismatch", "level": "turn_mean", "statistic": "k3", "max": 0.06},
    "ratio_abs": {"log_ratio": "total", "level": "sequence_mean", "statistic": "ratio_abs", "max": 1.7},
    "prefix_highest": {"log_ratio": "policy", "level": "prefix_max", "statistic": "prob_diff", "max": 0.05},
}
