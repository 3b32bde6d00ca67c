"""A training batch as records: which of its sequences, and what is known of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.config import LossConfig
from nemo_geomask.config.fields import Recording
from nemo_geomask.losses.verdicts import verdicts
from nemo_geomask.records.schema import REMOVED
from nemo_geomask.records.writer import Recorder, StepRows

__all__ = ["KEYS", "LOGGED", "TRAINED", "FlightRecorder", "by_hash", "chosen_rows", "joined", "step_rows"]

KEYS = {
    "tokens": "input_ids",
    "mask": "token_mask",
    "sample_mask": "sample_mask",
    "gen": "generation_logprobs",
    "prev": "prev_logprobs",
    "curr": "curr_logprobs",
    "ref": "reference_policy_logprobs",
    "entropy": "entropy",
    "advantages": "advantages",
    "reward": "rewards",
    "weight_version": "weight_version",
    "staleness": "staleness",
}
"""By column, the key of a batch that holds it; NeMo-RL's, where NeMo-RL has one."""
LOGGED = {
    "rewards": "rewards",
    "input_lengths": "input_lengths",
    "token_ids": "input_ids",
    "token_loss_mask": "token_mask",
    "sample_loss_mask": "sample_mask",
    "advantages": "advantages",
    "generation_logprobs": "generation_logprobs",
    "prev_logprobs": "prev_logprobs",
}
"""By name in NeMo-RL's own JSONL, the key of a batch that stands there."""
TRAINED = "curr_trained"
"""Key of a batch [B, T] bool: where ``curr`` is known, even if it is NaN; without it, everywhere."""
_LENGTHS = "input_lengths"
_UNKNOWN = {"prev", "ref"}  # trainers put zeros or NaN where they skip these


def by_hash(step: int, total: int, count: int) -> list[int]:
    """``count`` of the numbers below ``total``, in order: those whose hash with the step's number is smallest.

    Fewer of the same step are among more of it, so what one asks for agrees with what another does.
    """
    order = sorted(range(total), key=lambda number: hashlib.blake2b(f"{step} {number}".encode()).digest())
    return sorted(order[:count])


class FlightRecorder:
    """Records what a trainer's steps are trained on, as ``loss_fn.record`` says.

    Args:
        config: the settings in force, with ``record``.
        facts: what is true of the run, beside its settings; see :func:`~nemo_geomask.records.schema.arrow_schema`.

    Attributes:
        recorder: what writes.
    """

    def __init__(self, config: LossConfig, *, facts: Mapping[str, Any] | None = None) -> None:
        assert config.record is not None
        self.recorder = Recorder(Path(config.record.dir).expanduser())
        self._config = config
        self._settings = config.record
        self._masks = tuple(rule.label for rule in config.mask_rules)
        self._facts = {**(facts or {}), "settings": config.model_dump(mode="json")}

    def takes(self, step: int) -> bool:
        """Whether a step, by its number from 1, is one that is recorded."""
        return (step - 1) % self._settings.every == 0

    def record(
        self,
        step: int,
        *parts: Mapping[str, Any],
        later: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Have a step written, if it is one that is recorded; copies the tensors and returns.

        Args:
            step: its number, from 1.
            parts: its batch, whole or in parts; each has NeMo-RL's keys, [B, T] and [B] tensors, whatever it has of
                :data:`KEYS`; ``curr_logprobs`` are [B, T], too.
            later: called in the recorder's thread with the whole batch, for what else is known of it.
        """
        if not self.takes(step):
            return
        keys = (*KEYS.values(), _LENGTHS)
        # The trainer goes on with its tensors while these are written.
        kept = [
            {key: part[key].detach().clone() for key in keys if isinstance(part.get(key), Tensor)} for part in parts
        ]

        def rows() -> StepRows:
            data = joined(kept)
            return step_rows(self._config, step, data if later is None else {**data, **later(data)})

        self.recorder.record(step, rows, masks=self._masks, facts=self._facts)


def step_rows(config: LossConfig, step: int, data: Mapping[str, Tensor]) -> StepRows:
    """The sequences of a step that ``config.record`` asks for.

    Args:
        config: the settings in force.
        step: the step's number.
        data: its batch, see :meth:`FlightRecorder.record`.
    """
    assert config.record is not None
    mask, prompts, lengths = _trained(data)
    groups, samples = _groups(data["input_ids"], prompts)
    values = {name: data[key] for name, key in KEYS.items() if key in data}
    values |= {f"{REMOVED}{label}": removed for label, removed in _verdicts(config, data).items()}
    values |= {
        "mask": mask,
        "row": torch.arange(len(lengths)),
        "group": groups,
        "sample": samples,
        "prompt_length": prompts,
        "turns": (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1) + mask[:, 0],
    }
    for name in _UNKNOWN & values.keys():
        if (name == "ref" or not config.needs_prev) and not values[name].nan_to_num().any():
            del values[name]
    facts = {"policy": "curr" if "curr" in values else "prev"}
    if config.record.fraction == 1:
        return StepRows(lengths, values, facts)
    rows = _chosen(config.record, step, groups)
    return StepRows(lengths[rows], {name: value[rows] for name, value in values.items()}, facts)


def chosen_rows(settings: Recording, step: int, data: Mapping[str, Tensor]) -> Tensor:
    """The rows of a batch that are recorded."""
    if settings.by == "sequence":
        return _chosen(settings, step, data["input_ids"][:, 0])  # their number is all that counts
    return _chosen(settings, step, _groups(data["input_ids"], _trained(data)[1])[0])


def _trained(data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens train, and of each row the tokens before the first of them and all tokens."""
    mask = data["token_mask"] != 0
    lengths = data[_LENGTHS].to(torch.int64)
    mask &= torch.arange(mask.shape[1]) < lengths.unsqueeze(1)
    return mask, torch.where(mask.any(dim=1), mask.int().argmax(dim=1), lengths), lengths


def joined(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The parts as one batch, as wide as the widest; what one of them lacks is left out."""
    if len(parts) == 1:
        return parts[0]
    width = max(part["input_ids"].shape[1] for part in parts)

    def wide(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, width - value.shape[1])) if value.dim() == 2 else value

    common = [key for key in parts[0] if all(key in part for part in parts)]
    return {key: torch.cat([wide(part[key]) for part in parts]) for key in common}


def _groups(tokens: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each row's prompt, in order of appearance, and of the row among those with the same."""
    numbers: dict[bytes, int] = {}
    counts: list[int] = []
    found = []
    for ids, length in zip(tokens.to("cpu", torch.int64).numpy(), prompts.tolist(), strict=True):
        group = numbers.setdefault(ids[:length].tobytes(), len(numbers))
        counts.extend([0] * (len(numbers) - len(counts)))
        found.append((group, counts[group]))
        counts[group] += 1
    groups, samples = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    return groups, samples


def _chosen(settings: Recording, step: int, groups: Tensor) -> Tensor:
    """Rows to record."""
    if settings.by == "sequence":
        rows = by_hash(step, len(groups), math.ceil(settings.fraction * len(groups)))
        return torch.tensor(rows, dtype=torch.int64)
    total = int(groups.max()) + 1 if len(groups) else 0
    chosen = torch.tensor(by_hash(step, total, math.ceil(settings.fraction * total)), dtype=torch.int64)
    return torch.isin(groups, chosen).nonzero().squeeze(1)


def _verdicts(config: LossConfig, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the current policy's log-probs where they are known, else with those before the step."""
    curr, prev = data.get(KEYS["curr"]), data.get(KEYS["prev"])
    if curr is not None and prev is not None and TRAINED in data:
        curr = torch.where(data[TRAINED], curr, prev)
    return verdicts(config, data, None if curr is None else curr[:, 1:])
