"""Part of ``bench loss``: NeMo-RL's wrappers of packed rows, which call a loss sequence by sequence or at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.tools.bench.loss_cases import Data, draw_batch, global_counts, loss_gradient, read_metrics, timed
from nemo_geomask.tools.bench.paths import Absent, Setting
from nemo_geomask.tools.bench.paths.path import import_peer
from nemo_geomask.tools.bench.timing import Clock, describe_error, interleave, summarise

__all__ = ["measure_packing"]

_SEQUENCES = 64  # with log-normal lengths


def measure_packing(setting: Setting, clock: Clock, compiled: bool, repeats: int, seed: int) -> dict[str, Any]:
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

    ours = build_loss({"compile": False}, use_fused_linear_logprobs=True)
    ours_nemo_rl_metrics = build_loss({"compile": False, "metrics": "nemo_rl"}, use_fused_linear_logprobs=True)
    by_sequence, fused = (
        partial(wrapper, prepare_fn=fn, cu_seqlens_q=cu, cu_seqlens_q_padded=cu)
        for wrapper, fn in zip(ways, (prepare, use_logprobs), strict=True)
    )

    def call_wrapper(wrapper: Any, *arguments: Any) -> Any:  # NeMo-RL's way; loss_by_sequence and loss_at_once are ours
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
    steps = {
        way: timed(clock, partial(loss_gradient, x, partial(_loss_value, call))) for way, (x, call) in calls.items()
    }
    laps, failures = interleave(steps, repeats, warmup=2)
    result["ways"] = [
        {"way": way, "status": "measured", **summarise(laps[way], setting.device)}
        if way in laps
        else {"way": way, "status": "failed", "reason": failures[way]}
        for way in calls
    ]
    return result


def _loss_value(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    return read_metrics(call(x))
