"""Conditions on the weights: trained, sent to the engine, held there as they were sent, and in the precision asked for.

See :mod:`~nemo_geomask.tools.rehearse.gate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_geomask.tools.rehearse.run_outcome import RunFailure, RunResult
from nemo_geomask.tools.rehearse.weight_groups import KEPT, layer_of
from nemo_geomask.tools.shared.terminal_tables import count_with_noun

_GROWTH = 2.5  # of noise_by_step; 17 healthy runs: up to 1.5; with a stale cache, dense and a mixture: 22 and 20
_SIDES = (("engine", "trainer"), ("trainer", "engine"))
"""Each side of a refit, and the other one."""
_QUANTISED = ("fp8", "nvfp4")
_PRECISION_KEYS = (
    "policy.precision, policy.quant_cfg",
    "policy.generation.vllm_cfg.precision, policy.generation.quant_cfg",
)
_QUANTISE = "quantise the same weights on both sides or on none, or name the precision there"


def weights_were_trained(run: RunResult) -> Iterator[RunFailure]:
    """Require that at least one step changed the trainer's weights."""
    sums = [_weights(proof) for proof in run.worker_counts]
    if len(sums) > 1 and all(each == sums[0] and None not in each for each in sums):
        message = f"no weight of the trainer has changed in {len(sums) - 1} steps"
        fix = "the learning rate is 0 throughout, or all gradients are: see grad_norm, the scheduler and the masks"
        yield RunFailure("step", message, "policy.optimizer, policy.scheduler", fix)


def _weights(proof: Mapping[str, Any]) -> list[Any]:
    return [worker.get("weights") for worker in proof["workers"]]


def weights_reached_the_engine(run: RunResult) -> Iterator[RunFailure]:
    """Require that the engine holds the trainer's weights after each refit, and that each step's weights are sent."""
    comparisons = [event for event in run.events if event["kind"] == "weights" and "differences" in event]
    stale = [event for event in comparisons if event["differences"]]
    key = "policy.generation"
    if stale:
        first = stale[0]
        groups = [_with_reason(each, first.get("precision", {})) for each in first["differences"]]
        is_rounded = all("rounded" in each for each in groups)
        largest = max(float(each["size"]) for each in first["differences"])
        message = (
            f"after refit {first['refits']} the engine does not hold the trainer's weights: {len(groups)} of "
            f"{first['groups']} groups differ ({list_names(groups)}), by up to {largest:.1e} of their size"
        )
        earlier = sum(event["refits"] < first["refits"] for event in comparisons)
        if earlier:
            message += f"; they were the same after {count_with_noun(earlier, 'refit')} before"
        fix = "the sampler keeps old weights: every process of the engine must load every update, for all layers"
        yield RunFailure("refit", message, *((_PRECISION_KEYS[1], _QUANTISE) if is_rounded else (key, fix)))
    worker_counts = run.worker_counts
    for earlier_proof, proof, later in zip(worker_counts, worker_counts[1:], worker_counts[2:], strict=False):
        if _weights(earlier_proof) != _weights(proof) and _refits(proof) == _refits(later):
            message = f"the weights of step {proof['step']} were not sent to the engine before the end of the next step"
            yield RunFailure("refit", message, key, "the sampler keeps old weights: NeMo-RL did not refit")
            return


def _refits(proof: Mapping[str, Any]) -> int:
    return max((int(worker.get("refits", 0)) for worker in proof["workers"]), default=0)


def _with_reason(difference: Mapping[str, Any], precision: Mapping[str, Any]) -> str:
    """Return a group that differs, with what is known of it."""
    group = str(difference["group"])
    bits = {
        side: {part: each for part, each in kinds["rounded"].items() if part == group or part.startswith(f"{group}.")}
        for side, kinds in precision.items()
    }
    alone = [
        f"rounded to {each} in the {side} alone" + (f", {part}" if part != group else "")
        for side, other in _SIDES
        for part, each in bits.get(side, {}).items()
        if part not in bits[other]
    ]
    why = next(iter(alone), difference.get("why", ""))
    return f"{group}: {why}" if why else group


def list_names(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def precision_is_as_asked(run: RunResult) -> Iterator[RunFailure]:
    """Require that a side has quantised weights only if the recipe asks for it, and all its routers in one dtype."""
    for side, asked, key in zip(("trainer", "engine"), run.precisions, _PRECISION_KEYS, strict=True):
        kinds = run.weight_precision.get(side, {})
        if (quantised := kinds.get("quantised")) and asked not in _QUANTISED:
            dtypes = ", ".join(sorted(set(quantised.values())))
            message = f"the {side} has quantised {list_names(list(quantised))} ({dtypes}), and the recipe says {asked}"
            yield RunFailure("refit", message, key, _QUANTISE)
        by_dtype: dict[str, list[str]] = {}
        for group, dtype in kinds.get("routers", {}).items():
            by_dtype.setdefault(dtype, []).append(group)
        if len(by_dtype) > 1:
            dtype, odd = min(by_dtype.items(), key=lambda item: len(item[1]))
            message = f"the {side} has the routers {list_names(odd)} in another precision, {dtype}, than its others"
            yield RunFailure(
                "refit", message, key, "a router in another precision chooses other experts: use one dtype"
            )


def precision_notes(precision: Mapping[str, Any]) -> Iterator[str]:
    """Yield what only one side has quantised, and what the routers compute in if that is not the same."""
    if not precision:
        return
    quantised = {side: kinds["quantised"] for side, kinds in precision.items()}
    layers = {side: {layer_of(group) for group in groups} for side, groups in quantised.items()}
    for side, other in _SIDES:
        if alone := [group for group in quantised[side] if layer_of(group) not in layers[other]]:
            dtypes = ", ".join(sorted({quantised[side][group] for group in alone}))
            yield f"quantised in the {side} only: {list_names(alone)} ({dtypes})"
    if unknown := precision["engine"].get("unknown"):
        yield f"quantised in a layout that can't be summed, and not compared: {list_names(unknown)}"
    routers = {side: ", ".join(sorted(set(kinds["routers"].values()))) for side, kinds in precision.items()}
    # A trainer casts its weights, as FSDP does, or names the dtype of its routers, as Megatron does.
    if all(routers.values()) and routers["trainer"] != routers["engine"] and KEPT not in routers["trainer"]:
        yield f"routers compute in {routers['trainer']} in the trainer; in the engine: {routers['engine']}"


def caches_are_reset(run: RunResult) -> Iterator[RunFailure]:
    """Require that the noise stays as it was at first in all sequences, while the engine has the right weights."""
    mismatch = run.mismatch
    noise = {} if mismatch is None else dict(sorted(mismatch.noise_by_step.items()))
    comparisons = [event["differences"] for event in run.events if "differences" in event]
    if mismatch is None or not noise or not comparisons or any(comparisons):
        return
    first = min(noise)
    step = next((step for step in noise if noise[step] > max(_GROWTH * noise[first], mismatch.limits.noise / 3)), None)
    if step is not None:
        message = (
            f"the noise of the worst sequences of step {step}, {noise[step]:.2g}, is "
            f"{noise[step] / max(noise[first], 1e-12):.0f} times that of step {first}'s, though the engine holds the "
            "trainer's weights: it still uses what it computed with older ones"
        )
        fix = "reset the prefix cache after each refit (grpo.async_grpo.recompute_kv_cache_after_weight_updates)"
        yield RunFailure("refit", message, "policy.generation.vllm_cfg.enable_prefix_caching", fix)
