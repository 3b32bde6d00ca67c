"""Conditions that a finished run must meet to count as rehearsed, one function each.

Each function reads a :class:`~.run_outcome.RunResult` and yields a :class:`~.run_outcome.RunFailure` if its condition
is not met: what happened, the setting that is the likely cause, and what to change. :func:`judge` reads the records
before.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_geomask.config import LossConfig
from nemo_geomask.records.record_schema import step_files
from nemo_geomask.tools.rehearse.control_run import read_samples
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits
from nemo_geomask.tools.rehearse.mismatch_check import NONFINITE, check_mismatch
from nemo_geomask.tools.rehearse.run_outcome import RunFailure, RunResult
from nemo_geomask.tools.rehearse.update_check import MAX_RATIO_ERROR, MAX_UPDATE_K3, check_update, replay_losses
from nemo_geomask.tools.rehearse.weight_conditions import (
    caches_are_reset,
    precision_is_as_asked,
    precision_notes,
    weights_reached_the_engine,
    weights_were_trained,
)

_LOST_RECORD = re.compile(
    r"records: step \d+ (?:lost|is without curr)(?: \(\d+ so far\) on the way to [^:]*)?(?:: )?(.*)"
)
_WIDEN = "widen the bounds, unless the diagnosis names a fault; a tiny model's mismatch is not the real model's"
_OTHER_ROWS = "a microbatch's log-probs, masks and advantages must be of the same rows, on every rank"
MAX_LOSS_ERROR = 1e-4
"""Largest difference of the logged loss from that of the recorded batch, over the sum of its terms' sizes."""
_LAYOUT_KEYS = "policy.dtensor_cfg, policy.megatron_cfg (tensor_parallel_size, context_parallel_size)"


def judge(
    run: RunResult,
    source: Path | None,
    *,
    limits: HealthyLimits,
    update_limits: HealthyLimits,
    config: LossConfig,
    rows: int,
    is_filtered: bool,
) -> RunResult:
    """Return a run with the verdicts on its records and the conditions that it does not meet.

    The first of these is its failure if it had none.

    Args:
        source: folder of its records, or of NeMo-RL's logs, which have no π_θ; None if it has neither.
        limits: what is healthy between sampler and trainer.
        update_limits: what is healthy between π_θ at a first update and π_old.

    The others are those of :func:`~.mismatch_check.check_mismatch` and :func:`~.update_check.replay_losses`.
    """
    if source is not None:
        mismatch = check_mismatch(source, limits, is_filtered=is_filtered)
        run = replace(run, mismatch=mismatch, samples=read_samples(source))
    if source is not None and run.records is not None:
        replayed = {step: (value, size) for step, value, size in replay_losses(source, config, rows=rows)}
        run = replace(run, update=check_update(source, update_limits, rows=rows), replayed=replayed)
    unmet = unmet_conditions(run) if run.metrics else ()
    run = replace(run, unmet=unmet)
    return run if run.failure is not None or not unmet else run.failed(unmet[0])


def unmet_conditions(run: RunResult) -> tuple[RunFailure, ...]:
    """Return what keeps a run from counting as rehearsed; empty if every step trained as asked for."""
    failures = tuple(numbers_are_finite(run))
    if failures:
        run = _until(run, _nan_step(run) or 0)  # all later failures follow from the NaN
    return failures + tuple(failure for condition in CONDITIONS for failure in condition(run))


def _until(run: RunResult, last: int) -> RunResult:
    """Return the run without the steps after the given one."""
    mismatch = run.mismatch
    if mismatch is not None and mismatch.cause and (mismatch.since is None or mismatch.since > last):
        mismatch = None
    metrics = {step: values for step, values in run.metrics.items() if step <= last}
    events = [event for event in run.events if event["kind"] != "worker_counts" or event["step"] <= last]
    return replace(run, metrics=metrics, events=events, mismatch=mismatch, update=None, replayed={})


def numbers_are_finite(run: RunResult) -> Iterator[RunFailure]:
    """Require that no loss or gradient norm is NaN; inf is allowed, as squares of finite gradients can overflow."""
    step = _nan_step(run)
    if step is None:
        return
    name = next(name for name in _FINITE if _is_nan(run.metrics[step].get(name)))
    message = f"{name} of step {step} is nan"
    mismatch = run.mismatch
    if mismatch is None:
        yield RunFailure("step", message)
    elif mismatch.cause == NONFINITE and (mismatch.since or 0) <= step:
        yield RunFailure("step", f"{message}: log-probs are NaN or infinite", mismatch.setting, mismatch.fix)
    elif run.is_plugin:
        message += f": the log-probs are finite, so the plugin {run.loss_name} computed it"
        yield RunFailure("step", message, "loss_fn.name", "look for 0/0, log 0 or inf - inf in its formula")
    else:
        fix = "the log-probs are finite: look at the learning rate, and at overflows in the backward pass"
        yield RunFailure("step", message, "policy.optimizer, policy.precision", fix)


_FINITE = ("loss", "grad_norm")


def _nan_step(run: RunResult) -> int | None:
    """Return the first step with NaN in what must be finite."""
    steps = sorted(run.metrics)
    return next((step for step in steps if any(_is_nan(run.metrics[step].get(name)) for name in _FINITE)), None)


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def loss_was_called(run: RunResult) -> Iterator[RunFailure]:
    """Require that the workers called the requested loss in every step, and no other."""
    worker_counts = run.worker_counts
    requested = run.loss_name or "NeMo-RL's own"
    if not worker_counts or (len(worker_counts) == 1 and run.metrics):
        yield RunFailure("step", "no worker reported which loss it called", "PYTHONPATH, or the workers' environments")
        return
    for before, after in itertools.pairwise(worker_counts):
        if _calls(after) <= _calls(before) and not _is_skipped(run.metrics.get(after["step"], {})):
            message = f"no loss was called in the workers in step {after['step']}, and {requested} was asked for"
            yield RunFailure("step", message, "loss_fn.name", "another function than NeMo-RL's training step has run")
            return
    for name in sorted(run.loss):
        if not _is_requested(name, run.loss_name):
            message = f"the workers called the loss {name}, and {requested} was asked for"
            fix = "start NeMo-RL by `nemo-geomask run`; see Workers in docs/reference/nemo_rl.md"
            yield RunFailure("step", message, "loss_fn.name", fix)


def _is_skipped(values: Mapping[str, float]) -> bool:
    """Return True if the pre-step pass has left out a step, in which no loss is called then."""
    return any(values.get(f"geomask/{name}", 0) > 0 for name in ("batch_vetoed", "batch_emptied"))


def _calls(proof: Mapping[str, Any]) -> int:
    return sum(count for worker in proof["workers"] for count in worker["calls"].values())


def _is_requested(name: str, loss_name: str | None) -> bool:
    is_ours = "Loss(name=" in name
    return not is_ours if loss_name is None else is_ours and f"(name={loss_name!r}" in name


def no_step_was_vetoed(run: RunResult) -> Iterator[RunFailure]:
    """Require that ``batch_veto`` refused no batch."""
    vetoed = [step for step, values in sorted(run.metrics.items()) if values.get("geomask/batch_vetoed", 0) > 0]
    if vetoed:
        kl = run.metrics[vetoed[0]].get("geomask/batch_kl", math.nan)
        steps = _which(vetoed, run, "every step")
        message = f"{steps} was vetoed and not trained: its mismatch KL, {kl:.3g}, is beyond loss_fn.batch_veto.max"
        yield RunFailure("veto", message, "loss_fn.batch_veto.max", _WIDEN)


def something_was_kept(run: RunResult) -> Iterator[RunFailure]:
    """Require that the masks kept at least one token of every step."""
    emptied = [
        step
        for step, values in sorted(run.metrics.items())
        if not values.get("geomask/batch_vetoed", 0) > 0
        and (values.get("geomask/kept_tokens", 1.0) == 0 or values.get("geomask/batch_emptied", 0) > 0)
    ]
    if emptied:
        steps = _which(emptied, run, "any step")
        message = f"nothing was kept of {steps}: the masks removed all tokens, so that it did not train"
        fix = "; ".join(run.forecasts) or _WIDEN
        yield RunFailure("step", message, "loss_fn.masks", fix)


def records_are_complete(run: RunResult) -> Iterator[RunFailure]:
    """Require a record of every trained step, with the current policy's log-probs."""
    if run.records is None:
        return
    written = set(step_files(run.records)) if run.records.is_dir() else set()
    lost = [step for step in run.steps if step in run.metrics and step not in written]
    reasons = _LOST_RECORD.findall(run.log)
    if lost:
        reason = next(filter(None, reasons), f"{run.records} has no file of it")
        message = f"the record of {_which(lost, run, 'every step')} was lost: {reason}"
        fix = "look for a full disk or missing rights in its folder"
        yield RunFailure("metrics", message, "loss_fn.record.dir", fix)
    elif reasons:
        message = f"a record lacks the log-probs that trained (curr): {reasons[0]}"
        yield RunFailure("metrics", message, "loss_fn.record", "see the log for what the workers answered")


def validation_ran(run: RunResult) -> Iterator[RunFailure]:
    """Require that NeMo-RL validated, if it was to."""
    if run.is_validated and not any(event.get("stage") == "val" for event in run.events):
        message = "NeMo-RL has not validated, and --validate was given"
        yield RunFailure("val", message, "grpo.val_period, data.validation")


def logprobs_agree(run: RunResult) -> Iterator[RunFailure]:
    """Require that the log-probs of sampler and trainer differ no more than in a healthy tiny model."""
    mismatch = run.mismatch
    if mismatch is not None and mismatch.cause:
        fix = "; ".join([mismatch.fix, *precision_notes(run.weight_precision)])
        yield RunFailure("log-probs", f"{mismatch.cause} ({mismatch.details})", mismatch.setting, fix)


def policy_is_unchanged_at_first_update(run: RunResult) -> Iterator[RunFailure]:
    """Require that the policy of a first update is the one that computed π_old: no weight has changed between."""
    update = run.update
    if update is None or update.unjudged:
        return
    if update.cause:
        yield RunFailure("step", f"{update.cause} ({update.details})", update.setting, update.fix)
    elif run.updates == 1:
        for step, values in sorted(run.metrics.items()):
            ratio, k3 = values.get("probs_ratio", 1.0), values.get("geomask/policy_k3", 0.0)
            if abs(ratio - 1) > MAX_RATIO_ERROR or k3 > MAX_UPDATE_K3:
                message = (
                    f"the workers' own probs_ratio of step {step} is {ratio:.4g} and their policy_k3 {k3:.3g}, not 1 "
                    "and 0: the recorded curr and prev agree, so that the loss had other rows' prev_logprobs"
                )
                yield RunFailure("step", message, "loss_fn.name, policy.sequence_packing", _OTHER_ROWS)
                return


def loss_is_that_of_the_batch(run: RunResult) -> Iterator[RunFailure]:
    """Require that the workers' loss is that of the recorded batch, computed in one piece."""
    for step, (expected, size) in sorted(run.replayed.items()):
        logged = run.metrics.get(step, {}).get("loss", math.nan)
        if abs(logged - expected) > MAX_LOSS_ERROR * (size + abs(expected)):
            message = (
                f"the loss of step {step} is {logged:.6g}, and that of its recorded batch is {expected:.6g}: the "
                "workers computed it with log-probs, masks, advantages or counts of other rows or tokens"
            )
            yield RunFailure("step", message, "loss_fn.name, policy.sequence_packing", _OTHER_ROWS)
            return


def ranks_compute_one_loss(run: RunResult) -> Iterator[RunFailure]:
    """Require that workers that train the same rows compute the same loss: only the first one's is logged."""
    for proof in run.worker_counts:
        losses: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        for worker in proof["workers"]:
            if worker["calls"] and "losses" in worker:  # only the last pipeline stage calls a loss
                losses.setdefault(tuple(worker["replica"]), []).append(worker["losses"])
        for (_, rank), of_rows in losses.items():
            low, high = min(of_rows)[0], max(of_rows)[0]
            if high - low > MAX_LOSS_ERROR * max(size for _, size in of_rows):
                message = (
                    f"the {len(of_rows)} workers of data-parallel rank {rank} train the same rows, and their losses up "
                    f"to step {proof['step']} add up to {low:.6g} in one and {high:.6g} in another"
                )
                yield RunFailure("step", message, _LAYOUT_KEYS, _OTHER_ROWS)
                return


def _which(steps: Sequence[int], run: RunResult, all_steps: str) -> str:
    return all_steps if len(steps) == len(run.steps) else f"step {', '.join(map(str, steps))}"


Condition = Callable[[RunResult], Iterator[RunFailure]]
CONDITIONS: tuple[Condition, ...] = (
    # In this order, because an unmet condition often explains those after it.
    loss_was_called,
    weights_reached_the_engine,
    precision_is_as_asked,
    caches_are_reset,
    logprobs_agree,
    policy_is_unchanged_at_first_update,
    loss_is_that_of_the_batch,
    ranks_compute_one_loss,
    no_step_was_vetoed,
    something_was_kept,
    weights_were_trained,
    records_are_complete,
    validation_ran,
)
"""All conditions but :func:`numbers_are_finite`, in the order in which the report lists what they find."""
