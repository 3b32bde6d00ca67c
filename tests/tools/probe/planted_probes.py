"""Probes of planted causes: for tests, and as a script for the figures.

Most need one start of NeMo-RL's workers. The engine is real and is restarted for every arm. Where a probe would
start all workers anew, only the engine is restarted: a dozen probes take minutes, without the switches that need new
workers of the trainer. :data:`STARTED_PLANTS` are about those switches, and are run as the command runs a probe.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from nemo_geomask.cli.probe import probe_recipe
from nemo_geomask.tools.probe import scoring_job
from nemo_geomask.tools.probe.probe_report import location_lines, sentence
from nemo_geomask.tools.probe.probe_run import COMMON_SETTINGS, choose_switches, probe
from nemo_geomask.tools.rehearse.hosted_job import JobSession
from nemo_geomask.tools.shared.mismatch_switches import mismatch_switches
from tests.tools.probe.planted_workers import FUNCTION, VARIABLE
from tests.tools.rehearse.real_runs import MOE, RECIPE

GENERATION = "policy.generation."
PRECISIONS = ("policy.precision=float32", f"++{GENERATION}vllm_cfg.precision=float32")


class Plant(NamedTuple):
    """A planted cause.

    Attributes:
        values: the recipe's values, by dotted key below ``policy.generation``.
        faults: faults of the code, by name of the function that plants them.
        expected: ids of the switches that have to be found, or name of the check that has to find a fault.
    """

    values: dict
    faults: dict
    expected: tuple | str


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
FP8_CACHE = {
    "vllm_cfg.precision": "fp8",
    "vllm_cfg.quantization_ignored_layer_kws": [""],
    "vllm_cfg.kv_cache_dtype": "fp8",
}
PLANTS = {
    "nothing": Plant({}, {}, ()),
    "temperature": Plant({"temperature": 0.7}, {}, ("temperature",)),
    "top-p": Plant({"top_p": 0.7}, {}, ("top_p",)),
    "raw log-probs": Plant(
        {"temperature": 0.7, "vllm_cfg.logprobs_mode": "raw_logprobs"},
        {"trainer_sampling": {"temperature": 0.7}},
        ("logprobs_mode", "temperature"),
    ),
    "bfloat16 engine": Plant({"vllm_cfg.precision": "bfloat16"}, {}, ("engine_precision",)),
    "fp8 cache": Plant(FP8_CACHE, {}, ("engine_precision", "kv_cache_dtype")),
    "RoPE override": Plant({"vllm_kwargs.hf_overrides": ROPE}, {}, ("rope_override",)),
    "norm override": Plant({"vllm_kwargs.hf_overrides": {"rms_norm_eps": 0.3}}, {}, ("rope_override",)),
    "RoPE override and temperature": Plant(
        {"temperature": 0.9, "vllm_kwargs.hf_overrides": ROPE}, {}, ("rope_override", "temperature")
    ),
    "shifted tokens": Plant({}, {"shifted_tokens": 1}, "shift"),
    "dropout left on": Plant({}, {"dropout": 0.1}, "evaluation mode"),
    "stale layer": Plant({}, {"stale_layer": {"layer": 1, "size": 0.3}}, "weights after the refit"),
    "batch-variant head": Plant({}, {"batch_variant_head": True}, ("max_num_seqs",)),
}


ADAPTER = ("++policy.dtensor_cfg._v2=true", "++policy.dtensor_cfg.lora_cfg.enabled=true")
"""Overrides of the recipe for the plants of adapters, which NeMo-RL's own trainer alone has."""
ADAPTER_PLANTS = {"adapter": Plant({}, {}, ()), "lost adapter": Plant({}, {"lost_adapter": True}, "adapters")}


class StartedPlant(NamedTuple):
    """A planted cause whose switches need other workers of the trainer, which is Megatron; all starts are real.

    Attributes:
        overrides: overrides of the recipe.
        faults: as in :class:`Plant`.
        switches: ids of the switches that are tried.
        expected: ids of those that have to be found.
        ranks: number of processes that train.
        prompts: number of prompts; more where few tokens with other routes make most of k3.
    """

    overrides: tuple[str, ...]
    faults: dict
    switches: tuple[str, ...]
    expected: tuple[str, ...]
    ranks: int
    prompts: int = 24


MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", *PRECISIONS)
MIXTURE = (*MEGATRON, MOE)
_TP = "policy.megatron_cfg.tensor_model_parallel_size=2"
_EP = "policy.megatron_cfg.expert_model_parallel_size=2"
_NO_ROUTER_DTYPE = "policy.megatron_cfg.moe_router_dtype=null"
STARTED_PLANTS = {
    "tensor parallelism": StartedPlant((*MEGATRON, _TP), {"rounded_sums": True}, ("megatron_tp",), ("megatron_tp",), 2),
    "expert parallelism": StartedPlant(
        (*MIXTURE, _EP), {"rounded_dispatch": True}, ("megatron_ep", "router_dtype"), ("megatron_ep",), 2
    ),
    "router dtype": StartedPlant(
        (*MIXTURE, _NO_ROUTER_DTYPE), {"rounded_router": True}, ("router_dtype",), ("router_dtype",), 1
    ),
    "expert parallelism and router dtype": StartedPlant(
        (*MIXTURE, _EP, _NO_ROUTER_DTYPE),
        {"rounded_dispatch": True, "rounded_router": True},
        ("megatron_ep", "router_dtype"),
        ("megatron_ep", "router_dtype"),
        2,
        48,
    ),
    "expert parallelism alone": StartedPlant(
        (*MIXTURE, _EP, _NO_ROUTER_DTYPE), {}, ("megatron_ep", "router_dtype"), (), 2
    ),
    "context parallelism alone": StartedPlant(
        (*MEGATRON, "policy.megatron_cfg.context_parallel_size=2", "policy.make_sequence_length_divisible_by=4"),
        {},
        ("megatron_cp",),
        (),
        2,
    ),
    "pipeline alone": StartedPlant(
        (*MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size=2"), {}, ("megatron_pp",), (), 2
    ),
}


class PlantedWorkers:
    """Sends the jobs of a probe to workers that run already, with the plant's values and faults."""

    def __init__(self, session, values, faults, common):
        self._session, self._values, self._faults, self._common = session, values, faults, common

    def __call__(self, job, *, name, settings, is_fresh):
        arm = {
            key.removeprefix(GENERATION): value
            for key, value in settings.items()
            if key.startswith(GENERATION) and self._common.get(key) != value
        }
        engine = {**self._values, **arm, **(job["engine"] or {})}
        job = {**job, "engine": engine, "faults": self._faults}
        return self._session(job, name="planted", settings=self._common, is_fresh=False)


def recipe_values(values):
    """Values of the recipe that has a plant, by dotted key."""
    base = {
        "policy.precision": "float32",
        f"{GENERATION}vllm_cfg.precision": "float32",
        f"{GENERATION}vllm_cfg.logprobs_mode": "processed_logprobs",
        f"{GENERATION}temperature": 1.0,
        f"{GENERATION}top_p": 1.0,
        "policy.logprob_batch_size": 2,
    }
    return {**base, **{GENERATION + key: value for key, value in values.items()}}


def switches_for(values):
    """All switches of the engine and of requests that the values leave open."""
    names = [each.id for each in mismatch_switches() if each.side == "engine" or each.cost == "request"]
    present = {key: value for key, value in values.items() if value is not None}
    return choose_switches(present, {}, names=names, is_read=lambda key: True, trainer="dtensor", has_gpus=False)


def run_plant(session, name, folder, *, prompts=24):
    """Run the probe of a plant; returns its result."""
    values, faults, _ = {**PLANTS, **ADAPTER_PLANTS}[name]
    values_of_recipe = recipe_values(values)
    switches, others = switches_for(values_of_recipe)
    folder.mkdir(parents=True, exist_ok=True)
    return probe(
        *(RECIPE, [], PlantedWorkers(session, values, faults, COMMON_SETTINGS), switches, others, values_of_recipe),
        folder=folder,
        prompts=prompts,
        generations=2,
        budget=1e9,
        replaces_engines=True,
        progress=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )


def run_started_plant(name, folder):
    """Run the probe of a plant as the command does, with the faults in every start; returns its result."""
    plant = STARTED_PLANTS[name]
    scoring_job.FUNCTION = FUNCTION
    os.environ[VARIABLE] = json.dumps(plant.faults)
    _find_planted_workers()
    return probe_recipe(
        *(RECIPE, plant.overrides),
        folder=folder,
        switches=plant.switches,
        budget=1e9,
        prompts=plant.prompts,
        ranks=plant.ranks,
        timeout=1500,
    )


def summary(name, result):
    """What a probe found, in plain values."""
    rows = {row.switch.id: row for row in result.ledger.rows}
    return {
        "plant": name,
        "k3": result.ledger.baseline.k3,
        "floor": result.ledger.floor,
        "faults": [check.name for check in result.faults],
        "found": [[row.switch.id, row.verdict, row.share, row.is_confirmed] for row in result.ledger.culprits],
        "others": {id: row.verdict for id, row in rows.items() if row not in result.ledger.culprits},
        "where": location_lines(result.layers["baseline"]),
        "sentence": sentence(result),
    }


def _find_planted_workers():
    # NeMo-RL's checkout, which comes first in its processes, has a package `tests` of its own.
    own_folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([own_folder, os.environ.get("PYTHONPATH", "")])


def sessions(folder, *overrides):
    _find_planted_workers()
    return JobSession(RECIPE, [*PRECISIONS, *overrides], FUNCTION, folder=folder / "work", timeout=1500)


def main(folder, names, *overrides):
    started = [name for name in names if name in STARTED_PLANTS]
    with (folder / "found.jsonl").open("a", encoding="utf-8") as lines:
        for name in started:
            _write(lines, name, run_started_plant, name, folder / name.replace(" ", "-"))
        if names and names == started:
            return
        session = sessions(folder, *(ADAPTER if ADAPTER_PLANTS.keys() & set(names) else ()), *overrides)
        with contextlib.closing(session):
            for name in names or PLANTS:
                _write(lines, name, run_plant, session, name, folder / name.replace(" ", "-"))


def _write(lines, name, run, *arguments):
    began = time.monotonic()
    try:
        content = summary(name, run(*arguments))
    except Exception as error:
        content = {"plant": name, "error": f"{type(error).__name__}: {error}"}
    content["seconds"] = round(time.monotonic() - began)
    print(json.dumps(content), file=lines, flush=True)
    print(json.dumps(content, indent=1), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 and sys.argv[2] else [], *sys.argv[3:])
