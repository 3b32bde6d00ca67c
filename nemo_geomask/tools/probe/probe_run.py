"""A probe of a recipe, from the choice of switches to the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.probe.arm_runner import NOTHING, SIDES, ArmRunner
from nemo_geomask.tools.probe.attribution import attribute_mismatch
from nemo_geomask.tools.probe.engine_scores import PROCESSOR
from nemo_geomask.tools.probe.free_checks import FreeCheck, free_checks
from nemo_geomask.tools.probe.ledger import Ledger, LedgerRow
from nemo_geomask.tools.probe.locations import LayerDifferences
from nemo_geomask.tools.probe.scored_arms import BASE
from nemo_geomask.tools.probe.start_store import Launcher, StartStore
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch, mismatch_switches

COMMON_SETTINGS: Mapping[str, Any] = {
    # Replays need the processor in all arms: with a processor, recent vLLM uses another model runner.
    "policy.generation.vllm_kwargs.logits_processors": [PROCESSOR],
    # Longer responses than a rehearsal's: tokens are what the probe is about.
    "policy.max_total_sequence_length": 64,
    "policy.generation.max_new_tokens": 48,
    "policy.generation.vllm_cfg.max_model_len": 80,
    "data.max_input_seq_length": 64,
}
"""Settings of all starts, by dotted key."""

ADAPTER_KEYS = ("policy.dtensor_cfg.lora_cfg.enabled", "policy.megatron_cfg.peft.enabled")
"""Keys by which a recipe trains adapters."""

BATCH_TOKENS = tuple(
    f"policy.{batching}.{use}_mb_tokens"
    for batching in ("sequence_packing", "dynamic_batching")
    for use in ("logprob", "train")
)
"""Keys of the tokens in a batch, which must hold the longer responses; set where the recipe has them."""
_BATCH_TOKENS = 128


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    recipe: str  # path of the recipe
    overrides: tuple[str, ...]  # overrides of the recipe
    checks: tuple[FreeCheck, ...]  # the checks that cost nothing
    ledger: Ledger  # the ledger
    # differences of hidden states: ``baseline``, and by id those with a switch that explains or contributes
    layers: Mapping[str, LayerDifferences]
    tokens: int  # number of response tokens
    seconds: float  # total time
    runs: int  # number of starts that were run now; the others were stored
    unprobed: tuple[str, ...] = ()  # parts of the recipe that the probe says nothing about

    @property
    def is_answered(self) -> bool:
        """True if there is no mismatch, or a switch accounts for some of it and fresh prompts do not deny it."""
        return not self.ledger.has_mismatch or any(row.is_confirmed is not False for row in self.ledger.culprits)

    @property
    def faults(self) -> tuple[FreeCheck, ...]:
        """Checks that found a fault."""
        return tuple(check for check in self.checks if check.outcome == "fault")


def choose_switches(
    values: Mapping[str, Any],
    replaced: Mapping[str, Any],
    *,
    names: Iterable[str] | None,
    is_read: Callable[[str], bool],
    trainer: str,
    has_gpus: bool,
) -> tuple[list[MismatchSwitch], list[LedgerRow]]:
    """Return the switches to try, and rows of those that can't be tried here.

    Args:
        values: values that are in force, by the dotted key of each switch; a key is absent if the recipe has none.
        replaced: the recipe's own values of those keys that have another one here.
        names: ids or groups of switches to try; None tries all.
        is_read: returns True for a key that the NeMo-RL in use reads.
        trainer: ``megatron`` or ``dtensor``.
        has_gpus: True if the workers run on GPUs.

    Raises:
        ConfigError: a name is neither a switch nor a group.
    """
    table = mismatch_switches()
    named = None if names is None else set(names)
    if named is not None and (unknown := named - {each.id for each in table} - {each.group for each in table}):
        raise ConfigError(
            f"--switches: there is no switch or group '{sorted(unknown)[0]}'; "
            f"known are {', '.join(sorted({each.id for each in table}))}"
        )
    chosen, rows = [], []
    for switch in table:
        is_named = named is not None and bool({switch.id, switch.group} & named)
        if named is not None and not is_named:
            continue
        recipe_value = replaced.get(switch.key, values.get(switch.key))
        if switch.is_conservative(recipe_value):
            continue
        if switch.needs not in ("", trainer) or (switch.value == {} and switch.key not in values):
            continue  # the recipe's trainer does not read it, or there is nothing to take away
        reason = ""
        if switch.key in values and values[switch.key] == switch.value:
            reason = f"the probe has the conservative value here, and not the recipe's {recipe_value}"
            if switch.cost == "layout" and switch.side == "trainer":
                reason = f"the recipe's value, {recipe_value}, needs more processes; --ranks allows them"
        elif switch.gpu and not has_gpus:
            reason = "changes kernels of GPUs alone"
        elif switch.cost == "layout" and switch.side == "trainer" and any(map(values.get, ADAPTER_KEYS)):
            reason = "adapters of another layout get other values here, so that the change would be theirs, too"
        elif not is_read(switch.key):
            reason = f"this NeMo-RL does not read the key; {switch.since} is the first that does"
        if reason:
            rows.append(LedgerRow(switch, recipe_value, "not testable here", reason))
        else:
            chosen.append(switch)
    return chosen, rows


def probe(
    recipe: str | Path,
    overrides: Sequence[str],
    launcher: Launcher,
    switches: Sequence[MismatchSwitch],
    untried_rows: Sequence[LedgerRow],
    values: Mapping[str, Any],
    *,
    folder: Path,
    prompts: int,
    generations: int,
    budget: float,
    replaced: Mapping[str, Any] | None = None,
    unprobed: Sequence[str] = (),
    replaces_engines: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> ProbeResult:
    """Find the switches behind a recipe's mismatch.

    Args:
        values: values that are in force, by dotted key.
        prompts: number of prompts; half of them confirm what the other half shows.
        generations: responses to each prompt.
        budget: seconds after which no further start is begun.
        replaced: the recipe's own values of those keys that have another one here.
        unprobed: parts of the recipe that the workers of the probe do not have.
        replaces_engines: True if an engine can be replaced in its process.

    Raises:
        EngineError: the recipe can't be scored with its own settings.
        DataError: stored scores were changed.
    """
    began = time.monotonic()
    store = StartStore(folder, launcher, prompts=prompts, generations=generations)
    runner = ArmRunner(
        *(store, switches, values),
        settings={**COMMON_SETTINGS, **{key: _BATCH_TOKENS for key in BATCH_TOKENS if values.get(key) is not None}},
        budget=budget,
        replaces_engines=replaces_engines,
        progress=progress,
    )
    neutral: dict[str, tuple[Any, ...]] = {
        "policy.generation.temperature": (1.0,),
        "policy.generation.top_p": (1.0,),
        "policy.generation.top_k": (None, -1),
    }
    decode, trainer = runner.decode(NOTHING), runner.logprobs(NOTHING)
    checks = free_checks(
        runner.tokens,
        decode,
        runner.prefill(),
        trainer,
        trainer_again=runner.logprobs(NOTHING, "again"),
        is_training="training True" in runner.base.scores["trainer"][BASE]["settings"].get("trainer.forward", ""),
        weights=runner.base.weights,
        is_neutral=all(values.get(key, allowed[0]) in allowed for key, allowed in neutral.items()),
        trainer_error=store.frozen()["trainer_error"],
        adapters=runner.base.scores.get("adapters"),
    )
    ledger = attribute_mismatch(runner, switches, values, untried_rows, replaced)
    layers = {"baseline": runner.layers("engine", NOTHING)}
    for row in ledger.culprits:
        arm = frozenset({row.switch.id})
        for side in SIDES:
            if runner.has_scores(side, arm):
                layers[row.switch.id] = runner.layers(side, arm)
    return ProbeResult(
        recipe=str(recipe),
        overrides=tuple(overrides),
        checks=tuple(checks),
        ledger=ledger,
        layers=layers,
        tokens=len(decode),
        seconds=time.monotonic() - began,
        runs=store.runs,
        unprobed=tuple(unprobed),
    )
