"""The worst sequences of a run, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.diagnosis.read import RecordBlock
from nemo_geomask.diagnosis.run import blocks_of
from nemo_geomask.diagnosis.sources import RunFiles
from nemo_geomask.diagnosis.survey import trainer_column
from nemo_geomask.diagnosis.text import Decode
from nemo_geomask.diagnosis.verdict import RunDiagnosis

__all__ = ["GRADES", "Excerpt", "excerpts"]

AROUND = 60
"""Tokens that are shown before and after the worst one."""
GRADES = (0.01, 0.1, 0.5, 1.0)
"""Of |Δ|: from where on a token is marked, and more strongly."""


@dataclass(frozen=True)
class Excerpt:
    """A part of a sequence.

    Attributes:
        title: which.
        tokens: of each the text, the class of its |Δ| ("" where it does not train) and what is known of it.
        cut: tokens that are left out before and after.
    """

    title: str
    tokens: list[tuple[str, str, str]]
    cut: tuple[int, int]


def excerpts(
    run: RunFiles, diagnosis: RunDiagnosis, decode: Decode | None = None, cache: Path | None = None
) -> list[Excerpt]:
    """The sequences with the largest mean \\|Δ\\|, around the worst token of each, worst first.

    Args:
        run: whose files hold them.
        diagnosis: of it.
        decode: makes text of token ids; without it, ids are shown.
        cache: as for :func:`~nemo_geomask.diagnosis.run.survey_run`.
    """
    wanted = [facts[:2] for _, facts in diagnosis.evidence.statistics.worst_sequences]
    found = {}
    for step in {step for step, _ in wanted}:
        for block in blocks_of(run, step, cache):
            for place, row in enumerate(block.sequences["row"].tolist()):
                if (step, row) in wanted:
                    found[step, row] = _excerpt(block, place, f"step {step}, row {row}", decode)
    return [found[one] for one in wanted if one in found]


def _excerpt(block: RecordBlock, place: int, title: str, decode: Decode | None) -> Excerpt:
    begin, end = int(block.offsets[place]), int(block.offsets[place + 1])
    here = slice(begin, end)
    ids, mask = block.tokens["tokens"][here].tolist(), block.tokens["mask"][here].tolist()
    nobody = [math.nan] * len(ids)
    trainer = trainer_column(block)
    gen, prev = (block.tokens[name][here].tolist() if name in block.tokens else nobody for name in ("gen", trainer))
    size = [
        abs(one - other) if trains and math.isfinite(one - other) else -1.0
        for one, other, trains in zip(prev, gen, mask, strict=True)
    ]
    worst = size.index(max(size))
    first, last = max(0, worst - AROUND), min(len(ids), worst + AROUND + 1)
    shown = []
    for index in range(first, last):
        text = f"{ids[index]} " if decode is None else visible(decode(ids[index : index + 1]))
        grade = f"d{sum(size[index] >= limit for limit in GRADES)}" if mask[index] else ""
        known = f"token {index}, id {ids[index]}"
        if mask[index]:
            known += f": gen {gen[index]:.4g}, {trainer} {prev[index]:.4g}, Δ {prev[index] - gen[index]:.4g}"
        shown.append((text, grade, known))
    return Excerpt(title, shown, (first, len(ids) - last))


def visible(text: str) -> str:
    """With the characters that change what is around them written out."""
    return "".join(ch if ch.isprintable() or ch == "\n" else repr(ch)[1:-1] for ch in text)
