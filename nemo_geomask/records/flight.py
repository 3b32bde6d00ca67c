"""Flight recorder: chooses sequences of a training batch and turns them into records."""

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
from nemo_geomask.data_keys import (
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    TOKEN_MASK,
    TOKEN_WEIGHT_VERSIONS,
)
from nemo_geomask.losses.batch_masks import removed_tokens
from nemo_geomask.records.record_schema import COLUMNS, REMOVED
from nemo_geomask.records.step_table import StepRows
from nemo_geomask.records.writer import Recorder

COLUMN_BATCH_KEYS = {
    "tokens": "input_ids",
    "mask": TOKEN_MASK,
    "sample_mask": "sample_mask",
    "gen": GENERATION_LOGPROBS,
    "prev": PREV_LOGPROBS,
    "curr": "curr_logprobs",
    "ref": REFERENCE_POLICY_LOGPROBS,
    "entropy": "entropy",
    "advantages": "advantages",
    "reward": "rewards",
    "weight_version": "weight_version",
    "staleness": "staleness",
    "token_version": TOKEN_WEIGHT_VERSIONS,
    "environment": "environment",
    "replica": "replica",
}
"""Key of the batch that holds each column; NeMo-RL's own key where it has one."""
JSONL_KEYS = {
    "rewards": "rewards",
    "input_lengths": "input_lengths",
    "token_ids": "input_ids",
    "token_loss_mask": TOKEN_MASK,
    "sample_loss_mask": "sample_mask",
    "advantages": "advantages",
    "generation_logprobs": GENERATION_LOGPROBS,
    "prev_logprobs": PREV_LOGPROBS,
}
"""Key of the batch that holds each field of NeMo-RL's own JSONL logs."""
CURR_KNOWN_KEY = "curr_trained"
"""Key of a [B, T] bool tensor, True where ``curr`` was computed, even as NaN; if absent, that is everywhere."""
_LENGTHS_KEY = "input_lengths"
_TEXT_KEYS = [COLUMN_BATCH_KEYS[column.name] for column in COLUMNS if column.is_text]
# Trainers may skip computing these columns and fill them with zeros or NaN; such columns are not recorded.
_SKIPPABLE_COLUMNS = {"prev", "ref"}


def choose_by_hash(step: int, total: int, count: int) -> list[int]:
    """Return ``count`` of the numbers below ``total``, in order: those whose hash with the step is smallest.

    For the same step, a smaller choice is a subset of a larger one. So features that choose sequences independently
    (records, audit) share as many as possible.
    """
    order = sorted(range(total), key=lambda number: hashlib.blake2b(f"{step} {number}".encode()).digest())
    return sorted(order[:count])


class FlightRecorder:
    """Recorder of what a trainer's steps are trained on, configured by ``loss_fn.record``.

    Args:
        config: the settings in force, with ``record``.
        facts: properties of the run besides its settings; see
            :func:`~nemo_geomask.records.record_schema.arrow_schema`.

    Attributes:
        recorder: the thread that writes.
    """

    def __init__(self, config: LossConfig, *, facts: Mapping[str, Any] | None = None) -> None:
        assert config.record is not None
        self.recorder = Recorder(Path(config.record.dir).expanduser())
        self._config = config
        self._settings = config.record
        self._masks = tuple(rule.label for rule in config.mask_rules)
        self._facts = {**(facts or {}), "settings": config.model_dump(mode="json")}

    def takes(self, step: int) -> bool:
        """Return True if the step is recorded; steps are numbered from 1."""
        return (step - 1) % self._settings.every == 0

    def record(
        self,
        step: int,
        *parts: Mapping[str, Any],
        later: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """Copy the tensors of a step and queue the step to be written, if ``loss_fn.record.every`` selects it.

        Args:
            step: the step's number, from 1.
            parts: the batch, in one part or several; mappings of [B, T] and [B] tensors, with any of
                :data:`COLUMN_BATCH_KEYS`. ``environment`` is a list of B names, None where a name is not known.
            later: called in the recorder's thread with the whole batch; returns further values to record, by key.
        """
        if not self.takes(step):
            return
        keys = (*COLUMN_BATCH_KEYS.values(), _LENGTHS_KEY)
        # Copies, because the trainer may change its tensors while the recorder writes them.
        copies = [
            {key: part[key].detach().clone() for key in keys if isinstance(part.get(key), Tensor)}
            | {key: list(part[key]) for key in _TEXT_KEYS if isinstance(part.get(key), list)}
            for part in parts
        ]

        def rows() -> StepRows:
            data = join_parts(copies)
            return step_rows(self._config, step, data if later is None else {**data, **later(data)})

        self.recorder.record(step, rows, masks=self._masks, facts=self._facts)


def step_rows(config: LossConfig, step: int, data: Mapping[str, Any]) -> StepRows:
    """Return the sequences of a step that ``config.record`` selects.

    Args:
        config: the settings in force.
        step: the step's number.
        data: the whole batch, see :meth:`FlightRecorder.record`.
    """
    assert config.record is not None
    mask, prompt_lengths, lengths = _trained_tokens(data)
    groups, samples = _prompt_groups(data["input_ids"], prompt_lengths)
    values = {name: data[key] for name, key in COLUMN_BATCH_KEYS.items() if key in data}
    values |= {f"{REMOVED}{label}": removed for label, removed in _verdicts(config, data).items()}
    values |= {
        "mask": mask,
        "row": torch.arange(len(lengths), device=mask.device),
        "group": groups,
        "sample": samples,
        "prompt_length": prompt_lengths,
        "turns": (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1) + mask[:, 0],
    }
    for name in _SKIPPABLE_COLUMNS & values.keys():
        if (name == "ref" or not config.needs_prev) and not values[name].nan_to_num().any():
            del values[name]
    facts = {"policy": "curr" if "curr" in values else "prev"}
    if config.record.fraction == 1:
        return StepRows(lengths, values, facts)
    rows = _choose_rows(config.record, step, groups)
    return StepRows(lengths[rows], {name: _select_rows(value, rows) for name, value in values.items()}, facts)


def _select_rows(column: Tensor | Sequence[str | None], rows: Tensor) -> Tensor | Sequence[str | None]:
    return column[rows] if isinstance(column, Tensor) else [column[row] for row in rows.tolist()]


def recorded_rows(settings: Recording, step: int, data: Mapping[str, Tensor]) -> Tensor:
    """Return the indices of a batch's rows that are recorded."""
    if settings.by == "sequence":
        return _choose_rows(settings, step, data["input_ids"][:, 0])  # `by: sequence` uses no groups, only their number
    _, prompt_lengths, _ = _trained_tokens(data)
    groups, _ = _prompt_groups(data["input_ids"], prompt_lengths)
    return _choose_rows(settings, step, groups)


def _trained_tokens(data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the [B, T] mask of trained tokens, and for each row the number of prompt tokens and of all tokens."""
    mask = data[TOKEN_MASK] != 0
    lengths = data[_LENGTHS_KEY].to(torch.int64)
    mask &= torch.arange(mask.shape[1], device=mask.device) < lengths.unsqueeze(1)
    return mask, torch.where(mask.any(dim=1), mask.int().argmax(dim=1), lengths), lengths


def join_parts(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the parts as one batch, padded to the widest; a key that one of them lacks is left out."""
    if len(parts) == 1:
        return parts[0]
    width = max(part["input_ids"].shape[1] for part in parts)

    def pad(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, width - value.shape[1])) if value.dim() == 2 else value

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat([pad(value) for value in values])
        return [text for texts in values for text in texts]

    common = [key for key in parts[0] if all(key in part for part in parts)]
    return {key: join([part[key] for part in parts]) for key in common}


def _prompt_groups(tokens: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Number the prompts in order of appearance, and the rows of each prompt.

    Returns: for each row the number of its prompt, and the row's own number among the rows of that prompt; both [B],
        from 0.
    """
    group_numbers: dict[bytes, int] = {}
    group_sizes: list[int] = []
    groups, samples = [], []
    for ids, length in zip(tokens.to("cpu", torch.int64).numpy(), prompt_lengths.tolist(), strict=True):
        group = group_numbers.setdefault(ids[:length].tobytes(), len(group_numbers))
        if group == len(group_sizes):
            group_sizes.append(0)
        groups.append(group)
        samples.append(group_sizes[group])
        group_sizes[group] += 1
    device = tokens.device
    return (
        torch.tensor(groups, dtype=torch.int64, device=device),
        torch.tensor(samples, dtype=torch.int64, device=device),
    )


def _choose_rows(settings: Recording, step: int, groups: Tensor) -> Tensor:
    """Return the indices of the rows to record; ``groups`` has the number of each row's prompt."""
    if settings.by == "sequence":
        rows = choose_by_hash(step, len(groups), math.ceil(settings.fraction * len(groups)))
        return torch.tensor(rows, dtype=torch.int64, device=groups.device)
    total = int(groups.max()) + 1 if len(groups) else 0
    chosen_groups = choose_by_hash(step, total, math.ceil(settings.fraction * total))
    return torch.isin(groups, torch.tensor(chosen_groups, dtype=torch.int64, device=groups.device)).nonzero().squeeze(1)


def _verdicts(config: LossConfig, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tokens that each mask removes, by label.

    ``prev`` takes the place of the current policy's log-probs where those are not known.
    """
    curr, prev = data.get(COLUMN_BATCH_KEYS["curr"]), data.get(COLUMN_BATCH_KEYS["prev"])
    if curr is not None and prev is not None and CURR_KNOWN_KEY in data:
        curr = torch.where(data[CURR_KNOWN_KEY], curr, prev)
    return removed_tokens(config, data, None if curr is None else curr[:, 1:])
