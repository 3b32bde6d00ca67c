"""Thirteen faults of context-parallel ranks: each ends in one sentence that names it, or in the right answer."""

from __future__ import annotations

import math
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from nemo_geomask import build_loss
from nemo_geomask.errors import DataError, GeomaskError
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers import batches, oracle
from tests.helpers.batches import Batch, packed_rows
from tests.soak.outcome import Outcome

CONFIG: dict[str, Any] = {"name": "gspo", "masks": [batches.MASKS["geometric"]]}
WIDTH = 17  # 16 log-probs a row: four chunks for two ranks


def loss_of_shard(rank: int, world: int, batch: Batch, config: dict[str, Any]) -> float:
    """Call the loss on this rank's shard of every row, and take its gradient."""
    logprobs, data, segments = packed_rows(batch, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logprobs = logprobs.detach().requires_grad_()
        loss, metrics = build_loss(config).packed(logprobs, data, segments, batch.seqs, batch.toks)
    loss.backward()
    return float(loss.detach()) + 0.0 * metrics["loss"]


def _batch() -> Batch:
    return batches.rollouts(3, width=WIDTH)


def _faulty(rank: int, world: int, fault: str) -> float:
    batch, config = _batch(), CONFIG
    loss_of_shard(rank, world, batch, config)
    if rank == 1:
        if fault == "exits":
            os._exit(3)
        if fault in ("killed", "terminated", "stopped"):
            signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}
            os.kill(os.getpid(), signals[fault])
        if fault == "hangs":
            time.sleep(1000)
        if fault == "raises our error":
            raise DataError("row 3 of the data set is empty")
        if fault == "raises another error":
            raise KeyError("a mistake in the code")
        if fault == "runs out of memory":
            raise MemoryError
        if fault == "is late":
            time.sleep(2)
        if fault == "has another bound":
            config = {**config, "masks": [{**batches.MASKS["geometric"], "max": 1.3}]}
        if fault == "has another clip":
            config = {**config, "ratio_clip_max": 0.3}
        if fault == "has other rows":
            batch = batches.rollouts(3, width=WIDTH, offsets=(0.3, -0.3, 0.3))
        if fault == "has a NaN":
            curr = batch.curr.clone()
            curr[0, 6] = math.nan  # a trained token in the second quarter of its row, which is rank 1's
            batch = Batch(curr, batch.data, batch.seqs, batch.toks)
    return loss_of_shard(rank, world, batch, config)


def _answer(config: dict[str, Any], batch: Batch) -> float:
    return oracle.evaluate(build_loss(config).config, batch.curr, batch.data, batch.seqs, batch.toks).loss


def _is_right(losses: list[float]) -> str:
    expected = _answer(CONFIG, _batch())
    return "" if all(math.isclose(loss, expected, rel_tol=1e-4) for loss in losses) else f"{losses}, not {expected}"


def _drops_the_sequence(losses: list[float]) -> str:
    """A NaN of one rank's shard drops the sequence on all ranks."""
    batch = _batch()
    sample_mask = batch.data["sample_mask"].clone()
    sample_mask[0] = 0.0
    expected = _answer(CONFIG, batch.with_data(sample_mask=sample_mask))
    if not all(math.isclose(loss, expected, rel_tol=1e-4, abs_tol=1e-7) for loss in losses):
        return f"{losses}, not {expected} as without the sequence"
    return ""


class Fault(NamedTuple):
    """A fault of rank 1, and what must come of it: an error whose message matches, or an answer that is judged."""

    name: str
    message: str = ""
    judge: Callable[[list[float]], str] | None = None


DISAGREE = r"(?s)ranks.*by rank"
LOST = r"(?s)A collective failed\. Most often another rank|^rank 1 did not finish|^rank 0:\nTraceback"
FAULTS = (
    Fault("exits", r"^rank 1 was ended from outside \(exit code 3\)$"),
    Fault("killed", r"^rank 1 was ended from outside \(SIGKILL\)$"),
    Fault("terminated", r"^rank 1 was ended from outside \(SIGTERM\)$"),
    Fault("stopped", LOST),
    Fault("hangs", LOST),
    Fault("raises our error", r"^row 3 of the data set is empty$"),
    Fault("raises another error", r"(?s)^rank 1:.*KeyError: 'a mistake in the code'"),
    Fault("runs out of memory", r"(?s)^rank 1:.*MemoryError"),
    Fault("is late", judge=_is_right),
    Fault("has another bound", DISAGREE),
    Fault("has another clip", DISAGREE),
    Fault("has other rows", DISAGREE),
    Fault("has a NaN", judge=_drops_the_sequence),
)


def try_faults(names: tuple[str, ...] = (), *, timeout: float = 60.0) -> Outcome:
    """Let rank 1 of two fail in each way; all ranks must end within ``timeout`` and the time of their start."""
    outcome = Outcome("faults of ranks")
    slowest = 0.0
    for fault in FAULTS:
        if names and fault.name not in names:
            continue
        began = time.monotonic()
        try:
            losses = run_ranks(2, _faulty, fault.name, timeout=timeout)
        except GeomaskError as error:
            if not fault.message:
                outcome.problems.append(f"{fault.name}: {type(error).__name__}: {str(error)[:300]}")
            elif not re.search(fault.message, str(error)):
                outcome.problems.append(f"{fault.name}: the error does not say so: {str(error)[:300]}")
        else:
            if fault.judge is None:
                outcome.problems.append(f"{fault.name}: no error; losses {losses}")
            elif found := fault.judge(losses):
                outcome.problems.append(f"{fault.name}: {found}")
        slowest = max(slowest, time.monotonic() - began)
        outcome.done += 1
        outcome.checked += 1
    outcome.facts["slowest, s"] = round(slowest)
    return outcome
