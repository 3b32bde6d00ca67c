"""Peers written in torch operations: torch itself, NeMo-RL, Megatron-core, verl."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from nemo_geomask.bench.inputs import IGNORE, Answer, Case, Sample
from nemo_geomask.bench.paths.base import (
    Absent,
    Path,
    Setting,
    Start,
    Unfit,
    by_autograd,
    module,
    scaled,
    without_entropy,
)

__all__ = ["CHUNK", "PATHS"]

CHUNK = 256  # tokens at a time in NeMo-RL's chunked paths


def _cross_entropy(case: Case, setting: Setting, *, upcast: bool) -> Start:
    without_entropy(case.entropy)
    _refuse_shards(setting)

    def start(sample: Sample) -> Answer:
        logits = scaled(sample, case)
        loss = torch.nn.functional.cross_entropy(
            logits.float() if upcast else logits, sample.targets, reduction="none", ignore_index=IGNORE
        )
        return by_autograd(sample.logits, -loss)

    return start


def _log_softmax(case: Case, setting: Setting) -> Start:
    _refuse_shards(setting)

    def start(sample: Sample) -> Answer:
        z = sample.logits.float()
        logp = torch.log_softmax(z if case.temperature == 1 else z / case.temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return by_autograd(sample.logits, logp.gather(1, sample.labels.unsqueeze(1)).squeeze(1), entropy)

    return start


def _refuse_shards(setting: Setting) -> None:
    if setting.group is not None:
        raise Unfit("takes no shards")


def _nemo_rl(case: Case, setting: Setting, *, chunked: bool) -> Start:
    functions = module("nemo_rl.distributed.model_utils")
    if case.entropy and not chunked:
        raise Unfit("has no entropy beside it")
    group = setting.required_group()
    first = setting.rank * case.width

    def start(sample: Sample) -> Answer:
        logits = scaled(sample, case).unsqueeze(0)
        labels = sample.labels.unsqueeze(0)
        if chunked:
            logp = functions.ChunkedDistributedLogprob.apply(
                logits, labels, first, first + case.width, CHUNK, group, False
            )
        else:
            logp = functions.DistributedLogprob.apply(logits.float(), labels, first, first + case.width, group, False)
        entropy = None
        if case.entropy:
            # Its value is Σ p·log p, the negative.
            entropy = -functions.ChunkedDistributedEntropy.apply(logits, CHUNK, group, False).squeeze(0)
        return by_autograd(sample.logits, logp.squeeze(0), entropy)

    return start


def _megatron(case: Case, setting: Setting, *, fused: bool) -> Start:
    without_entropy(case.entropy)
    name = "fused_vocab_parallel_cross_entropy" if fused else "vocab_parallel_cross_entropy"
    where = "megatron.core.fusions.fused_cross_entropy" if fused else "megatron.core.tensor_parallel.cross_entropy"
    function = getattr(module(where), name)
    group = setting.required_group()
    options: dict[str, Any] = {"tp_group": group}
    if "tp_group" not in inspect.signature(function).parameters:
        _initialise(module("megatron.core.parallel_state"), group.size())
        options = {}

    def start(sample: Sample) -> Answer:
        loss = function(scaled(sample, case).unsqueeze(1), sample.labels.unsqueeze(1), **options)
        return by_autograd(sample.logits, -loss.squeeze(1))

    return start


def _initialise(state: Any, size: int) -> None:
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=size)


def _verl(case: Case, setting: Setting) -> Start:
    without_entropy(case.entropy)
    _refuse_shards(setting)
    functions = module("verl.utils.torch_functional")
    fast = functions.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    if fast and setting.device.type != "cuda":
        raise Absent("it would call flash-attn, which needs a GPU")

    def start(sample: Sample) -> Answer:
        logits = scaled(sample, case)
        return by_autograd(sample.logits, functions.logprobs_from_logits(logits, sample.labels))

    return start


PATHS = (
    Path(
        "torch F.cross_entropy",
        lambda case, setting: _cross_entropy(case, setting, upcast=False),
        lambda fraction: 12,
        "log_softmax: 2 read, 2 written; nll_loss backward: 2 written; log_softmax backward: 4 read, 2 written",
    ),
    Path(
        "torch F.cross_entropy of logits.float()",
        lambda case, setting: _cross_entropy(case, setting, upcast=True),
        lambda fraction: 36,
        "the same at 4 bytes, 24, and the cast 2 + 4 forward, 4 + 2 backward",
    ),
    Path(
        "torch log_softmax(logits.float()) and gather",
        _log_softmax,
        lambda fraction: 36,
        "as F.cross_entropy of logits.float(); with entropy more",
    ),
    Path(
        f"NeMo-RL ChunkedDistributedLogprob({CHUNK})",
        lambda case, setting: _nemo_rl(case, setting, chunked=True),
        lambda fraction: 148,
        "distributed/model_utils.py, ChunkedDistributedLogprob: forward 38, backward 110",
    ),
    Path(
        "NeMo-RL DistributedLogprob of logits.float()",
        lambda case, setting: _nemo_rl(case, setting, chunked=False),
        lambda fraction: 68,
        "distributed/model_utils.py, DistributedLogprob: forward 46, backward 22",
    ),
    Path(
        "Megatron-core vocab_parallel_cross_entropy",
        lambda case, setting: _megatron(case, setting, fused=False),
        lambda fraction: 52,
        "core/tensor_parallel/cross_entropy.py: forward 38, backward 14",
    ),
    Path(
        "Megatron-core fused_vocab_parallel_cross_entropy",
        lambda case, setting: _megatron(case, setting, fused=True),
        None,
        "core/fusions/fused_cross_entropy.py: what the compiler makes of it",
    ),
    Path(
        "verl logprobs_from_logits",
        _verl,
        None,
        "utils/torch_functional.py: flash-attn's kernels where that is installed (6), else log_softmax row by row (16)",
        overwrites=True,
    ),
)
