"""One run of a rehearsal: the driver's process, its outcome and the gate's verdict."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_geomask.hosts.nemo_rl import accepted_apis
from nemo_geomask.tools.check import has_experts
from nemo_geomask.tools.rehearse.event_log import EVENTS, STAGES, read_events
from nemo_geomask.tools.rehearse.gate import judge
from nemo_geomask.tools.rehearse.healthy_limits import healthy_limits, update_limits
from nemo_geomask.tools.rehearse.launch_environment import launch_environment
from nemo_geomask.tools.rehearse.plan import RECORDS, Plan
from nemo_geomask.tools.rehearse.run_outcome import RunResult, outcome_of
from nemo_geomask.tools.rehearse.supervision import supervised, wait_for
from nemo_geomask.tools.rehearse.tiny_models import write_prompts
from nemo_geomask.tools.shared.usual_mismatch import precisions

# Module of the driver's process. It is not imported here, because its own imports take seconds.
_DRIVER = "nemo_geomask.tools.rehearse.driver"
LOG = "log.txt"
"""Name of the file with the driver's output."""
PROMPTS, COMMAND = "prompts.jsonl", "command.txt"
"""Files by which the folder of an earlier rehearsal is recognised."""


@contextlib.contextmanager
def driver(
    planned: Plan,
    more: Sequence[str] = (),
    *,
    accept: Sequence[str] = (),
    first_seed: int | None = None,
    job: tuple[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that runs NeMo-RL's script for a plan, in its folder, and end it with the block.

    Args:
        more: overrides after those of the plan.
        first_seed: see :func:`~.event_hooks.patches`.
        job: function and file of :func:`~.hosted_job.hosted_job`; None trains.
    """
    folder = planned.folder
    write_prompts(folder / PROMPTS)
    command = driver_command(planned, more)
    (folder / COMMAND).write_text("\n".join(command), encoding="utf-8")
    with launch_environment(planned, first_seed=first_seed, job=job) as environment:
        environment |= accepted_apis.as_variables(accept)
        with supervised(command, log=folder / LOG, environment=environment, folder=planned.options.checkout) as process:
            yield process


def driver_command(planned: Plan, more: Sequence[str] = ()) -> list[str]:
    """Return the command of the driver, with overrides after those of the plan."""
    script, recipe = planned.options.checkout / planned.script, planned.facts.recipe.path.resolve()
    overrides = (*planned.arguments, *planned.overrides, *more)
    return [sys.executable, "-m", _DRIVER, str(script), "--config", str(recipe), *overrides]


def run_plan(
    planned: Plan,
    saved: Path | None = None,
    *,
    timeout: float,
    accept: Sequence[str],
    forecasts: Sequence[str],
    progress: Callable[[Sequence[dict[str, object]]], None],
) -> RunResult:
    """Run a plan, resumed from a saved checkpoint if there is one, and return its judged outcome.

    Args:
        forecasts: as in :class:`~.run_outcome.RunResult`.
        progress: called with the events so far, several times a second.
    """
    options, folder = planned.options, planned.folder
    resumed_steps = 0
    if saved is not None:
        shutil.copytree(saved, folder / "checkpoints" / saved.name)
        resumed_steps = options.steps - 1
    events = folder / EVENTS
    started = time.time()
    killed_before = _kernel_kills()
    with driver(planned, accept=accept, first_seed=resumed_steps if options.resume else None) as process:
        status = wait_for(process, timeout, lambda: progress(list(read_events(events))))
    outcome = outcome_of(
        read_events(events),
        status=status,
        steps=options.steps - resumed_steps,
        started=started,
        ended=time.time(),
        expected_stages=frozenset(STAGES) - _absent_stages(planned),
        log=(folder / LOG).read_text(encoding="utf-8", errors="replace"),
        settings=dict(_flatten(planned.facts.recipe.data)),
        killed_by_kernel=_kernel_kills() - killed_before,
    )
    steps = range(resumed_steps + 1, options.steps + 1)
    return _judge(replace(outcome, steps=steps, forecasts=forecasts), planned)


def _judge(run: RunResult, planned: Plan) -> RunResult:
    facts, folder = planned.facts, planned.folder
    records = folder / RECORDS if any(change.key.startswith("loss_fn.record") for change in planned.changes) else None
    # Steps of NeMo-RL's own loss have no records; NeMo-RL logs their log-probs.
    log_file = next((folder / "logs").glob("**/train_data_step*.jsonl"), None)
    rows = int(planned.value("policy.train_global_batch_size"))
    run = replace(
        run,
        loss_name=None if facts.trains_nemo_rl_loss else facts.config.name,
        records=records,
        updates=max(1, planned.rollouts // rows),
        precisions=precisions(facts.get),
        is_validated=planned.options.validate,
    )
    trainer, sampler = (
        str(planned.value("policy.precision")),
        str(planned.value("policy.generation.vllm_cfg.precision")),
    )
    model: dict[str, Any] = {"experts": bool(has_experts(str(folder / "model"))), "temperature": facts.temperature}
    return judge(
        run,
        records or (log_file.parent if log_file is not None else None),
        limits=healthy_limits(trainer, sampler, **model, fp8_cache=planned.keeps_fp8_cache),
        update_limits=update_limits(trainer, **model),
        config=facts.config,
        rows=rows,
        is_filtered=facts.filter_key is not None,
    )


def _kernel_kills() -> int:
    """Return the number of processes on this machine that the kernel has killed for want of memory."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")


def _absent_stages(planned: Plan) -> frozenset[str]:
    """Return the stages that the rehearsal of the recipe does not have."""
    facts = planned.facts
    without = set() if planned.options.validate else {"val"}
    if not facts.config.needs_prestep_pass or facts.trains_nemo_rl_loss:
        without.add("veto")
    if not facts.is_true("checkpointing.enabled"):
        without.add("checkpoint")
    return frozenset(without)
