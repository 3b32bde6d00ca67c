"""``loss``: as ``bench loss``, and NeMo-RL's wrappers of packed rows, and losses from logits beside log-probs alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench import loss
from nemo_geomask.tools.bench.logprob_paths import IGNORE
from nemo_geomask.tools.bench.loss import LOSSES, Data, draw_batch, global_counts, loss_gradient, read_metrics
from nemo_geomask.tools.bench.peers import Absent, Setting, import_peer
from nemo_geomask.tools.bench.timing import Clock, Lap, compare, describe_error
from tests.benchmarks.collectives import uneven_offsets
from tests.benchmarks.logit_paths import LogitCase, LogitSample
from tests.benchmarks.logits import Inputs

_SEQUENCES = 64  # of a packed row, with log-normal lengths
_MEAN_LENGTH = 2048  # tokens of a sequence in a packed row of logits
_ALONE = "log-probs alone"
_FROM_LOGITS = ("gspo", "gspo, sequence_mean weights, geometric mask")


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    result = loss.run(options, setting)
    case = LogitCase(8192 if setting.device.type == "cuda" else 256, 0, 151_936)
    return {
        **result,
        "skewed": measure_packing(setting, options.compile, options.repeats, options.seed),
        "from_logits": measure_from_logits(setting, case, options.repeats, options.seed),
        "case": case.describe(),
    }


def measure_packing(setting: Setting, compiled: bool, repeats: int, seed: int) -> dict[str, Any]:
    """Measure NeMo-RL's two packing wrappers and our replacements on sequences of very different lengths."""
    from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE
    from nemo_geomask.hosts.nemo_rl.packed_microbatch import loss_at_once, loss_by_sequence
    from nemo_geomask.losses import build_loss

    draw = torch.Generator().manual_seed(seed)
    lengths = (256 * torch.randn(_SEQUENCES, dtype=torch.float32, generator=draw).exp()).clamp(16, 4096).long()
    width = int(lengths.max()) + 1
    result: dict[str, Any] = {"sequences": _SEQUENCES, "tokens": int(lengths.sum()), "longest": width - 1}
    try:
        wrappers = import_peer("nemo_rl.algorithms.loss.wrapper")
        prepare = import_peer("nemo_rl.algorithms.loss.utils").prepare_loss_input
        losses = import_peer(LOSS_MODULE)
        batch = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        theirs = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(), use_fused_linear_logprobs=True)
        ways = wrappers.SequencePackingLossWrapper, wrappers.SequencePackingFusionLossWrapper
    except (Absent, AttributeError, TypeError) as error:  # v0.6.0 and v0.7.0 lack some of these names
        return {**result, "ways": [{"way": "all", "status": "absent", "reason": describe_error(error)}]}
    curr, data = draw_batch(lengths, width, setting.device, seed)
    counts = global_counts(data)
    cu = torch.tensor([0, *(lengths + 1).cumsum(0).tolist()], dtype=torch.int32, device=setting.device)
    # The last position of each sequence predicts no token.
    row = torch.cat([torch.nn.functional.pad(x[:n], (0, 1)) for x, n in zip(curr, lengths.tolist(), strict=True)])

    def use_logprobs(logits: Tensor, data: Data, **_: Any) -> tuple[dict[str, Tensor], Data]:
        return {"next_token_logprobs": logits}, data

    by_sequence, fused = (
        partial(wrapper, prepare_fn=fn, cu_seqlens_q=cu, cu_seqlens_q_padded=cu)
        for wrapper, fn in zip(ways, (prepare, use_logprobs), strict=True)
    )

    def ours(**config: Any) -> Any:
        return build_loss({"compile": False, **config}, use_fused_linear_logprobs=True)

    def on_row(call: Callable[..., Any], loss_fn: Any) -> Callable[[], Tensor]:
        wrapper = by_sequence(loss_fn=loss_fn)
        return lambda: loss_gradient(row, lambda x: read_metrics(call(wrapper, x[None], batch(data), *counts)))

    def on_rows(call: Callable[..., Any], loss_fn: Any) -> Callable[[], Tensor]:
        wrapper = fused(loss_fn=loss_fn)
        return lambda: loss_gradient(curr, lambda x: read_metrics(call(wrapper, x, batch(data), *counts)))

    def call_wrapper(wrapper: Any, *arguments: Any) -> Any:  # NeMo-RL's way; loss_by_sequence and loss_at_once are ours
        return wrapper(*arguments)

    steps = {
        "NeMo-RL, one by one": on_row(call_wrapper, theirs),
        "ours, one by one": on_row(loss_by_sequence, ours()),
        "ours, one by one, metrics: nemo_rl": on_row(loss_by_sequence, ours(metrics="nemo_rl")),
        "NeMo-RL, at once": on_rows(call_wrapper, theirs),
        "ours, at once": on_rows(loss_at_once, ours()),
    }
    if compiled:
        steps["ours, at once, compiled"] = on_rows(loss_at_once, ours(compile=True))
    clock = Clock(setting.device)
    rows = compare({way: lambda turn, step=step: clock.lap(step) for way, step in steps.items()}, repeats, warmup=2)
    return {**result, "ways": [{"way": way, **row} for way, row in rows.items()]}


def measure_from_logits(setting: Setting, case: LogitCase, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Measure the log-probs of packed logits, alone and followed by each loss."""
    from nemo_geomask.losses import build_loss

    device, draw = setting.device, torch.Generator().manual_seed(seed)
    inputs = Inputs(case, device, seed=seed)
    clock = Clock(device, preallocated_bytes=4 * case.logits_bytes)
    sequences = max(1, case.tokens // _MEAN_LENGTH)
    offsets = uneven_offsets(case.tokens, sequences, 1)
    packed = {
        "advantages": torch.randn(sequences, generator=draw).repeat_interleave(torch.tensor(offsets).diff()).to(device),
        REFERENCE_POLICY_LOGPROBS: -torch.rand(case.tokens, generator=draw).to(device),
        "sample_mask": torch.ones(sequences, device=device),
    }

    def logprobs(sample: LogitSample) -> Tensor:
        return vocab_parallel_logprobs(sample.logits, sample.targets, ignore_index=IGNORE)

    def alone(turn: int) -> Lap:
        sample = inputs.take(turn)
        return clock.lap(lambda: logprobs(sample), lambda out: torch.autograd.grad(out, sample.logits, sample.g)[0])

    def with_loss(loss_fn: Any, turn: int) -> Lap:
        sample = inputs.take(turn)
        mask = sample.is_trained.float()
        seqs, toks = packed["sample_mask"].sum(), mask.sum()

        def forward() -> Tensor:
            curr = logprobs(sample)
            # A trainer's earlier log-probs are close to the current ones.
            detached = dict.fromkeys((PREV_LOGPROBS, GENERATION_LOGPROBS), curr.detach())
            segments = PackedSegments(offsets, device=device)
            return loss_fn.packed(curr, {**packed, **detached, TOKEN_MASK: mask}, segments, seqs, toks)[0]

        return clock.lap(forward, lambda value: torch.autograd.grad(value, sample.logits)[0])

    candidates = {name: partial(with_loss, build_loss(LOSSES[name][0])) for name in _FROM_LOGITS}
    rows = compare({_ALONE: alone, **candidates}, repeats, before=inputs.refresh, warmup=2)
    pass_alone = rows.pop(_ALONE)
    results = []
    for name, row in rows.items():
        reason = row.get("reason") or pass_alone.get("reason")
        ratio = None if reason else row["ms"]["median"] / pass_alone["ms"]["median"]
        results.append({"loss": name, "of_logprobs": ratio, "logprobs": pass_alone, **row})
    return results
