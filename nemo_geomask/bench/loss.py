"""``bench loss``: a loss call and its backward pass, padded, packed, beside NeMo-RL's, and from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.bench.bars import check_loss
from nemo_geomask.bench.clock import Clock, Lap, interleave, summary, why
from nemo_geomask.bench.inputs import IGNORE, Case, Inputs, Sample
from nemo_geomask.bench.meters import Tally, host_syncs, kernel_launches
from nemo_geomask.bench.paths.base import Absent, Setting, module
from nemo_geomask.bench.volume import uneven
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

__all__ = ["LOSSES", "benchmark"]

_WEIGHTS = {"use_importance_sampling_correction": True}
_CORRECTED = {**_WEIGHTS, "is_correction_level": "sequence_mean"}
_GEOMETRIC = {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}


def _truncated(kind: str, low: float | None, high: float) -> dict[str, Any]:
    key = "truncated_importance_sampling"
    return {**_WEIGHTS, f"{key}_type": kind, f"{key}_ratio_min": low, f"{key}_ratio": high}


# In NeMo-RL's own fields, for both.
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
# Ours, and the same in NeMo-RL's own fields where it has it.
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
_SKEWED = 64  # sequences, whose lengths are log-normal
_SEQUENCE = 2048  # tokens of a sequence, on average, in a packed row of logits
_FROM_LOGITS = ("gspo", "gspo, sequence_mean weights, geometric mask")
_TOKEN_KEYS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "token_mask")

Data = Mapping[str, Tensor]


def benchmark(
    setting: Setting, *, rows: int, length: int, case: Case, compiled: bool, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """Every loss on log-probs of a padded batch and of the same packed, then from packed logits.

    Args:
        setting: where.
        rows: sequences of the batch.
        length: of the longest.
        case: tokens and vocabulary of the logits.
        compiled: whether to compile some of them too.
        repeats: measured rounds.
        seed: of the inputs.

    Raises:
        Absent: pydantic, which the losses' settings need, can't be imported.
    """
    module("pydantic")
    clock = Clock(setting.device, settle=4 * case.elements * case.dtype.itemsize)
    on_logprobs = _on_logprobs(setting, clock, rows, length, _COMPILED if compiled else (), repeats, seed)
    found = {"rows": rows, "length": length, "on_logprobs": on_logprobs}
    found["skewed"] = _skewed(setting, clock, compiled, repeats, seed)
    found["from_logits"] = _from_logits(setting, clock, case, repeats, seed)
    found["case"] = case.describe()
    found["bars"] = check_loss(found, setting.device.type)
    return found


def _batch(lengths: Tensor, width: int, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """curr [B, T-1] and NeMo-RL's padded data [B, T] of responses of ``lengths`` [B] after one token of prompt."""
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
        "prev_logprobs": prev,
        "generation_logprobs": gen,
        "reference_policy_logprobs": prev + normal(0.1, rows, width),
        "token_mask": mask,
        "sample_mask": torch.ones(rows, dtype=torch.float32),
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
    }
    return curr[:, 1:].contiguous().to(device), {key: value.to(device) for key, value in data.items()}


def _pack(curr: Tensor, data: Data, lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """The responses of a padded batch one after another, without padding; token t beside what it is about."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)

    def rows(values: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])

    packed = {key: rows(data[key][:, 1:]) for key in _TOKEN_KEYS} | {"sample_mask": data["sample_mask"]}
    return rows(curr), packed, offsets


def _counts(data: Data) -> tuple[Tensor, Tensor]:
    return data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()


def _on_logprobs(
    setting: Setting, clock: Clock, rows: int, length: int, compiled: Sequence[str], repeats: int, seed: int
) -> list[dict[str, Any]]:
    from nemo_geomask.losses import build_loss

    # Of 1/2 to all of the length.
    lengths = torch.randint(length // 2, length, (rows,), generator=torch.Generator().manual_seed(seed))
    curr, data = _batch(lengths, length, setting.device, seed)
    counts = _counts(data)
    steps: dict[tuple[str, str], Callable[[], Tensor]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for name, (config, theirs) in LOSSES.items():
        settings: dict[str, dict[str, Any]] = {"padded": {}}
        if theirs is not None:
            settings["padded, metrics: nemo_rl"] = {"metrics": "nemo_rl"}
        if name in compiled:
            settings["padded, compiled"] = {"compile": True}
            if theirs is not None:
                settings["padded, compiled, metrics: nemo_rl"] = {"compile": True, "metrics": "nemo_rl"}
        for how, setting_ in settings.items():
            steps[name, how] = _ours(build_loss({"compile": False, **config, **setting_}), curr, data, counts)
        for how, compile_ in {"packed": False, **({"packed, compiled": True} if name in compiled else {})}.items():
            loss_fn = build_loss({**config, "compile": compile_})
            steps[name, how] = _ours_packed(loss_fn, curr, data, lengths.tolist(), counts)
        if theirs is not None:
            try:
                steps[name, "NeMo-RL, padded"] = _nemo_rl(theirs, curr, data, counts)
            except Absent as error:
                reasons[name, "NeMo-RL, padded"] = str(error)
    candidates = {f"{name}|{how}": _timed(clock, step) for (name, how), step in steps.items()}
    laps, failures = interleave(candidates, repeats, warmup=2)
    results: list[dict[str, Any]] = []
    for name, how in [*steps, *reasons]:
        row: dict[str, Any] = {"loss": name, "how": how}
        key = f"{name}|{how}"
        if key in laps:
            row |= {"status": "measured", **summary(laps[key], ("both", "nothing"), setting.device)}
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


def _read(found: tuple[Tensor, Mapping[str, float]]) -> Tensor:
    """The loss, once the metrics have reached the host as NeMo-RL's do."""
    found[1]["loss"]
    return found[0]


def _ours(loss_fn: Any, curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: _step(curr, lambda x: _read(loss_fn(x, data, *counts)))


def _ours_packed(
    loss_fn: Any, curr: Tensor, data: Data, lengths: Sequence[int], counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """The segments are made anew each time, as for every microbatch."""
    flat, packed, offsets = _pack(curr, data, lengths)

    def on_packed(x: Tensor) -> Tensor:
        return _read(loss_fn.packed(x, packed, PackedSegments(offsets, device=x.device), *counts))

    return lambda: _step(flat, on_packed)


def _skewed(setting: Setting, clock: Clock, compiled: bool, repeats: int, seed: int) -> dict[str, Any]:
    """A packed row of sequences of very different lengths, log-probs given, as NeMo-RL's two wrappers go about it."""
    from nemo_geomask.integrations.nemo_rl.packed import at_once, by_sequence
    from nemo_geomask.losses import build_loss

    draw = torch.Generator().manual_seed(seed)
    lengths = (256 * torch.randn(_SKEWED, dtype=torch.float32, generator=draw).exp()).clamp(16, 4096).long()
    width = int(lengths.max()) + 1
    result: dict[str, Any] = {"sequences": _SKEWED, "tokens": int(lengths.sum()), "longest": width - 1}
    try:
        wrappers = module("nemo_rl.algorithms.loss.wrapper")
        prepare = module("nemo_rl.algorithms.loss.utils").prepare_loss_input
        losses = module("nemo_rl.algorithms.loss.loss_functions")
        batch = module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        theirs = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(), use_fused_linear_logprobs=True)
        ways = wrappers.SequencePackingLossWrapper, wrappers.SequencePackingFusionLossWrapper
    except (Absent, AttributeError, TypeError) as error:  # v0.6.0 and v0.7.0 have not all of it
        return {**result, "ways": [{"way": "all", "status": "absent", "reason": why(error)}]}
    curr, data = _batch(lengths, width, setting.device, seed)
    counts = _counts(data)
    cu = torch.tensor([0, *(lengths + 1).cumsum(0).tolist()], dtype=torch.int32, device=setting.device)
    # Each sequence's last position predicts nothing.
    row = torch.cat([torch.nn.functional.pad(x[:n], (0, 1)) for x, n in zip(curr, lengths.tolist(), strict=True)])

    def given(logits: Tensor, data: Data, **_: Any) -> tuple[dict[str, Tensor], Data]:
        return {"next_token_logprobs": logits}, data

    ours = build_loss({"compile": False}, use_fused_linear_logprobs=True)
    lean = build_loss({"compile": False, "metrics": "nemo_rl"}, use_fused_linear_logprobs=True)
    one, fused = (
        partial(wrapper, prepare_fn=fn, cu_seqlens_q=cu, cu_seqlens_q_padded=cu)
        for wrapper, fn in zip(ways, (prepare, given), strict=True)
    )

    def itself(wrapper: Any, *rest: Any) -> Any:
        return wrapper(*rest)

    def on_row(call: Callable[..., Any], wrapper: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return row, lambda x: call(wrapper, x.unsqueeze(0), batch(data), *counts)

    def on_rows(call: Callable[..., Any], wrapper: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return curr, lambda x: call(wrapper, x, batch(data), *counts)

    calls = {
        "NeMo-RL, one by one": on_row(itself, one(loss_fn=theirs)),
        "ours, one by one": on_row(by_sequence, one(loss_fn=ours)),
        "ours, one by one, metrics: nemo_rl": on_row(by_sequence, one(loss_fn=lean)),
        "NeMo-RL, at once": on_rows(itself, fused(loss_fn=theirs)),
        "ours, at once": on_rows(at_once, fused(loss_fn=ours)),
    }
    if compiled:
        graph = build_loss({"compile": True}, use_fused_linear_logprobs=True)
        calls["ours, at once, compiled"] = on_rows(at_once, fused(loss_fn=graph))
    steps = {way: _timed(clock, partial(_step, x, partial(_called, call))) for way, (x, call) in calls.items()}
    laps, failures = interleave(steps, repeats, warmup=2)
    result["ways"] = [
        {"way": way, "status": "measured", **summary(laps[way], ("both", "nothing"), setting.device)}
        if way in laps
        else {"way": way, "status": "failed", "reason": failures[way]}
        for way in calls
    ]
    return result


def _called(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    return _read(call(x))


def _timed(clock: Clock, step: Callable[[], Tensor]) -> Callable[[int], Lap]:
    return lambda turn: clock.lap(step, lambda _: None)


def _nemo_rl(config: dict[str, Any], curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    losses = module("nemo_rl.algorithms.loss.loss_functions")
    batch = module("nemo_rl.distributed.batched_data_dict").BatchedDataDict(data)
    if hasattr(losses.ClippedPGLossConfig, "model_validate"):
        loss_fn = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**config))
    else:  # v0.6.0: a dict without defaults
        from nemo_geomask.config import LossConfig

        defaults = LossConfig().model_dump()
        fields = losses.ClippedPGLossConfig.__annotations__
        known = {key: defaults[key] for key in fields if key in defaults}
        loss_fn = losses.ClippedPGLossFn({**known, **config})
    seqs, toks = counts
    return lambda: _step(
        curr,
        lambda x: loss_fn(next_token_logprobs=x, data=batch, global_valid_seqs=seqs, global_valid_toks=toks)[0],
    )


def _meter(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    try:
        if device.type == "cuda":
            return {"launches": kernel_launches(step), "host_syncs": host_syncs(step)}
        with Tally() as tally:
            step()
        return {"launches": tally.operations}
    except Exception as error:  # a meter that a peer trips over leaves its times standing
        return {"meters": why(error)}


def _from_logits(setting: Setting, clock: Clock, case: Case, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Log-probs alone, then with each loss on top of them, of the same packed logits."""
    from nemo_geomask.losses import build_loss

    device = setting.device
    inputs = Inputs(case, device, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    sequences = max(1, case.tokens // _SEQUENCE)
    offsets = uneven(case.tokens, sequences, 1)
    lengths = torch.tensor(offsets).diff()
    packed = {
        "advantages": torch.randn(sequences, generator=draw).repeat_interleave(lengths).to(device),
        "reference_policy_logprobs": -torch.rand(case.tokens, generator=draw).to(device),
        "sample_mask": torch.ones(sequences, device=device),
    }

    def logprobs(sample: Sample) -> Tensor:
        return vocab_parallel_logprobs(
            sample.logits,
            sample.targets,
            temperature=case.temperature,
            ignore_index=IGNORE,
            kernel=setting.kernel,
        )

    def alone(turn: int) -> Lap:
        sample = inputs.take(turn)
        return clock.lap(lambda: logprobs(sample), lambda found: torch.autograd.grad(found, sample.logits, sample.g)[0])

    def with_loss(loss_fn: Any) -> Callable[[int], Lap]:
        def run(turn: int) -> Lap:
            sample = inputs.take(turn)
            # As a trainer has them: the log-probs of before lie near these.
            mask = sample.kept.float()
            seqs, toks = packed["sample_mask"].sum(), mask.sum()

            def forward() -> Tensor:
                found = logprobs(sample)
                near = dict.fromkeys(("prev_logprobs", "generation_logprobs"), found.detach())
                segments = PackedSegments(offsets, device=device)
                value: Tensor = loss_fn.packed(found, {**packed, **near, "token_mask": mask}, segments, seqs, toks)[0]
                return value

            return clock.lap(forward, lambda value: torch.autograd.grad(value, sample.logits)[0])

        return run

    candidates: dict[str, Callable[[int], Lap]] = {"": alone}
    candidates |= {name: with_loss(build_loss(LOSSES[name][0])) for name in _FROM_LOGITS}
    laps, failures = interleave(candidates, repeats, before=inputs.refresh, warmup=2)
    if "" in failures:
        return [{"loss": name, "of_logprobs": None, "reason": failures[""]} for name in _FROM_LOGITS]
    base = summary(laps[""], ("forward", "backward"), device)
    results: list[dict[str, Any]] = []
    for name in _FROM_LOGITS:
        if name in failures:
            results.append({"loss": name, "of_logprobs": None, "reason": failures[name]})
            continue
        mine = summary(laps[name], ("forward", "backward"), device)
        ratio = mine["ms"]["median"] / base["ms"]["median"]
        results.append({"loss": name, "of_logprobs": ratio, "logprobs": base, **mine})
    return results
