"""Hooks that log events from NeMo-RL's loop: stages, metrics, and the losses that its workers called."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.losses import PrestepPass
from nemo_geomask.records.writer import Recorder
from nemo_geomask.tools.rehearse import weight_groups, weight_sums, worker_counts
from nemo_geomask.tools.rehearse.event_log import Events, stage_of

_RAY_TIMEOUT = 60.0  # seconds
_VALIDATION_SEED = 1 << 20
# In this process: policies whose workers train, samplers that get the weights, and recorders of steps.
_policies: weakref.WeakSet[Any] = weakref.WeakSet()
_samplers: weakref.WeakSet[Any] = weakref.WeakSet()
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
# Numbers of the refits after which the weights were compared.
_compared_refits: set[int] = set()
# By engine, the sums of its weights after the last refit.
_sums_before: dict[int, weight_groups.Sums] = {}
# Timer label of the validation that is running; empty outside of a validation.
_validations: list[str] = []
_SYNCHRONIZERS = (
    ("nemo_rl.weight_sync.ipc_weight_synchronizer", "IPCWeightSynchronizer"),
    ("nemo_rl.weight_sync.collective_weight_synchronizer", "CollectiveWeightSynchronizer"),
)
"""Classes whose ``sync_weights`` is a refit; v0.6.0 has none, and refits by ``refit_policy_generation`` alone."""


def patches(
    events: Events,
    *,
    controller: bool = False,
    first_seed: int | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Iterator[patch.Patch]:
    """Yield patches that log what NeMo-RL does in this process; each calls the original.

    Args:
        controller: True if NeMo-RL's single controller, a process of its own, runs the loop; it is patched too.
        first_seed: seed of the samplers' generators at the first batch, one more at each batch, so that a resumed run
            draws the same samples; None: the generators are not seeded.
        after_step: called when a step's metrics have been logged.
    """
    timer = importlib.import_module("nemo_rl.utils.timer").Timer
    logger = importlib.import_module("nemo_rl.utils.logger").Logger
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    sampler = importlib.import_module("nemo_rl.models.generation.vllm").VllmGeneration
    yield _observe(timer, "start", before=functools.partial(_log_timer, events, "begin"))
    yield _observe(timer, "stop", before=functools.partial(_log_timer, events, "end"))
    yield patch.attribute(PrestepPass, "__call__", functools.partial(_log_stage, events, "veto", None))
    log_metrics = functools.partial(_log_metrics, events, after_step)
    begin_metrics = functools.partial(_begin_metrics, events)
    yield _observe(logger, "log_metrics", before=begin_metrics, after=log_metrics)
    yield _observe(Recorder, "record", before=lambda recorder, *args, **kwargs: _recorders.add(recorder))
    for owner, on_success in ((policy, functools.partial(_count_losses, events)), (sampler, _samplers.add)):
        yield patch.attribute(owner, "__init__", functools.partial(_log_stage, events, "workers", on_success))
    yield from _refit_patches(events)
    if first_seed is not None:
        yield _observe(sampler, "generate", before=functools.partial(_seed_sampler, itertools.count(first_seed)))
    if controller:
        controllers = importlib.import_module("nemo_rl.algorithms.single_controller")
        yield patch.attribute(controllers, "SingleControllerActor", functools.partial(_Controller, events))


def _observe(owner: Any, name: str, **hooks: Callable[..., None]) -> patch.Patch:
    return patch.attribute(owner, name, functools.partial(_calling, **hooks))


def _calling(
    original: Callable[..., Any],
    *,
    before: Callable[..., None] = lambda *args, **kwargs: None,
    after: Callable[..., None] = lambda *args, **kwargs: None,
) -> Callable[..., Any]:
    """Wrap a function so that others are called before and after it, with the same arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(*args, **kwargs)
        return result

    return call


def _refit_patches(events: Events) -> Iterator[patch.Patch]:
    algorithms = importlib.import_module("nemo_rl.algorithms.grpo")
    compare = functools.partial(_compare_after_refit, events)
    observed = functools.partial(_calling, after=compare)
    yield patch.function(algorithms, "refit_policy_generation", observed, namespaces=patch.nemo_rl_namespaces())
    for module, name in _SYNCHRONIZERS:
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None:
            yield _observe(getattr(importlib.import_module(module), name), "sync_weights", after=compare)


def _compare_after_refit(events: Events, *args: Any, **kwargs: Any) -> None:
    try:
        _compare_weights(events)
    except Exception as error:  # the rehearsal goes on, and the report says that nothing was compared
        events("weights", error=f"{type(error).__name__}: {error}")


def _compare_weights(events: Events) -> None:
    """Log which groups of weights differ between the training workers and the engines, once for each refit."""
    answers = _call_workers(_policies, weight_sums.read_sent_sums)
    sent = max(answers, key=lambda answer: int(answer["refits"]))
    refits = int(sent["refits"])
    if refits in _compared_refits:
        return  # both are wrapped, and refit_policy_generation calls sync_weights
    _compared_refits.add(refits)
    if not sent["sums"]:
        events("weights", error="this NeMo-RL sends the weights in a way that is not observed", refits=refits)
        return
    trainer = weight_groups.merge_precisions(answer["precision"] for answer in answers)
    compared: set[str] = set()
    unknown: set[str] = set()
    differences: dict[str, weight_groups.Difference] = {}
    engines = list(filter(None, _call_workers(_samplers, weight_sums.engine_sums)))
    for number, processes in enumerate(engines):
        engine = weight_groups.merge_processes([sums for sums, _ in processes])
        of_engine, groups, not_comparable = weight_groups.compare(sent["sums"], engine, _sums_before.get(number))
        differences = {difference.group: difference for difference in of_engine} | differences
        compared.update(groups)
        unknown.update(not_comparable)
        _sums_before[number] = engine
    engine_precision = weight_groups.merge_precisions(each for processes in engines for _, each in processes)
    precision = {"trainer": trainer, "engine": {**engine_precision, "unknown": sorted(unknown)}}
    if engines and not compared:
        dtypes = ", ".join(sorted(set(engine_precision["quantised"].values())))
        error = (
            f"the engine keeps weights in {dtypes}" if dtypes else "trainer and engine have no weight of the same name"
        )
        events("weights", error=error, refits=refits, precision=precision)
        return
    listed = [vars(difference) for difference in differences.values()]
    # In float32, in which a refit that rounds to another dtype shows.
    total = sum(by_dtype["float32"][1] for by_dtype in sent["sums"].values())
    counts = {"refits": refits, "engines": len(engines), "groups": len(compared), "precision": precision}
    events("weights", **counts, differences=listed, sent=f"{total:.12g}")


def _call_workers(
    groups: Any, function: Callable[..., Any], *args: Any, timeout: float | None = _RAY_TIMEOUT
) -> list[Any]:
    """Run a function in the process of each worker of policies or samplers; None waits as long as it takes."""
    workers = [worker for group in groups for worker in group.worker_group.workers]
    calls = [worker.__ray_call__.remote(function, *args) for worker in workers]
    answers: list[Any] = importlib.import_module("ray").get(calls, timeout=timeout)
    return answers


def _read_counts() -> list[dict[str, Any]]:
    """Return the counts of each training worker, and the policy and data-parallel rank whose rows it trains."""
    replicas = []
    for number, policy in enumerate(_policies):
        sharding = getattr(policy.worker_group, "sharding_annotations", None)
        for index in range(len(policy.worker_group.workers)):
            rank = index if sharding is None else sharding.get_worker_coords(index).get("data_parallel", 0)
            replicas.append([number, rank])
    answers = _call_workers(_policies, worker_counts.read_counts)
    return [{**counts, "replica": replica} for counts, replica in zip(answers, replicas, strict=True)]


def stop_workers() -> list[Any]:
    """Undo what was changed in the training workers, and return their policies in this process."""
    _call_workers(_policies, worker_counts.stop_counting)
    _sums_before.clear()
    return list(_policies)


def _seed_sampler(seeds: Iterator[int], sampler: Any, *args: Any, **kwargs: Any) -> None:
    # Validation is not repeated where a run resumes: it must not use up the seeds of the steps.
    seed = _VALIDATION_SEED if _validations else next(seeds)
    _call_workers([sampler], worker_counts.seed, seed, timeout=None)


class _Controller:
    """Stand-in for the class of the single controller's actor: starts the actor and patches its process."""

    def __init__(self, events: Events, actor_class: Any) -> None:
        self._events = events
        self._actor_class = actor_class

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor = self._actor_class.remote(*args, **kwargs)
        importlib.import_module("ray").get(actor.__ray_call__.remote(_patch_actor, self._events))
        return actor


def _patch_actor(actor: Any, events: Events) -> None:
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    sampler = importlib.import_module("nemo_rl.models.generation.vllm").VllmGeneration
    _policies.update(value for value in vars(actor).values() if isinstance(value, policy))
    _samplers.update(value for value in vars(actor).values() if isinstance(value, sampler))
    patch.apply_all(patches(events))


def _log_timer(events: Events, event_type: str, timer: Any, label: str, *args: Any, **kwargs: Any) -> None:
    stage = stage_of(label)
    if stage == "val":
        _validations.append(label) if event_type == "begin" else _validations.clear()
    if stage is not None:
        # A timer that is stopped while an exception propagates belongs to the stage that failed.
        events(event_type, stage=stage, label=label, failed=event_type == "end" and sys.exc_info()[0] is not None)


def _log_stage(
    events: Events, stage: str, on_success: Callable[[Any], None] | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        label = type(self).__name__
        events("begin", stage=stage, label=label)
        try:
            result = original(self, *args, **kwargs)
            if on_success is not None:
                on_success(self)
        except BaseException:
            events("end", stage=stage, label=label, failed=True)
            raise
        events("end", stage=stage, label=label)
        return result

    return call


def _count_losses(events: Events, policy: Any) -> None:
    """Make the workers of a policy count the losses that they call, and sum the weights that they send."""
    _call_workers([policy], worker_counts.count_calls, timeout=None)  # its workers may still load the model
    _policies.add(policy)
    events("worker_counts", step=0, workers=_read_counts())


def _begin_metrics(events: Events, logger: Any, metrics: Any, step: int, prefix: str = "", **kwargs: Any) -> None:
    events("begin", stage="metrics", label=prefix)


def _log_metrics(
    events: Events,
    after_step: Callable[[], None],
    logger: Any,
    metrics: Any,
    step: int,
    prefix: str = "",
    **kwargs: Any,
) -> None:
    events("metrics", step=int(step), prefix=prefix, values=_numeric_metrics(metrics))
    is_step = prefix == "train" and "loss" in metrics
    if is_step:
        # The driver and the single controller end without Python's exit handlers: nothing may be left to write.
        for recorder in list(_recorders):
            recorder.flush()
        events("worker_counts", step=int(step), workers=_read_counts())
    events("end", stage="metrics", label=prefix)
    if is_step:
        after_step()


def _numeric_metrics(metrics: Any) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError):
            continue  # tables and lists
    return numbers
