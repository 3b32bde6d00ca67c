"""Train runs, one after another or several at a time, each from where it was left."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from nemo_geomask.lab.dump import write_rollout
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.progress import Progress
from nemo_geomask.lab.ranks import Ranks, company
from nemo_geomask.lab.rollout import Rollout
from nemo_geomask.lab.runs import Course, Run, write_steps
from nemo_geomask.lab.samplers import Sampler, build_sampler
from nemo_geomask.lab.task import task_of
from nemo_geomask.lab.trainer import Trainer, check_reference, check_validation
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.processes import RankError, end_with_parent

__all__ = ["train"]

Tell = Callable[[str, int, float], None]
_POLL = 0.2
_ERROR = "error.txt"


def train(runs: Sequence[Run], progress: Progress, *, jobs: int = 1) -> bool:
    """Train what is not finished.

    Losses are built and optional packages imported before anything trains, so that a mistake in the last variant shows
    at once. Every step is kept when it is done: a run that was ended, by whatever, goes on with the step after it, and
    takes the course that it would have taken.

    Args:
        runs: what to train, all with the same ``lab:`` section.
        progress: shows how far things are.
        jobs: processes, each of which trains one run at a time in ``lab.num_threads`` threads; 1: this process, which
            is then the first of the ranks that ``lab.tp``, ``cp`` and ``dp`` ask for.

    A run whose step raises is noted, its error kept among its facts, and the others train.

    Returns:
        False when it was interrupted (Ctrl-C).

    Raises:
        ConfigError: a variant's loss can't be built, there are too few prompts to validate on, or the folder holds
            something else.
        MissingDependencyError: transformers, or the vLLM that the recipe asks for, is not installed.
        RankError: another process died.
    """
    for run in runs:
        _loss(run)
        check_validation(run.recipe)
    for module in ("transformers", "pyarrow"):
        require(module)
    _prepare(runs[0].out)
    waiting = [run for run in runs if not run.finished]
    if len(waiting) < len(runs):
        progress.note(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already.")
    with progress:
        try:
            if jobs > 1 and len(waiting) > 1:
                _train_beside_each_other(waiting, progress, jobs)
            elif waiting:
                _train_in_turn(waiting, progress)
        except KeyboardInterrupt:
            progress.note("Interrupted; the same command with the same --out goes on from here.")
            return False
    return True


def _train_in_turn(runs: Sequence[Run], progress: Progress) -> None:
    lab = runs[0].recipe.lab
    sampler, made_for = None, None
    left, failed = list(runs), None
    while left:
        if lab.processes > 1:
            progress.note(f"Starting {lab.processes} processes: tp {lab.tp}, cp {lab.cp}, dp {lab.dp}.")
        try:
            with company(functools.partial(_follow, tuple(left)), tp=lab.tp, cp=lab.cp, dp=lab.dp) as ranks:
                while left:
                    run, failed = left.pop(0), None
                    recipe = run.recipe
                    # An engine of vLLM takes longer to start than several training steps take.
                    needs = (recipe.policy.generation, recipe.policy.model, recipe.env, recipe.grpo.async_grpo)
                    if sampler is None or needs != made_for:
                        if recipe.policy.generation.backend == "vllm":
                            progress.note("Starting vLLM.")
                        sampler, made_for = build_sampler(recipe), needs
                    try:
                        for step, reward in _steps(run, ranks, sampler):
                            progress.advance(run, step, reward)
                    except _StepError:
                        failed = run
                        raise
        except Exception as error:  # where there are several ranks, of the one that failed first
            if failed is None or isinstance(error, RankError):
                raise
            _set_down(failed, _described(error), progress)


class _StepError(Exception):
    """A step raised; its cause is what."""


def _described(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def _set_down(run: Run, error: str, progress: Progress) -> None:
    """Keep with a run why it ended."""
    course = Course.read(run.file)
    error = f"step {course.steps + 1}: {error}"
    write_steps(run, course.history, {**course.facts, "error": error})
    progress.note(f"{run.label}, seed {run.recipe.grpo.seed}, failed in {error} (traceback: {run.folder / _ERROR})")


def _follow(runs: Sequence[Run], ranks: Ranks) -> None:
    """What the other ranks do while the first trains and writes."""
    for run in runs:
        trainer, done = _resumed(run, ranks, None)
        for _ in range(done, run.recipe.grpo.max_num_steps):
            trainer.step()


def _steps(run: Run, ranks: Ranks, sampler: Sampler | None = None) -> Iterator[tuple[int, float]]:
    """Train a run; yields each step that is kept, and its reward."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer, done = _resumed(run, ranks, sampler)
    history: list[Mapping[str, float]] = list(Course.read(run.file).history[:done]) if done else []
    facts = _facts(run, trainer)
    with closing(trainer):
        for step in range(done + 1, run.recipe.grpo.max_num_steps + 1):
            try:
                metrics, rollout = trainer.step()
            except Exception as error:
                write_steps(run, history, facts)
                (run.folder / _ERROR).write_text(traceback.format_exc(), encoding="utf-8")
                raise _StepError from error
            history.append(metrics)
            last = step == run.recipe.grpo.max_num_steps
            if last or step % run.recipe.lab.rollouts_every == 0:
                _dump(run, trainer, step, rollout)
            # The state last: a step that is in the file alone is taken again.
            write_steps(run, history, facts)
            if not last:
                part = run.state.with_suffix(".part")
                torch.save({"step": step, **trainer.state()}, part)
                os.replace(part, run.state)
            yield step, metrics["reward"]
    for left in (run.state, run.folder / _ERROR):
        left.unlink(missing_ok=True)


def _resumed(run: Run, ranks: Ranks, sampler: Sampler | None) -> tuple[Trainer, int]:
    """A trainer, and how many steps it has done."""
    trainer = Trainer(run.recipe, _loss(run), ranks, sampler)
    # All ranks are on this machine. The first may write its first step before another has looked.
    state = ranks.from_first(lambda: torch.load(run.state, weights_only=True) if run.state.exists() else None)
    if state is None:
        return trainer, 0
    trainer.restore(state)
    return trainer, int(state["step"])


def _dump(run: Run, trainer: Trainer, step: int, rollout: Rollout) -> None:
    write_rollout(rollout, trainer.task, run.folder / f"train_data_step{step}.jsonl")


def _train_beside_each_other(runs: Sequence[Run], progress: Progress, jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    stop, steps = context.Event(), context.Queue()
    count = min(jobs, len(runs))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(stop, steps))
    by_name = {run.name: run for run in runs}

    def show() -> None:
        while not steps.empty():
            name, step, reward = steps.get()
            progress.advance(by_name[name], step, reward)

    try:
        running: dict[Future[str | None], Run] = {pool.submit(_train_alone, run): run for run in runs}
        left = set(running)
        while left:
            done, left = wait(left, timeout=_POLL, return_when=FIRST_COMPLETED)
            show()
            for future in done:
                if (error := future.result()) is not None:
                    _set_down(running[future], error, progress)
        show()
    except BrokenProcessPool:
        raise RankError(
            "a process that trained was ended from outside, most often for lack of memory; the same command with the "
            "same --out goes on from where each run was, and a smaller --jobs needs less"
        ) from None
    finally:
        # After its step, each process sees it.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


# Of a process that trains beside others.
_stop: Any = None
_queue: Any = None


def _begin(stop: Any, steps: Any) -> None:
    import signal

    global _stop, _queue
    _stop, _queue = stop, steps
    # Ctrl-C is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def _train_alone(run: Run) -> str | None:
    """Train a run; gives its error, if a step raises."""
    try:
        for step, reward in _steps(run, Ranks()):
            _queue.put((run.name, step, reward))
            if _stop.is_set():
                break
    except _StepError as error:
        return _described(error)
    return None


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be used: {error.strerror or error}") from None
    if held and not (out / "steps").is_dir():
        raise ConfigError(f"--out: {out} is not empty (it holds {held[0]}) and has no runs; choose another folder")
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out: {out} can't be written to; choose another folder")
    # It is one of runs from now on, whether a step gets done or not.
    (out / "steps").mkdir(exist_ok=True)


def _loss(run: Run) -> PolicyLoss:
    block = dict(run.recipe.loss_fn)
    record = block.get("record")
    if isinstance(record, Mapping) and isinstance(record.get("dir"), str):
        # A folder of its own: in that of its rollouts, or in an absolute one.
        given = Path(record["dir"])
        block["record"] = {**record, "dir": str(given / run.name if given.is_absolute() else run.folder / given)}
    try:
        loss = build_loss(block)
        check_reference(loss, run.recipe)
        return loss
    except ConfigError as error:
        where = f"variant '{run.label}'"
        raise type(error)(*(replace(problem, where=where) for problem in error.problems)) from None


def _facts(run: Run, trainer: Trainer) -> dict[str, Any]:
    in_force = trainer.loss.config.model_dump(mode="json")
    return {
        "loss_fn": in_force,
        "corrected": bool(in_force.get("use_importance_sampling_correction")),
        "chance": task_of(run.recipe.env).chance,
        "sampler": trainer.sampler.name,
        "precision": run.recipe.policy.precision,
        "ranks": run.recipe.lab.model_dump(include={"tp", "cp", "dp"}, exclude_defaults=True),
        "versions": {
            "nemo-geomask": nemo_geomask.__version__,
            "torch": torch.__version__,
            "transformers": require("transformers").__version__,
        },
    }
