"""One rehearsal, from the recipe to what was found."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.checks import Finding, RecipeFacts, check
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.recipe import ROOT_VARIABLE, nemo_rl_root, read_recipe
from nemo_geomask.rehearsal import driver
from nemo_geomask.rehearsal.control import Comparison, compare, control_overrides, has_score_function, inexpressible
from nemo_geomask.rehearsal.events import STAGES, read_events
from nemo_geomask.rehearsal.models import write_prompts
from nemo_geomask.rehearsal.plan import Plan, plan
from nemo_geomask.rehearsal.report import Breakdown, RunResult, outcome_of
from nemo_geomask.rehearsal.supervise import supervised
from nemo_geomask.rehearsal.surroundings import has_automodel, surroundings

__all__ = ["Rehearsal", "has_gpus", "nemo_rl_checkout", "rehearse"]

# By which a folder is one of a rehearsal.
_PROMPTS, _COMMAND = "prompts.jsonl", "command.txt"


@dataclass(frozen=True)
class Rehearsal:
    """What was rehearsed, and how it went.

    Attributes:
        recipe: the file.
        nemo_rl: the checkout.
        findings: of ``check``.
        gpus: whether it ran on GPUs.
        plan: what was changed; None where the recipe has errors, and nothing was run.
        outcome: None where nothing was run.
        folder: model, log, metrics.
        seconds: validation included.
        control: the same with NeMo-RL's own loss; None where it was not run.
        ours_only: settings for which there is no control.
        resumed: the last step alone, from the checkpoint of the one before; None where it was not run.
    """

    recipe: Path
    nemo_rl: Path
    findings: tuple[Finding, ...]
    gpus: bool
    plan: Plan | None
    outcome: RunResult | None
    folder: Path
    seconds: float
    control: RunResult | None = None
    ours_only: tuple[str, ...] = ()
    resumed: RunResult | None = None

    @property
    def resumptions(self) -> tuple[Comparison, ...]:
        """Of the last step as it was with the one that was resumed, where there is one."""
        if self.outcome is None or self.resumed is None:
            return ()
        return tuple(compare(self.outcome.metrics, self.resumed.metrics))

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Of the run with the control, where there is one."""
        if self.outcome is None or self.control is None:
            return ()
        return tuple(compare(self.outcome.metrics, self.control.metrics))

    @property
    def ok(self) -> bool:
        """Whether every step was trained, the control's and the resumed one as well, with the same result."""
        runs = [self.outcome, *(run for run in (self.control, self.resumed) if run is not None)]
        trained = all(run is not None and run.failure is None for run in runs)
        both = (*self.comparisons, *self.resumptions)
        return trained and all(each.equal for each in both if each.sampled_alike)


def has_gpus() -> bool:
    """Whether torch sees a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def rehearse(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: int = 3,
    ranks: int = 1,
    own_environment: bool = False,
    timeout: float = 600.0,
    control: bool = False,
    resume: bool = False,
    folder: Path,
    progress: Callable[[Sequence[dict[str, object]]], None] = lambda events: None,
) -> Rehearsal:
    """Run a recipe, shrunk, through NeMo-RL.

    Args:
        recipe: the file.
        overrides: as NeMo-RL takes them.
        steps: rollout batches to train on.
        ranks: processes that train, at most.
        own_environment: whether prompts and rewards are the recipe's own.
        timeout: seconds for a run, after which it is ended.
        control: whether to run it again with NeMo-RL's own loss, where that has the recipe's settings.
        resume: whether to train the last step again, from the checkpoint of the one before.
        folder: for model, prompts, log and checkpoints; an earlier rehearsal in it is deleted once this one is planned.
        progress: called with the events so far, several times a second.

    Returns:
        How it went, a failure of the run included.

    Raises:
        ConfigError: the recipe can't be read, NeMo-RL is not there, no small model can be made of the recipe's, it
            saves nothing to resume from, or the folder holds something else.
        EngineError: a process could not be ended.
    """
    began = time.monotonic()
    checkout = nemo_rl_checkout()
    facts = RecipeFacts.of(read_recipe(recipe, overrides))
    if resume and (steps < 2 or not facts.on("checkpointing.enabled")):
        raise ConfigError(
            Problem(("checkpointing.enabled",), "--resume needs a checkpoint: set true, and 2 --steps at least")
        )
    report = check(facts)
    gpus = has_gpus()
    folder = folder.resolve()
    _refuse_foreign(folder)
    if report.count("error"):
        seconds = time.monotonic() - began
        return Rehearsal(Path(recipe), checkout, report.findings, gpus, None, None, folder, seconds)
    how = _How(checkout, steps, ranks, own_environment, gpus, timeout, resume, progress)
    planned = _planned(facts, folder, how)
    if folder.exists():
        shutil.rmtree(folder)
    outcome = _run(facts, planned, tuple(overrides), folder, how)
    ours_only = inexpressible(facts, score_function=has_score_function(checkout)) if control else ()
    other = None
    if control and not ours_only and outcome.failure is None:
        theirs = (*overrides, *control_overrides(facts))
        of_theirs = RecipeFacts.of(read_recipe(recipe, theirs))
        of_control = folder / "control"
        other = _run(of_theirs, _planned(of_theirs, of_control, how), theirs, of_control, how)
    again = None
    if resume and outcome.failure is None:
        saved = folder / "checkpoints" / f"step_{steps - 1}"
        of_resumed = folder / "resumed"
        if saved.is_dir():
            again = _run(facts, _planned(facts, of_resumed, how), tuple(overrides), of_resumed, how, saved)
        else:
            missing = f"{saved} is not there: checkpointing: saved or kept no checkpoint of step {steps - 1}"
            again = RunResult((), Breakdown("checkpoint", missing, missing), {})
    seconds = time.monotonic() - began
    return Rehearsal(
        *(Path(recipe), checkout, report.findings, gpus, planned, outcome, folder, seconds, other, ours_only, again)
    )


@dataclass(frozen=True)
class _How:
    """What two runs of one rehearsal have in common."""

    checkout: Path
    steps: int
    ranks: int
    own_environment: bool
    gpus: bool
    timeout: float
    resume: bool
    progress: Callable[[Sequence[dict[str, object]]], None]


def _refuse_foreign(folder: Path) -> None:
    try:
        held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"--out: {folder} can't be used: {error.strerror or error}") from None
    if held and not all((folder / name).is_file() for name in (_PROMPTS, _COMMAND)):
        raise ConfigError(
            f"--out: {folder} is not empty (it holds {held[0]}) and has no rehearsal that could be replaced; choose "
            "another folder"
        )
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"--out: {above} can't be written to; choose another folder")


def _planned(facts: RecipeFacts, folder: Path, how: _How) -> Plan:
    planned = plan(
        facts,
        folder=folder,
        steps=how.steps,
        ranks=how.ranks,
        own_environment=how.own_environment,
        gpus=how.gpus,
        automodel=has_automodel(how.checkout),
        resume=how.resume,
    )
    if not (how.checkout / planned.script).is_file():
        raise ConfigError(f"the NeMo-RL in {how.checkout} has no {planned.script}, which this recipe's algorithm needs")
    return planned


def _run(
    facts: RecipeFacts,
    planned: Plan,
    overrides: tuple[str, ...],
    folder: Path,
    how: _How,
    saved: Path | None = None,
) -> RunResult:
    folder.mkdir(parents=True)
    write_prompts(folder / _PROMPTS)
    done = 0
    if saved is not None:
        shutil.copytree(saved, folder / "checkpoints" / saved.name)
        done = how.steps - 1
    script = str(how.checkout / planned.script)
    arguments = [script, "--config", str(facts.recipe.path.resolve()), *overrides, *planned.overrides]
    command = [sys.executable, "-m", "nemo_geomask.cli", "run", str(Path(driver.__file__)), *arguments]
    (folder / _COMMAND).write_text("\n".join(command), encoding="utf-8")
    events = folder / "events.jsonl"
    started = time.time()
    around = surroundings(
        *(folder, how.checkout, planned),
        gpus=how.gpus,
        own_environment=how.own_environment,
        first_seed=done if how.resume else None,
    )
    with around as environment:
        status = supervised(
            command,
            log=folder / "log.txt",
            timeout=how.timeout,
            environment=environment,
            folder=how.checkout,
            every_tick=lambda: how.progress(list(read_events(events))),
        )
    return outcome_of(
        read_events(events),
        status=status,
        steps=how.steps - done,
        started=started,
        ended=time.time(),
        asked=frozenset(STAGES) - _not_asked(facts),
        log=(folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-20_000:],
        settings=dict(_settings(facts.recipe.data)),
    )


def nemo_rl_checkout() -> Path:
    """NeMo-RL's, from the environment.

    Raises:
        ConfigError: there is none.
    """
    root = nemo_rl_root()
    if root is None:
        raise ConfigError(
            f"{ROOT_VARIABLE} is not set, and no nemo_rl is importable here; a rehearsal runs NeMo-RL's own script: "
            f"export {ROOT_VARIABLE} with the absolute path of its checkout"
        )
    if not (root / "examples" / "run_grpo.py").is_file():
        raise ConfigError(
            f"{ROOT_VARIABLE} is {root}, which has no examples/run_grpo.py; give the path of its checkout"
        )
    return root.resolve()


def _settings(section: Mapping[str, Any], around: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        yield f"{around}{name}", value
        if isinstance(value, Mapping):
            yield from _settings(value, f"{around}{name}.")


def _not_asked(facts: RecipeFacts) -> frozenset[str]:
    """Stages that the recipe doesn't have."""
    without = set()
    if not facts.config.looks_before_step or facts.nameless:
        without.add("veto")
    if not facts.on("checkpointing.enabled"):
        without.add("checkpoint")
    return frozenset(without)
