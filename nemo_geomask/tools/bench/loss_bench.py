"""``bench loss``: our losses and NeMo-RL's with their backward passes, on padded and packed batches and on logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.logprob_cases import IGNORE, LogprobCase, LogprobSample, RandomInputs
from nemo_geomask.tools.bench.loss_cases import (
    LOSSES,
    Data,
    build_nemo_rl_loss,
    draw_batch,
    global_counts,
    loss_gradient,
    pack_batch,
    read_metrics,
    timed,
)
from nemo_geomask.tools.bench.packing_bench import measure_packing
from nemo_geomask.tools.bench.paths import Absent, Setting
from nemo_geomask.tools.bench.paths.path import import_peer
from nemo_geomask.tools.bench.resource_meters import DispatchCounter, count_host_syncs, count_kernel_launches
from nemo_geomask.tools.bench.speed_targets import check_loss
from nemo_geomask.tools.bench.timing import Clock, Lap, describe_error, interleave, summarise
from nemo_geomask.tools.bench.traffic import uneven_offsets

__all__ = ["benchmark"]

_GRAPHS = 64  # of all compiled losses
_COMPILED = ("clipped_pg", "clipped_pg, token weights", "gspo", "gspo, sequence_mean weights, geometric mask")
_MEAN_LENGTH = 2048  # tokens of a sequence in a packed row of logits
_ALONE = "log-probs alone"  # candidate without a loss, with which the others are compared
_FROM_LOGITS = ("gspo", "gspo, sequence_mean weights, geometric mask")


def benchmark(
    setting: Setting, *, rows: int, length: int, case: LogprobCase, compiled: bool, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """Measure every loss on the log-probs of a padded batch, of the same batch packed, and on packed logits.

    Args:
        setting: device and kernel.
        rows: number of sequences in the batch.
        length: length of the longest sequence.
        case: tokens and vocabulary of the logits.
        compiled: also measure some of the losses compiled.
        repeats: number of measured rounds.
        seed: seed of the inputs.

    Raises:
        Absent: pydantic can't be imported, which the losses need.
    """
    import_peer("pydantic")
    clock = Clock(setting.device, preallocated_bytes=4 * case.elements * case.dtype.itemsize)
    if compiled:
        # One process compiles more losses than torch keeps graphs of a function by default.
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    on_logprobs = _on_logprobs(setting, clock, rows, length, _COMPILED if compiled else (), repeats, seed)
    result = {"rows": rows, "length": length, "on_logprobs": on_logprobs}
    result["skewed"] = measure_packing(setting, clock, compiled, repeats, seed)
    result["from_logits"] = _from_logits(setting, clock, case, repeats, seed)
    result["case"] = case.describe()
    result["bars"] = check_loss(result, setting.device.type)
    return result


def _on_logprobs(
    setting: Setting, clock: Clock, rows: int, length: int, compiled: Sequence[str], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Measure our losses on the log-probs of a padded batch, and of the same batch packed; NeMo-RL's on the former."""
    from nemo_geomask.losses import build_loss

    # Lengths are between half of `length` and `length`.
    lengths = torch.randint(length // 2, length, (rows,), generator=torch.Generator().manual_seed(seed))
    curr, data = draw_batch(lengths, length, setting.device, seed)
    counts = global_counts(data)
    steps: dict[tuple[str, str], Callable[[], Tensor]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for name, (config, nemo_rl_config) in LOSSES.items():
        options_by_layout: dict[str, dict[str, Any]] = {"padded": {}}
        if nemo_rl_config is not None:
            options_by_layout["padded, metrics: nemo_rl"] = {"metrics": "nemo_rl"}
        if name in compiled:
            options_by_layout["padded, compiled"] = {"compile": True}
            if nemo_rl_config is not None:
                options_by_layout["padded, compiled, metrics: nemo_rl"] = {"compile": True, "metrics": "nemo_rl"}
        for layout, options in options_by_layout.items():
            steps[name, layout] = _padded_step(build_loss({"compile": False, **config, **options}), curr, data, counts)
        packed_layouts = {"packed": False, "packed, compiled": True} if name in compiled else {"packed": False}
        for layout, is_compiled in packed_layouts.items():
            loss_fn = build_loss({**config, "compile": is_compiled})
            steps[name, layout] = _packed_step(loss_fn, curr, data, lengths.tolist(), counts)
        if nemo_rl_config is not None:
            try:
                steps[name, "NeMo-RL, padded"] = _nemo_rl_step(nemo_rl_config, curr, data, counts)
            except Absent as error:
                reasons[name, "NeMo-RL, padded"] = str(error)
    candidates = {f"{name}|{layout}": timed(clock, step) for (name, layout), step in steps.items()}
    laps, failures = interleave(candidates, repeats, warmup=2)
    results: list[dict[str, Any]] = []
    for name, layout in [*steps, *reasons]:
        row: dict[str, Any] = {"loss": name, "how": layout}
        key = f"{name}|{layout}"
        if key in laps:
            row |= {"status": "measured", **summarise(laps[key], setting.device)}
            row |= _count_launches(steps[name, layout], setting.device)
        elif key in failures:
            row |= {"status": "failed", "reason": failures[key]}
        else:
            row |= {"status": "absent", "reason": reasons[name, layout]}
        results.append(row)
    return results


def _padded_step(loss_fn: Any, curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: loss_gradient(curr, lambda x: read_metrics(loss_fn(x, data, *counts)))


def _packed_step(
    loss_fn: Any, curr: Tensor, data: Data, lengths: Sequence[int], counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Return a step on the packed batch; like training, it builds the segments for every call."""
    flat, packed, offsets = pack_batch(curr, data, lengths)

    def on_packed(x: Tensor) -> Tensor:
        return read_metrics(loss_fn.packed(x, packed, PackedSegments(offsets, device=x.device), *counts))

    return lambda: loss_gradient(flat, on_packed)


def _nemo_rl_step(
    config: dict[str, Any], curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    loss_fn = build_nemo_rl_loss(config)
    batch = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict(data)
    seqs, toks = counts
    return lambda: loss_gradient(
        curr,
        lambda x: loss_fn(next_token_logprobs=x, data=batch, global_valid_seqs=seqs, global_valid_toks=toks)[0],
    )


def _count_launches(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    try:
        if device.type == "cuda":
            return {"launches": count_kernel_launches(step), "host_syncs": count_host_syncs(step)}
        with DispatchCounter() as counter:
            step()
        return {"launches": counter.operations}
    except Exception as error:  # a peer that fails under a meter keeps its times
        return {"meters": describe_error(error)}


def _from_logits(setting: Setting, clock: Clock, case: LogprobCase, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Measure the log-probs of packed logits, alone and followed by each loss."""
    from nemo_geomask.losses import build_loss

    device = setting.device
    inputs = RandomInputs(case, device, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    sequences = max(1, case.tokens // _MEAN_LENGTH)
    offsets = uneven_offsets(case.tokens, sequences, 1)
    lengths = torch.tensor(offsets).diff()
    packed = {
        "advantages": torch.randn(sequences, generator=draw).repeat_interleave(lengths).to(device),
        REFERENCE_POLICY_LOGPROBS: -torch.rand(case.tokens, generator=draw).to(device),
        "sample_mask": torch.ones(sequences, device=device),
    }

    def logprobs(sample: LogprobSample) -> Tensor:
        return vocab_parallel_logprobs(
            sample.logits,
            sample.targets,
            temperature=case.temperature,
            ignore_index=IGNORE,
            kernel=setting.kernel,
        )

    def alone(turn: int) -> Lap:
        sample = inputs.take(turn)
        return clock.lap(
            lambda: logprobs(sample), lambda outputs: torch.autograd.grad(outputs, sample.logits, sample.g)[0]
        )

    def with_loss(loss_fn: Any) -> Callable[[int], Lap]:
        def run(turn: int) -> Lap:
            sample = inputs.take(turn)
            mask = sample.is_trained.float()
            seqs, toks = packed["sample_mask"].sum(), mask.sum()

            def forward() -> Tensor:
                curr = logprobs(sample)
                # A trainer's earlier log-probs are close to the current ones.
                detached = dict.fromkeys((PREV_LOGPROBS, GENERATION_LOGPROBS), curr.detach())
                segments = PackedSegments(offsets, device=device)
                value: Tensor
                value, _ = loss_fn.packed(curr, {**packed, **detached, TOKEN_MASK: mask}, segments, seqs, toks)
                return value

            return clock.lap(forward, lambda value: torch.autograd.grad(value, sample.logits)[0])

        return run

    candidates: dict[str, Callable[[int], Lap]] = {_ALONE: alone}
    candidates |= {name: with_loss(build_loss(LOSSES[name][0])) for name in _FROM_LOGITS}
    laps, failures = interleave(candidates, repeats, before=inputs.refresh, warmup=2)
    if _ALONE in failures:
        return [{"loss": name, "of_logprobs": None, "reason": failures[_ALONE]} for name in _FROM_LOGITS]
    logprob_times = summarise(laps[_ALONE], device, has_backward=True)
    results: list[dict[str, Any]] = []
    for name in _FROM_LOGITS:
        if name in failures:
            results.append({"loss": name, "of_logprobs": None, "reason": failures[name]})
            continue
        loss_times = summarise(laps[name], device, has_backward=True)
        ratio = loss_times["ms"]["median"] / logprob_times["ms"]["median"]
        results.append({"loss": name, "of_logprobs": ratio, "logprobs": logprob_times, **loss_times})
    return results
