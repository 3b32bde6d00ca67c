"""Preflight: the first steps of a real run are recorded and judged, before the others are trained.

The run is NeMo-RL's own, with its real model. In these steps the driver logs events and compares weights after each
refit, as in a rehearsal, and the steps are recorded. The same gate judges them, by limits for real models. Then all of
it is undone: patches in this process and in the workers, and the records.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, GeomaskError, Problem
from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.hosts.nemo_rl.training_step import stop_recording
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.check import RecipeFacts
from nemo_geomask.tools.diagnose import find_run, survey_run
from nemo_geomask.tools.rehearse import event_hooks
from nemo_geomask.tools.rehearse.event_log import EVENTS, Events, read_events
from nemo_geomask.tools.rehearse.gate import judge
from nemo_geomask.tools.rehearse.healthy_limits import REAL_UPDATE, usual_limits
from nemo_geomask.tools.rehearse.hosted_job import make_empty
from nemo_geomask.tools.rehearse.rehearsal import check_output_folder
from nemo_geomask.tools.rehearse.run_outcome import RunResult, outcome_of
from nemo_geomask.tools.rehearse.run_report import run_lines, verdict_lines
from nemo_geomask.tools.rehearse.setting_changes import Change
from nemo_geomask.tools.rehearse.tiny_models import PROMPT_FORMAT
from nemo_geomask.tools.shared.usual_mismatch import precisions

_FORMAT = ("prompt_file", "system_prompt_file", "processor", "env_name")  # of a data set: its template and reward
_WORST = 5  # tokens that are printed


class Preflight:
    """Preflight of one run, from before the script starts until its verdict.

    Args:
        arguments: the script's arguments, with ``--config``.
        steps: number of steps to judge.
        always_stops: stop the run after the verdict, whatever it is.
        prompts: file of prompts, a JSON object with ``input`` and ``output`` a line; None: the recipe's.
        folder: folder for events, records and the report; what it holds is deleted.

    Raises: ConfigError: the script's arguments name no recipe, the recipe can't be read, or its run can't be judged.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        steps: int,
        always_stops: bool,
        prompts: Path | None = None,
        folder: Path,
    ) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config")
        options, overrides = parser.parse_known_args(list(arguments))
        if options.config is None:
            raise ConfigError("--preflight reads the recipe: give the script its --config")
        self._facts = RecipeFacts.from_recipe(read_recipe(options.config, overrides))
        if self._facts.trains_nemo_rl_loss or self._facts.uses_single_controller:
            message = (
                "--preflight judges records of a loss of nemo_geomask in GRPO or PPO without the single controller"
            )
            raise ConfigError(
                Problem(("loss_fn.name",), f"{message}; set loss_fn.name: clipped_pg, NeMo-RL's own loss")
            )
        if prompts is not None and not (always_stops and prompts.is_file()):
            raise ConfigError(f"--prompts: {prompts} must be a file, and takes --preflight-only: no run trains on it")
        self._steps, self._always_stops, self._folder = steps, always_stops, folder.resolve()
        self._keeps_records = self._facts.get("loss_fn.record") is not None
        records = self._facts.get("loss_fn.record.dir") if self._keeps_records else self._folder / "records"
        self._records = Path(str(records)).expanduser()
        self._changes = [] if self._keeps_records else [Change("loss_fn.record", {"dir": str(self._records)})]
        if prompts is not None:
            _check_prompts(
                prompts, steps * int(self._facts.number(f"{self._facts.algorithm}.num_prompts_per_step") or 1)
            )
            self._changes += _read_from(prompts.resolve(), self._facts)
        self._is_judged = False
        self._patches: list[patch.Patch] = []
        self._started = 0.0

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for the script, after its own."""
        return tuple(override for change in self._changes for override in change.overrides)

    def begin(self) -> None:
        """Observe the run from now on."""
        check_output_folder(self._folder, (EVENTS,), "preflight")
        make_empty(self._folder)
        self._started = time.time()
        events = Events(self._folder / EVENTS)
        events("end", stage="start")
        self._patches = list(event_hooks.patches(events, after_step=self._after_step))
        patch.apply_all(self._patches)

    def require_verdict(self) -> None:
        """Exit with status 1 if the run has ended before the last of the steps that were to be judged."""
        if not self._is_judged:
            print(
                f"preflight: NOT JUDGED: the run ended before step {self._steps} was logged; see its log for the reason"
            )
            raise SystemExit(1)

    def _after_step(self) -> None:
        events = list(read_events(self._folder / EVENTS))
        steps = {event["step"] for event in events if event["kind"] == "metrics" and "loss" in event["values"]}
        if len(steps) < self._steps:
            return
        self._is_judged = True
        self._detach()
        outcome = self._judge(events, sorted(steps))
        lines = [f"preflight of {len(steps)} steps", *run_lines(outcome), "", *verdict_lines(outcome)]
        lines += self._worst_tokens()
        is_healthy = outcome.failure is None
        ends = "stopped" if self._always_stops or not is_healthy else "the run goes on, and nothing of it is left in it"
        lines += ["", f"preflight {'passed' if is_healthy else 'FAILED'}; {ends}. Records are in {self._records}"]
        (self._folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines), flush=True)
        if self._always_stops or not is_healthy:
            raise SystemExit(0 if is_healthy else 1)

    def _detach(self) -> None:
        """Undo what was changed for the preflight in this process and in the workers."""
        for policy in event_hooks.stop_workers():
            if not self._keeps_records:
                stop_recording(policy)
        for each in reversed(self._patches):
            each.undo()

    def _judge(self, events: list[dict[str, Any]], steps: list[int]) -> RunResult:
        facts = self._facts
        outcome = outcome_of(
            events, status=0, steps=len(steps), started=self._started, ended=time.time(), expected_stages=frozenset()
        )
        run = replace(
            outcome,
            steps=steps,
            loss_name=facts.config.name,
            records=self._records,
            updates=int(facts.steps_per_rollout or 1),
            precisions=precisions(facts.get),
        )
        try:
            experts = bool(survey_run(find_run(self._records), steps).experts)
        except GeomaskError:
            experts = False
        return judge(
            run,
            self._records,
            limits=usual_limits(facts, experts=experts),
            update_limits=REAL_UPDATE,
            config=facts.config,
            rows=int(facts.number("policy.train_global_batch_size") or 1),
            is_filtered=facts.filter_key is not None,
        )

    def _worst_tokens(self) -> list[str]:
        """Return lines on the tokens that differ most between the engines, with the text before them."""
        try:
            worst = survey_run(find_run(self._records)).worst_tokens[:_WORST]
            name = self._facts.get("policy.tokenizer.name", self._facts.get("policy.model_name"))
            decode = importlib.import_module("transformers").AutoTokenizer.from_pretrained(name).decode
        except (GeomaskError, ImportError, OSError, ValueError) as error:
            return [f"no texts of tokens: {error}"]
        return [
            f"  step {each.step}, row {each.row}, token {each.position}: gen {each.gen:.3g}, prev {each.prev:.3g}: "
            f"{decode(each.context)[-60:]!r}"
            for each in worst
        ]


def _check_prompts(prompts: Path, needed: int) -> None:
    """Raise ConfigError if a file of prompts has too few lines, or one without ``input`` and ``output``."""
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            is_prompt = {"input", "output"} <= set(json.loads(line))
        except (ValueError, TypeError):
            is_prompt = False
        if not is_prompt:
            raise ConfigError(f"--prompts: line {number} of {prompts} must be a JSON object with input and output")
    if len(lines) < needed:
        raise ConfigError(
            f"--prompts: {prompts} has {len(lines)} prompts, and the preflight's steps take {needed} "
            "(num_prompts_per_step); add prompts, or judge fewer steps (--preflight N)"
        )


def _read_from(prompts: Path, facts: RecipeFacts) -> list[Change]:
    """Return the changes by which NeMo-RL takes its prompts, in order, from a file; it formats them as the recipe's."""
    recipe = facts.get("data.train")
    train: dict[str, Any] = {**PROMPT_FORMAT, "data_path": str(prompts)}
    # Also those that are null: the recipe then overrides data.default.
    train |= {key: recipe[key] for key in _FORMAT if isinstance(recipe, Mapping) and key in recipe}
    values: dict[str, Any] = {"data.train": {**train, "split_validation_size": 0}, "data.shuffle": False}
    values |= {"data.use_multiple_dataloader": False, "data.validation": None}
    return [Change(key, value, was=facts.get(key)) for key, value in values.items()]
