"""Verdicts on a run's records, which the gate reads: of a rehearsal, and of the first steps of a real run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import GeomaskError
from nemo_geomask.tools.rehearse.control_run import Samples
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits
from nemo_geomask.tools.rehearse.run_outcome import RunEvidence


def has_arrow() -> bool:
    """Return True if pyarrow is installed, which records and their diagnosis need."""
    return importlib.util.find_spec("pyarrow") is not None


def with_records(
    evidence: RunEvidence,
    source: Path,
    *,
    limits: HealthyLimits,
    update_limits: HealthyLimits,
    config: LossConfig,
    rows: int,
    is_filtered: bool,
) -> RunEvidence:
    """Return the evidence with the verdicts on the records in ``source``, or on NeMo-RL's logs, which have no π_θ.

    The arguments are those of :func:`~.mismatch_check.check_mismatch`, and of the functions of ``update_check``.
    """
    from nemo_geomask.tools.rehearse.mismatch_check import check_mismatch
    from nemo_geomask.tools.rehearse.update_check import check_update, replay_losses

    evidence = replace(evidence, mismatch=check_mismatch(source, limits, is_filtered=is_filtered))
    if evidence.records is None:
        return evidence
    replayed = {step: (value, size) for step, value, size in replay_losses(source, config, rows=rows)}
    return replace(evidence, update=check_update(source, update_limits, rows=rows), replayed=replayed)


def read_samples(source: Path) -> Samples:
    """Return what a run sampled, from its records or NeMo-RL's logs; empty if they can't be read."""
    from nemo_geomask.tools.diagnose import find_run, read_step

    try:
        run = find_run(source)
        samples = {}
        for step in run.steps:
            blocks = [(block.tokens, block.tokens["mask"].astype(bool)) for block in read_step(run, step)]
            names = [name for name in ("tokens", "gen") if all(name in tokens for tokens, _ in blocks)]
            samples[step] = [[x for tokens, mask in blocks for x in tokens[name][mask].tolist()] for name in names]
    except GeomaskError:
        return {}
    return samples
