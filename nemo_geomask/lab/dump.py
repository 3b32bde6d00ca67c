"""Rollout batches on disk, in the format of NeMo-RL's ``train_data_step{N}.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_geomask.lab.rollout import Rollout
from nemo_geomask.lab.task import Task
from nemo_geomask.records.flight import LOGGED

__all__ = ["write_rollout"]


def write_rollout(rollout: Rollout, task: Task, path: Path) -> None:
    """Write one JSON object a sequence.

    As NeMo-RL's logger, which slices the batch to size one, it wraps every value but ``idx`` in a list of one:
    ``rewards: [r]``, ``token_ids: [[…T ids…]]``.
    """
    columns = {name: rollout.data[key].tolist() for name, key in LOGGED.items()}
    width = task.prompt_width
    with path.open("w", encoding="utf-8") as file:
        for index, (ids, length) in enumerate(zip(columns["token_ids"], columns["input_lengths"], strict=True)):
            # NeMo-RL's content of a sequence: the text of its messages in turn, prompt and response.
            content = [[task.text(ids[:width]), task.text(ids[width:length])]]
            values = {name: [column[index]] for name, column in columns.items()}
            file.write(json.dumps({"content": content, **values, "idx": index}) + "\n")
