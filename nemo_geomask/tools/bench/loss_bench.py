"""``bench loss``: our losses and NeMo-RL's with their backward passes, on padded and packed batches and on logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.logprob_cases import IGNORE, Inputs, LogprobCase, LogprobSample
from nemo_geomask.tools.bench.paths.path import Absent, Setting, import_peer
from nemo_geomask.tools.bench.resource_meters import DispatchCounter, count_host_syncs, count_kernel_launches
from nemo_geomask.tools.bench.speed_targets import check_loss
from nemo_geomask.tools.bench.timing import Clock, Lap, describe_error, interleave, summarise
from nemo_geomask.tools.bench.traffic import uneven_offsets

__all__ = ["LOSSES", "benchmark"]

_WEIGHTS = {"use_importance_sampling_correction": True}
_CORRECTED = {**_WEIGHTS, "is_correction_level": "sequence_mean"}
_GEOMETRIC = {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}


def _truncated(truncation: str, low: float | None, high: float) -> dict[str, Any]:
    key = "truncated_importance_sampling"
    return {**_WEIGHTS, f"{key}_type": truncation, f"{key}_ratio_min": low, f"{key}_ratio": high}


# Settings that mean the same for our clipped_pg and for NeMo-RL's class.
_EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "clipped_pg": {},
    "clipped_pg, no KL": {"reference_policy_kl_penalty": 0.0},
    "clipped_pg, dual clip": {"ratio_clip_c": 3.0},
    "clipped_pg, token weights": _WEIGHTS,
    "clipped_pg, tis": _truncated("tis", None, 2.0),
    "clipped_pg, icepop": _truncated("icepop", 0.5, 5.0),
    "clipped_pg, seq-mask-tis": _truncated("seq-mask-tis", 0.999, 1.002),
    "clipped_pg, by sequences": {"token_level_loss": False},
    "clipped_pg, use_cispo": {"use_cispo": True},
    "clipped_pg, disable_ppo_ratio": {"disable_ppo_ratio": True},
    "clipped_pg, force_on_policy_ratio": {"force_on_policy_ratio": True},
}
# For each loss, the settings of ours and those of NeMo-RL's class; None if NeMo-RL's class can't compute the loss.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    **{name: (config, config) for name, config in _EXPRESSIBLE.items()},
    "gspo": ({"name": "gspo"}, {"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "gspo, sequence_mean weights, geometric mask": ({"name": "gspo", **_CORRECTED, **_GEOMETRIC}, None),
    "gspo_token": ({"name": "gspo_token"}, None),
    "gmpo": ({"name": "gmpo"}, None),
    "cispo": ({"name": "cispo"}, None),
    "sapo": ({"name": "sapo"}, None),
}
_COMPILED = ("clipped_pg", "clipped_pg, token weights", "gspo", "gspo, sequence_mean weights, geometric mask")
_SKEWED_SEQUENCES = 64  # with log-normal lengths
_MEAN_LENGTH = 2048  # tokens of a sequence in a packed row of logits
_FROM_LOGITS = ("gspo", "gspo, sequence_mean weights, geometric mask")
_TOKEN_KEYS = ("advantages", PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK)

Data = Mapping[str, Tensor]


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
    on_logprobs = _on_logprobs(setting, clock, rows, length, _COMPILED if compiled else (), repeats, seed)
    result = {"rows": rows, "length": length, "on_logprobs": on_logprobs}
    result["skewed"] = _skewed(setting, clock, compiled, repeats, seed)
    result["from_logits"] = _from_logits(setting, clock, case, repeats, seed)
    result["case"] = case.describe()
    result["bars"] = check_loss(result, setting.device.type)
    return result


def _batch(lengths: Tensor, width: int, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw a padded batch: a prompt token and a response of ``lengths`` [B]; return ``curr`` [B, T-1] and the data."""
    rows, draw = len(lengths), torch.Generator().manual_seed(seed)

    def normal(size: float, *shape: int) -> Tensor:
        return size * torch.randn(*shape, dtype=torch.float32, generator=draw)

    gen = -2 * torch.rand(rows, width, dtype=torch.float32, generator=draw)
    prev = gen + normal(0.02, rows, width)
    curr = prev + normal(0.02, rows, width)
    mask = (torch.arange(width) <= lengths.unsqueeze(1)).to(torch.float32)
    mask[:, 0] = 0.0
    data = {
        "advantages": normal(1.0, rows, 1).expand(rows, width).contiguous(),
        PREV_LOGPROBS: prev,
        GENERATION_LOGPROBS: gen,
        REFERENCE_POLICY_LOGPROBS: prev + normal(0.1, rows, width),
        TOKEN_MASK: mask,
        "sample_mask": torch.ones(rows, dtype=torch.float32),
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
    }
    return curr[:, 1:].contiguous().to(device), {key: value.to(device) for key, value in data.items()}


def _pack(curr: Tensor, data: Data, lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Pack a padded batch without padding; return its log-probs, its data and the offsets of its sequences."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)

    def rows(values: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])

    packed = {key: rows(data[key][:, 1:]) for key in _TOKEN_KEYS} | {"sample_mask": data["sample_mask"]}
    return rows(curr), packed, offsets


def _counts(data: Data) -> tuple[Tensor, Tensor]:
    return data["sample_mask"].sum(), (data[TOKEN_MASK][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()


def _on_logprobs(
    setting: Setting, clock: Clock, rows: int, length: int, compiled: Sequence[str], repeats: int, seed: int
) -> list[dict[str, Any]]:
    from nemo_geomask.losses import build_loss

    # Lengths are between half of `length` and `length`.
    lengths = torch.randint(length // 2, length, (rows,), generator=torch.Generator().manual_seed(seed))
    curr, data = _batch(lengths, length, setting.device, seed)
    counts = _counts(data)
    steps: dict[tuple[str, str], Callable[[], Tensor]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for name, (config, nemo_rl_config) in LOSSES.items():
        layouts: dict[str, dict[str, Any]] = {"padded": {}}
        if nemo_rl_config is not None:
            layouts["padded, metrics: nemo_rl"] = {"metrics": "nemo_rl"}
        if name in compiled:
            layouts["padded, compiled"] = {"compile": True}
            if nemo_rl_config is not None:
                layouts["padded, compiled, metrics: nemo_rl"] = {"compile": True, "metrics": "nemo_rl"}
        for how, options in layouts.items():
            steps[name, how] = _ours(build_loss({"compile": False, **config, **options}), curr, data, counts)
        for how, is_compiled in {"packed": False, **({"packed, compiled": True} if name in compiled else {})}.items():
            loss_fn = build_loss({**config, "compile": is_compiled})
            steps[name, how] = _ours_packed(loss_fn, curr, data, lengths.tolist(), counts)
        if nemo_rl_config is not None:
            try:
                steps[name, "NeMo-RL, padded"] = _nemo_rl(nemo_rl_config, curr, data, counts)
            except Absent as error:
                reasons[name, "NeMo-RL, padded"] = str(error)
    candidates = {f"{name}|{how}": _timed(clock, step) for (name, how), step in steps.items()}
    laps, failures = interleave(candidates, repeats, warmup=2)
    results: list[dict[str, Any]] = []
    for name, how in [*steps, *reasons]:
        row: dict[str, Any] = {"loss": name, "how": how}
        key = f"{name}|{how}"
        if key in laps:
            row |= {"status": "measured", **summarise(laps[key], ("both", "nothing"), setting.device)}
            row |= _meter(steps[name, how], setting.device)
        elif key in failures:
            row |= {"status": "failed", "reason": failures[key]}
        else:
            row |= {"status": "absent", "reason": reasons[name, how]}
        results.append(row)
    return results


def _step(values: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = values.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def _read_metrics(outputs: tuple[Tensor, Mapping[str, float]]) -> Tensor:
    """Return the loss after copying the metrics to the host, as NeMo-RL's loss does in every call."""
    loss, metrics = outputs
    metrics["loss"]
    return loss


def _ours(loss_fn: Any, curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: _step(curr, lambda x: _read_metrics(loss_fn(x, data, *counts)))


def _ours_packed(
    loss_fn: Any, curr: Tensor, data: Data, lengths: Sequence[int], counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Return a step on the packed batch; like training, it builds the segments for every call."""
    flat, packed, offsets = _pack(curr, data, lengths)

    def on_packed(x: Tensor) -> Tensor:
        return _read_metrics(loss_fn.packed(x, packed, PackedSegments(offsets, device=x.device), *counts))

    return lambda: _step(flat, on_packed)


def _skewed(setting: Setting, clock: Clock, compiled: bool, repeats: int, seed: int) -> dict[str, Any]:
    """Measure NeMo-RL's two packing wrappers and our replacements on sequences of very different lengths."""
    from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE
    from nemo_geomask.hosts.nemo_rl.packed_microbatch import loss_at_once, loss_by_sequence
    from nemo_geomask.losses import build_loss

    draw = torch.Generator().manual_seed(seed)
    lengths = (256 * torch.randn(_SKEWED_SEQUENCES, dtype=torch.float32, generator=draw).exp()).clamp(16, 4096).long()
    width = int(lengths.max()) + 1
    result: dict[str, Any] = {"sequences": _SKEWED_SEQUENCES, "tokens": int(lengths.sum()), "longest": width - 1}
    try:
        wrappers = import_peer("nemo_rl.algorithms.loss.wrapper")
        prepare = import_peer("nemo_rl.algorithms.loss.utils").prepare_loss_input
        losses = import_peer(LOSS_MODULE)
        batch = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        theirs = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(), use_fused_linear_logprobs=True)
        ways = wrappers.SequencePackingLossWrapper, wrappers.SequencePackingFusionLossWrapper
    except (Absent, AttributeError, TypeError) as error:  # v0.6.0 and v0.7.0 lack some of these names
        return {**result, "ways": [{"way": "all", "status": "absent", "reason": describe_error(error)}]}
    curr, data = _batch(lengths, width, setting.device, seed)
    counts = _counts(data)
    cu = torch.tensor([0, *(lengths + 1).cumsum(0).tolist()], dtype=torch.int32, device=setting.device)
    # The last position of each sequence predicts no token.
    row = torch.cat([torch.nn.functional.pad(x[:n], (0, 1)) for x, n in zip(curr, lengths.tolist(), strict=True)])

    def use_logprobs(logits: Tensor, data: Data, **_: Any) -> tuple[dict[str, Tensor], Data]:
        return {"next_token_logprobs": logits}, data

    ours = build_loss({"compile": False}, use_fused_linear_logprobs=True)
    ours_nemo_rl_metrics = build_loss({"compile": False, "metrics": "nemo_rl"}, use_fused_linear_logprobs=True)
    by_sequence, fused = (
        partial(wrapper, prepare_fn=fn, cu_seqlens_q=cu, cu_seqlens_q_padded=cu)
        for wrapper, fn in zip(ways, (prepare, use_logprobs), strict=True)
    )

    def call_wrapper(wrapper: Any, *arguments: Any) -> Any:
        return wrapper(*arguments)

    def on_row(call: Callable[..., Any], wrapper: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return row, lambda x: call(wrapper, x.unsqueeze(0), batch(data), *counts)

    def on_rows(call: Callable[..., Any], wrapper: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return curr, lambda x: call(wrapper, x, batch(data), *counts)

    calls = {
        "NeMo-RL, one by one": on_row(call_wrapper, by_sequence(loss_fn=theirs)),
        "ours, one by one": on_row(loss_by_sequence, by_sequence(loss_fn=ours)),
        "ours, one by one, metrics: nemo_rl": on_row(loss_by_sequence, by_sequence(loss_fn=ours_nemo_rl_metrics)),
        "NeMo-RL, at once": on_rows(call_wrapper, fused(loss_fn=theirs)),
        "ours, at once": on_rows(loss_at_once, fused(loss_fn=ours)),
    }
    if compiled:
        compiled_loss = build_loss({"compile": True}, use_fused_linear_logprobs=True)
        calls["ours, at once, compiled"] = on_rows(loss_at_once, fused(loss_fn=compiled_loss))
    steps = {way: _timed(clock, partial(_step, x, partial(_called, call))) for way, (x, call) in calls.items()}
    laps, failures = interleave(steps, repeats, warmup=2)
    result["ways"] = [
        {"way": way, "status": "measured", **summarise(laps[way], ("both", "nothing"), setting.device)}
        if way in laps
        else {"way": way, "status": "failed", "reason": failures[way]}
        for way in calls
    ]
    return result


def _called(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    return _read_metrics(call(x))


def _timed(clock: Clock, step: Callable[[], Tensor]) -> Callable[[int], Lap]:
    return lambda turn: clock.lap(step, lambda _: None)


def _nemo_rl(config: dict[str, Any], curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE, build_loss_config

    losses = import_peer(LOSS_MODULE)
    batch = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict(data)
    loss_fn = losses.ClippedPGLossFn(build_loss_config(losses.ClippedPGLossConfig, config))
    seqs, toks = counts
    return lambda: _step(
        curr,
        lambda x: loss_fn(next_token_logprobs=x, data=batch, global_valid_seqs=seqs, global_valid_toks=toks)[0],
    )


def _meter(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
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
    inputs = Inputs(case, device, seed=seed)
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

    candidates: dict[str, Callable[[int], Lap]] = {"": alone}
    candidates |= {name: with_loss(build_loss(LOSSES[name][0])) for name in _FROM_LOGITS}
    laps, failures = interleave(candidates, repeats, before=inputs.refresh, warmup=2)
    if "" in failures:
        return [{"loss": name, "of_logprobs": None, "reason": failures[""]} for name in _FROM_LOGITS]
    logprob_times = summarise(laps[""], ("forward", "backward"), device)
    results: list[dict[str, Any]] = []
    for name in _FROM_LOGITS:
        if name in failures:
            results.append({"loss": name, "of_logprobs": None, "reason": failures[name]})
            continue
        loss_times = summarise(laps[name], ("forward", "backward"), device)
        ratio = loss_times["ms"]["median"] / logprob_times["ms"]["median"]
        results.append({"loss": name, "of_logprobs": ratio, "logprobs": logprob_times, **loss_times})
    return results
