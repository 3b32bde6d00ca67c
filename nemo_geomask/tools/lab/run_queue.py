"""Training of runs, one after another or in parallel processes, each from its last saved step on."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nemo_geomask
from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.optional import require
from nemo_geomask.parallel.local_processes import RankError, end_with_parent
from nemo_geomask.tools.lab.checkpoint import find_checkpoint, remove_checkpoint, write_checkpoint
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.progress import Progress
from nemo_geomask.tools.lab.ranks import Ranks, start_ranks
from nemo_geomask.tools.lab.rollout import write_rollout
from nemo_geomask.tools.lab.run_store import Run, RunCurves, write_steps
from nemo_geomask.tools.lab.samplers import Sampler, build_sampler
from nemo_geomask.tools.lab.tasks import load_task
from nemo_geomask.tools.lab.trainer import Trainer, check_device, check_reference, check_validation
from nemo_geomask.tools.shared.machine import device_names, processor_name

_POLL_SECONDS = 0.2
_ERROR_FILE = "error.txt"


def train(runs: Sequence[Run], progress: Progress, *, jobs: int = 1) -> bool:
    """Train the runs that are not finished, all with the same ``lab:`` section; return False after Ctrl-C.

    Losses are built and optional packages are imported before training starts, so that a mistake in the last variant is
    reported at once. Every step is saved when it is complete. An interrupted run resumes with the next step and gives
    the same numbers as without the interruption. If a step raises an error, the error is stored with its run, and the
    other runs continue.

    With several ``jobs``, each process trains one run at a time in ``lab.num_threads`` threads. With 1, this process
    trains; it is then the first of the ranks of ``lab.tp``, ``cp`` and ``dp``.

    Raises:
        ConfigError: a loss can't be built, there are too few prompts to validate on, the folder holds other files, or
            the checkpoint of an unfinished run is damaged.
        RankError: another process died.
    """
    for run in runs:
        check_device(run.recipe)
        _build_run_loss(run)
        check_validation(run.recipe)
    for module in ("transformers", "pyarrow"):
        require(module, "the lab needs", "demo")
    _prepare_folder(runs[0].out)
    waiting = [run for run in runs if not run.finished]
    for run in waiting:
        find_checkpoint(run)  # a damaged one is reported before training starts
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already.", flush=True)
    try:
        if jobs > 1 and len(waiting) > 1:
            _train_in_parallel(waiting, progress, jobs)
        elif waiting:
            _train_in_turn(waiting, progress)
    except KeyboardInterrupt:
        print("Interrupted; the same command with the same --out continues from here.", flush=True)
        return False
    return True


def _train_in_turn(runs: Sequence[Run], progress: Progress) -> None:
    pending = deque(runs)
    engines: dict[str, Sampler] = {}
    while pending:
        _train_until_error(pending, engines, progress)


def _train_until_error(pending: deque[Run], engines: dict[str, Sampler], progress: Progress) -> None:
    """Train the pending runs until all are finished or a step raises an error, which ends the other ranks, too."""
    lab = pending[0].recipe.lab
    if lab.processes > 1:
        print(f"Starting {lab.processes} processes: tp {lab.tp}, cp {lab.cp}, dp {lab.dp}.", flush=True)
    work, failed = functools.partial(_run_other_rank, tuple(pending)), None
    try:
        with start_ranks(work, tp=lab.tp, cp=lab.cp, dp=lab.dp) as ranks:
            while pending:
                run = pending.popleft()
                sampler = _start_engine(run.recipe, engines)
                try:
                    for step, reward in _train_steps(run, ranks, sampler):
                        progress.advance(run, step, reward)
                except _StepError:
                    failed = run
                    raise
    except Exception as error:  # with several ranks, the error of the rank that failed first
        if failed is None or isinstance(error, RankError):
            raise
        _store_error(failed, str(error) if isinstance(error, _StepError) else f"{type(error).__name__}: {error}")


def _start_engine(recipe: LabRecipe, started: dict[str, Sampler]) -> Sampler:
    """Return the engine of the run before if it has the same settings, because vLLM takes long to start."""
    settings = repr((recipe.policy.generation, recipe.policy.model, recipe.env, recipe.grpo.async_grpo))
    if settings not in started:
        if recipe.policy.generation.backend == "vllm":
            print("Starting vLLM.", flush=True)
        started.clear()
        started[settings] = build_sampler(recipe)
    return started[settings]


class _StepError(Exception):
    """Error in a training step; its text names the exception that the step raised."""


def _store_error(run: Run, error: str) -> None:
    """Store a run's error among its facts and print it."""
    curves = RunCurves.read(run.steps_file)
    error = f"step {curves.steps + 1}: {error}"
    write_steps(run, curves.history, {**curves.facts, "error": error})
    place = f"{run.label}, seed {run.recipe.grpo.seed}"
    print(f"{place}, failed in {error} (traceback: {run.folder / _ERROR_FILE})", flush=True)


def _run_other_rank(runs: Sequence[Run], ranks: Ranks) -> None:
    """Train on a rank other than the first; only the first rank samples and writes files."""
    for run in runs:
        trainer, done = _resume_trainer(run, ranks, None)
        for _ in range(done, run.recipe.grpo.max_num_steps):
            trainer.step()


def _train_steps(run: Run, ranks: Ranks, sampler: Sampler | None = None) -> Iterator[tuple[int, float]]:
    """Train a run; yield each saved step and its reward."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer, done = _resume_trainer(run, ranks, sampler)
    history: list[Mapping[str, float]] = list(RunCurves.read(run.steps_file).history[:done]) if done else []
    if len(history) < done:
        raise ConfigError(
            f"{run.steps_file} has {len(history)} steps, but {run.state_file} is of step {done}. Remove the latter to "
            "train the run again from its first step"
        )
    facts = _collect_facts(run, trainer)
    with closing(trainer):
        for step in range(done + 1, run.recipe.grpo.max_num_steps + 1):
            try:
                metrics, rollout = trainer.step()
            except Exception as error:
                write_steps(run, history, facts)
                (run.folder / _ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
                raise _StepError(f"{type(error).__name__}: {error}") from error
            history.append(metrics)
            last = step == run.recipe.grpo.max_num_steps
            if last or step % run.recipe.lab.rollouts_every == 0:
                write_rollout(rollout, trainer.task, run.folder / f"train_data_step{step}.jsonl")
            # The state is written last: a step whose state was not saved is repeated.
            write_steps(run, history, facts)
            if not last:
                write_checkpoint(run, step, trainer.state())
            yield step, metrics["reward"]
    remove_checkpoint(run)
    (run.folder / _ERROR_FILE).unlink(missing_ok=True)


def _resume_trainer(run: Run, ranks: Ranks, sampler: Sampler | None) -> tuple[Trainer, int]:
    """Return a trainer, restored from a checkpoint if there is one, and its number of completed steps."""
    trainer = Trainer(run.recipe, _build_run_loss(run), ranks, sampler)
    # The first rank reads the checkpoint for all ranks, because it may write another before the other ranks read it.
    checkpoint = ranks.compute_on_first(lambda: find_checkpoint(run))
    if checkpoint is None:
        return trainer, 0
    try:
        trainer.restore(checkpoint.state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"{run.state_file} does not hold the state of this run ({type(error).__name__}). Remove it to train the "
            "run again from its first step"
        ) from None
    return trainer, checkpoint.step


def _train_in_parallel(runs: Sequence[Run], progress: Progress, jobs: int) -> None:
    context = multiprocessing.get_context("forkserver")
    stop, steps = context.Event(), context.Queue()
    count = min(jobs, len(runs))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_initialize_worker, initargs=(stop, steps))
    by_name = {run.name: run for run in runs}

    def show_steps() -> None:
        while not steps.empty():
            name, step, reward = steps.get()
            progress.advance(by_name[name], step, reward)

    try:
        running: dict[Future[str | None], Run] = {pool.submit(_train_in_worker, run): run for run in runs}
        pending = set(running)
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            show_steps()
            for future in done:
                if (error := future.result()) is not None:
                    _store_error(running[future], error)
        show_steps()
    except BrokenProcessPool:
        raise RankError(
            "a training process was killed, most often for lack of memory; the same command with the same --out "
            "resumes each run, and a smaller --jobs needs less memory"
        ) from None
    finally:
        # Each process checks the event after every step.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


# Set in the processes of the pool by _initialize_worker.
_stop: Any = None
_queue: Any = None


def _initialize_worker(stop: Any, steps: Any) -> None:
    import signal

    global _stop, _queue
    _stop, _queue = stop, steps
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def _train_in_worker(run: Run) -> str | None:
    """Train a run in a process of the pool; return the error's text if a step raises, else None."""
    try:
        for step, reward in _train_steps(run, Ranks()):
            _queue.put((run.name, step, reward))
            if _stop.is_set():
                break
    except _StepError as error:
        return str(error)
    return None


def _prepare_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be used: {error.strerror or error}") from None
    if names and not (out / "steps").is_dir():
        raise ConfigError(f"--out: {out} is not empty (it holds {names[0]}) and has no runs; choose another folder")
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out: {out} can't be written to; choose another folder")
    # This folder marks `out` as a folder of runs, even if no step is completed.
    (out / "steps").mkdir(exist_ok=True)


def _build_run_loss(run: Run) -> PolicyLoss:
    block = dict(run.recipe.loss_fn)
    record = block.get("record")
    if isinstance(record, Mapping) and isinstance(record.get("dir"), str):
        # Each run needs its own folder of records: inside the run's folder, or inside an absolute one.
        directory = Path(record["dir"])
        block["record"] = {
            **record,
            "dir": str(directory / run.name if directory.is_absolute() else run.folder / directory),
        }
    try:
        loss = build_loss(block)
        check_reference(loss, run.recipe)
        return loss
    except ConfigError as error:
        where = f"variant '{run.label}'"
        raise type(error)(*(replace(problem, where=where) for problem in error.problems)) from None


def _collect_facts(run: Run, trainer: Trainer) -> dict[str, Any]:
    loss_settings = trainer.loss.config.model_dump(mode="json")
    return {
        "loss_fn": loss_settings,
        "corrected": bool(loss_settings.get("use_importance_sampling_correction")),
        "chance": load_task(run.recipe.env).chance,
        "sampler": trainer.sampler.name,
        "precision": run.recipe.policy.precision,
        "ranks": run.recipe.lab.model_dump(include={"tp", "cp", "dp", "device"}, exclude_defaults=True),
        "machine": device_names()[0]
        if run.recipe.lab.device == "cuda"
        else f"{processor_name()}, {os.cpu_count()} cores",
        "versions": {
            "nemo-geomask": nemo_geomask.__version__,
            "torch": torch.__version__,
            "transformers": require("transformers", "the lab needs", "demo").__version__,
        },
    }
