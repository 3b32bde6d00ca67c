"""A rehearsal from the recipe to its outcome, with the control run and the resumed run."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl.facts import has_kl_score_function
from nemo_geomask.recipe import ROOT_VARIABLE, nemo_rl_root, read_recipe
from nemo_geomask.tools.check import Finding, RecipeFacts, check
from nemo_geomask.tools.rehearse.control_run import Comparison, compare, control_overrides, settings_of_ours_alone
from nemo_geomask.tools.rehearse.launch_environment import has_automodel, supports_fp8_cache
from nemo_geomask.tools.rehearse.plan import Plan, PlanOptions, plan
from nemo_geomask.tools.rehearse.refusals import errors_of
from nemo_geomask.tools.rehearse.rehearsed_run import COMMAND, PROMPTS, run_plan
from nemo_geomask.tools.rehearse.run_outcome import RunFailure, RunResult

# Rule of `check`: after a resume, DTensor v2's reference policy is the checkpoint's and not the original model's.
_RESET_REFERENCE = "GM209"
# Rule of `check`: a mask that is expected to keep hardly anything.
_EMPTY_MASK = "GM402"


@dataclass(frozen=True)
class Rehearsal:
    """Rehearsal of a recipe and its outcome."""

    recipe: Path  # path of the recipe
    nemo_rl: Path  # path of the NeMo-RL checkout
    findings: tuple[Finding, ...]  # findings of ``check`` on the recipe
    gpus: bool  # True if it ran on GPUs
    plan: Plan | None  # changes to the recipe; None if the recipe has errors, and nothing was run
    outcome: RunResult | None  # outcome of the run; None if nothing was run
    folder: Path  # folder of model, log and metrics
    seconds: float  # total time, with validation
    control: RunResult | None = None  # outcome with NeMo-RL's own loss; None if it was not run
    ours_only: tuple[str, ...] = ()  # settings that NeMo-RL's own loss does not have, so that there is no control
    # outcome of the last step alone, resumed from the checkpoint before it; None if it was not run
    resumed: RunResult | None = None
    # overrides under which it was resumed; its metrics then need not equal the first run's
    resume_changes: tuple[str, ...] = ()

    @property
    def resumptions(self) -> tuple[Comparison, ...]:
        """Comparisons of the last step with the resumed one; empty if none was resumed."""
        return _compared(self.outcome, self.resumed)

    @property
    def resume_cause(self) -> Finding | None:
        """Finding that explains why the resumed step differs; None if it is equal or nothing is known to explain it."""
        differs = any(each.sampled_alike and not each.equal for each in self.resumptions)
        # Only DTensor v2's workers replace the reference, and a machine without Automodel rehearses v1's.
        if not differs or self.resume_changes or self.plan is None or not self.plan.uses_automodel:
            return None
        return next((finding for finding in self.findings if finding.rule.id == _RESET_REFERENCE), None)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Comparisons of the run with the control; empty without a control."""
        return _compared(self.outcome, self.control)

    @property
    def ok(self) -> bool:
        """True if all steps of all runs were trained, with equal results in control and resumed run.

        Of a rehearsal that was only planned: True if the recipe has no errors.
        """
        if self.outcome is None:
            return self.plan is not None
        runs = [self.outcome, *(run for run in (self.control, self.resumed) if run is not None)]
        trained = all(run.failure is None for run in runs)
        if self.control is not None and not any(each.sampled_alike for each in self.comparisons):
            return False
        comparisons = (*self.comparisons, *(() if self.resume_changes else self.resumptions))
        return trained and all(comparison.equal for comparison in comparisons if comparison.sampled_alike)


def _compared(run: RunResult | None, other: RunResult | None) -> tuple[Comparison, ...]:
    if run is None or other is None:
        return ()
    return tuple(compare(run.metrics, other.metrics, (run.samples, other.samples)))


def has_gpus() -> bool:
    """Return True if torch sees a GPU on this machine."""
    import torch

    return bool(torch.cuda.is_available())


def machine_options(checkout: Path) -> PlanOptions:
    """Return the options of a plan that follow from this machine and a NeMo-RL checkout."""
    has = {"has_automodel": has_automodel(checkout), "has_fp8_cache": supports_fp8_cache()}
    return PlanOptions(checkout=checkout, gpus=has_gpus(), **has)


def rehearse(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: int = 3,
    ranks: int = 1,
    own_environment: bool = False,
    timeout: float = 600.0,
    control: bool = False,
    resume: Sequence[str] | None = None,
    validate: bool = False,
    dry_run: bool = False,
    accept: Sequence[str] = (),
    folder: Path,
    progress: Callable[[Sequence[dict[str, object]]], None] = lambda events: None,
) -> Rehearsal:
    """Run a small version of a recipe through NeMo-RL.

    Args:
        ranks: largest number of processes that train.
        control: run it again with NeMo-RL's own loss, if that has the recipe's settings.
        resume: overrides under which the last step is trained again, from the checkpoint of the step before; empty
            for none, None not to train it again.
        validate: validate after every step.
        dry_run: make the plan alone; nothing is written or run.
        accept: dotted names of NeMo-RL APIs that may differ from the tested versions.
        folder: folder for model, prompts, log and checkpoints. An earlier rehearsal in it is deleted once this one is
            planned.

    Returns:
        The rehearsal with its outcome, which may be a failure.

    Raises:
        ConfigError: the recipe can't be read, there is no NeMo-RL, the model's architecture is unknown, the recipe
            saves no checkpoint to resume from, or the folder holds something else.
        EngineError: a process could not be ended.
    """
    began = time.monotonic()
    checkout = nemo_rl_checkout()
    # These sections are replaced, and may refer to variables that are set on the recipe's own cluster alone.
    leave = () if own_environment else ("data", "env")
    facts = RecipeFacts.from_recipe(read_recipe(recipe, overrides, leave=leave))
    if resume is not None and (steps < 2 or not facts.is_true("checkpointing.enabled")):
        raise ConfigError(
            Problem(("checkpointing.enabled",), "--resume needs a checkpoint: set true, and 2 --steps at least")
        )
    resumed_args = (*overrides, *(resume or ()))
    resumed_facts = RecipeFacts.from_recipe(read_recipe(recipe, resumed_args, leave=leave)) if resume else facts
    reports = [check(facts), *([check(resumed_facts)] if resume else [])]
    report = next((each for each in reports if errors_of(each, own_environment=own_environment)), reports[0])
    folder = folder.resolve()
    if not dry_run:
        check_output_folder(folder, (PROMPTS, COMMAND), "rehearsal")
    result = Rehearsal(
        *(Path(recipe), checkout, report.findings, has_gpus(), None, None, folder),
        seconds=time.monotonic() - began,
        resume_changes=tuple(resume or ()),
    )
    if errors_of(report, own_environment=own_environment):
        return result
    options = replace(
        machine_options(checkout),
        steps=steps,
        ranks=ranks,
        own_environment=own_environment,
        resume=resume is not None,
        validate=validate,
        record=True,
        control=control,
    )
    forecasts = tuple(finding.message for finding in report.findings if finding.rule.id == _EMPTY_MASK)
    run = functools.partial(run_plan, timeout=timeout, accept=accept, forecasts=forecasts, progress=progress)
    planned = plan(facts, overrides, folder=folder, options=options)
    if not (checkout / planned.script).is_file():
        raise ConfigError(f"the NeMo-RL in {checkout} has no {planned.script}, which this recipe's algorithm needs")
    result = replace(result, plan=planned)
    if dry_run:
        return replace(result, seconds=time.monotonic() - began)
    if folder.exists():
        shutil.rmtree(folder)
    outcome = run(planned)
    result = replace(result, outcome=outcome)
    if control and (ours_only := settings_of_ours_alone(facts, score_function=has_kl_score_function(checkout))):
        result = replace(result, ours_only=ours_only)
    elif control and outcome.failure is None:
        control_args = (*overrides, *control_overrides(facts))
        control_facts = RecipeFacts.from_recipe(read_recipe(recipe, control_args, leave=leave))
        control_plan = plan(control_facts, control_args, folder=folder / "control", options=options)
        result = replace(result, control=run(control_plan))
    if resume is not None and outcome.failure is None:
        saved = folder / "checkpoints" / f"step_{steps - 1}"
        if saved.is_dir():
            resumed_plan = plan(resumed_facts, resumed_args, folder=folder / "resumed", options=options)
            resumed = run(resumed_plan, saved)
        else:
            missing = f"{saved} is not there: checkpointing: saved or kept no checkpoint of step {steps - 1}"
            resumed = RunResult((), RunFailure("checkpoint", missing), {})
        result = replace(result, resumed=resumed)
    return replace(result, seconds=time.monotonic() - began)


def check_output_folder(folder: Path, marks: Sequence[str], kind: str) -> None:
    """Raise ConfigError unless a folder can be written to and is new, empty, or an earlier one with these files.

    Args:
        marks: names of files that each folder of the kind has.
    """
    try:
        contents = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"--out: {folder} can't be used: {error.strerror or error}") from None
    if contents and not all((folder / name).is_file() for name in marks):
        raise ConfigError(
            f"--out: {folder} is not empty (it holds {contents[0]}) and holds no {kind}; choose another folder"
        )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"--out: {existing} can't be written to; choose another folder")


def nemo_rl_checkout() -> Path:
    """Return the NeMo-RL checkout that the environment names.

    Raises:
        ConfigError: it names none, or the folder is no checkout.
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
