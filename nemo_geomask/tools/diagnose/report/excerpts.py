"""Excerpts of a run's worst sequences, token by token, for the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.tools.diagnose.explain.run_diagnosis import RunDiagnosis
from nemo_geomask.tools.diagnose.measure.run_survey import read_step
from nemo_geomask.tools.diagnose.measure.step_survey import trainer_column
from nemo_geomask.tools.diagnose.read.record_reader import RecordBlock
from nemo_geomask.tools.diagnose.read.record_sources import RunFiles
from nemo_geomask.tools.diagnose.report.report_tables import Decode

CONTEXT_TOKENS = 60
"""Number of tokens that are shown before, and after, the worst one."""
MISMATCH_GRADES = (0.01, 0.1, 0.5, 1.0)
"""Values of |Δ| at which the marking of a token becomes one degree stronger."""


class MarkedToken(NamedTuple):
    """One token of an excerpt."""

    text: str
    grade: str  # CSS class of its |Δ|, d0 to d4; empty if the token is not trained on
    tooltip: str


@dataclass(frozen=True)
class Excerpt:
    """A part of a sequence, and the numbers of tokens that are omitted before and after it."""

    title: str
    tokens: list[MarkedToken]
    omitted: tuple[int, int]


def worst_excerpts(
    run: RunFiles, diagnosis: RunDiagnosis, decode: Decode | None = None, cache: Path | None = None
) -> list[Excerpt]:
    """Return an excerpt, around its worst token, of each sequence with the largest mean \\|Δ\\|, worst first."""
    worst = [(sequence.step, sequence.row) for sequence in diagnosis.evidence.statistics.worst_sequences]
    excerpts = {}
    for step in {step for step, _ in worst}:
        for block in read_step(run, step, cache):
            for index, row in enumerate(block.sequences["row"].tolist()):
                if (step, row) in worst:
                    excerpts[step, row] = _make_excerpt(block, index, f"step {step}, row {row}", decode)
    return [excerpts[key] for key in worst if key in excerpts]


def _make_excerpt(block: RecordBlock, sequence: int, title: str, decode: Decode | None) -> Excerpt:
    tokens = slice(int(block.offsets[sequence]), int(block.offsets[sequence + 1]))
    ids, mask = block.tokens["tokens"][tokens].tolist(), block.tokens["mask"][tokens].tolist()
    trainer = trainer_column(block)
    gen, prev = (
        block.tokens[name][tokens].tolist() if name in block.tokens else [math.nan] * len(ids)
        for name in ("gen", trainer)
    )
    delta = [prev_logprob - gen_logprob for prev_logprob, gen_logprob in zip(prev, gen, strict=True)]
    # Tokens whose mismatch is unknown rank below those with a mismatch of 0.
    size = [
        abs(value) if is_trained and math.isfinite(value) else -1.0
        for value, is_trained in zip(delta, mask, strict=True)
    ]
    worst = size.index(max(size))
    first, end = max(0, worst - CONTEXT_TOKENS), min(len(ids), worst + CONTEXT_TOKENS + 1)
    marked = []
    for index in range(first, end):
        text = f"{ids[index]} " if decode is None else _escape_control_characters(decode(ids[index : index + 1]))
        grade, tooltip = "", f"token {index}, id {ids[index]}"
        if mask[index]:
            grade = f"d{sum(size[index] >= limit for limit in MISMATCH_GRADES)}"
            tooltip += f": gen {gen[index]:.4g}, {trainer} {prev[index]:.4g}, Δ {delta[index]:.4g}"
        marked.append(MarkedToken(text, grade, tooltip))
    return Excerpt(title, marked, (first, len(ids) - end))


def _escape_control_characters(text: str) -> str:
    """Replace control characters, which could change how the text around them is shown, but keep line breaks."""
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1] for character in text
    )
