"""Peers written in torch operations: torch itself, NeMo-RL, Megatron-core, verl."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from nemo_geomask.tools.bench.logprob_cases import IGNORE, LogprobCase, LogprobSample, PathOutput
from nemo_geomask.tools.bench.paths.path import (
    Absent,
    ForwardPass,
    LogprobPath,
    NotApplicable,
    Setting,
    divide_by_temperature,
    import_peer,
    output_by_autograd,
    refuse_entropy,
)

__all__ = ["CHUNK", "PATHS"]

CHUNK = 256  # tokens in a chunk of NeMo-RL's chunked paths


def _cross_entropy(case: LogprobCase, setting: Setting, *, upcast: bool) -> ForwardPass:
    refuse_entropy(case.entropy)
    _refuse_shards(setting)

    def forward(sample: LogprobSample) -> PathOutput:
        logits = divide_by_temperature(sample, case)
        loss = torch.nn.functional.cross_entropy(
            logits.float() if upcast else logits, sample.targets, reduction="none", ignore_index=IGNORE
        )
        return output_by_autograd(sample.logits, -loss)

    return forward


def _log_softmax(case: LogprobCase, setting: Setting) -> ForwardPass:
    _refuse_shards(setting)

    def forward(sample: LogprobSample) -> PathOutput:
        z = sample.logits.float()
        logp = torch.log_softmax(z if case.temperature == 1 else z / case.temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return output_by_autograd(sample.logits, logp.gather(1, sample.labels.unsqueeze(1)).squeeze(1), entropy)

    return forward


def _refuse_shards(setting: Setting) -> None:
    if setting.group is not None:
        raise NotApplicable("does not support shards")


def _nemo_rl(case: LogprobCase, setting: Setting, *, chunked: bool) -> ForwardPass:
    model_utils = import_peer("nemo_rl.distributed.model_utils")
    if case.entropy and not chunked:
        raise NotApplicable("does not compute the entropy")
    group = setting.required_group()
    columns = (setting.rank * case.width, (setting.rank + 1) * case.width)

    def forward(sample: LogprobSample) -> PathOutput:
        logits = divide_by_temperature(sample, case).unsqueeze(0)
        labels = sample.labels.unsqueeze(0)
        if chunked:
            logp = model_utils.ChunkedDistributedLogprob.apply(logits, labels, *columns, CHUNK, group, False)
        else:
            logp = model_utils.DistributedLogprob.apply(logits.float(), labels, *columns, group, False)
        entropy = None
        if case.entropy:
            # NeMo-RL's function returns Σ p·log p, the negative entropy.
            entropy = -model_utils.ChunkedDistributedEntropy.apply(logits, CHUNK, group, False).squeeze(0)
        return output_by_autograd(sample.logits, logp.squeeze(0), entropy)

    return forward


def _megatron(case: LogprobCase, setting: Setting, *, fused: bool) -> ForwardPass:
    refuse_entropy(case.entropy)
    name = "fused_vocab_parallel_cross_entropy" if fused else "vocab_parallel_cross_entropy"
    module_name = (
        "megatron.core.fusions.fused_cross_entropy" if fused else "megatron.core.tensor_parallel.cross_entropy"
    )
    function = getattr(import_peer(module_name), name)
    group = setting.required_group()
    options: dict[str, Any] = {"tp_group": group}
    if "tp_group" not in inspect.signature(function).parameters:
        _initialise_megatron(import_peer("megatron.core.parallel_state"), group.size())
        options = {}

    def forward(sample: LogprobSample) -> PathOutput:
        loss = function(divide_by_temperature(sample, case).unsqueeze(1), sample.labels.unsqueeze(1), **options)
        return output_by_autograd(sample.logits, -loss.squeeze(1))

    return forward


def _initialise_megatron(state: Any, size: int) -> None:
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=size)


def _verl(case: LogprobCase, setting: Setting) -> ForwardPass:
    refuse_entropy(case.entropy)
    _refuse_shards(setting)
    module = import_peer("verl.utils.torch_functional")
    uses_flash_attn = module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    if uses_flash_attn and setting.device.type != "cuda":
        raise Absent("it would call flash-attn, which needs a GPU")

    def forward(sample: LogprobSample) -> PathOutput:
        logits = divide_by_temperature(sample, case)
        return output_by_autograd(sample.logits, module.logprobs_from_logits(logits, sample.labels))

    return forward


PATHS = (
    LogprobPath(
        "torch F.cross_entropy",
        lambda case, setting: _cross_entropy(case, setting, upcast=False),
        lambda fraction: 12,
        "log_softmax: 2 read, 2 written; nll_loss backward: 2 written; log_softmax backward: 4 read, 2 written",
    ),
    LogprobPath(
        "torch F.cross_entropy of logits.float()",
        lambda case, setting: _cross_entropy(case, setting, upcast=True),
        lambda fraction: 36,
        "the same at 4 bytes, 24, and the cast 2 + 4 forward, 4 + 2 backward",
    ),
    LogprobPath(
        "torch log_softmax(logits.float()) and gather",
        _log_softmax,
        lambda fraction: 36,
        "as F.cross_entropy of logits.float(); with entropy more",
    ),
    LogprobPath(
        f"NeMo-RL ChunkedDistributedLogprob({CHUNK})",
        lambda case, setting: _nemo_rl(case, setting, chunked=True),
        lambda fraction: 148,
        "distributed/model_utils.py, ChunkedDistributedLogprob: forward 38, backward 110",
    ),
    LogprobPath(
        "NeMo-RL DistributedLogprob of logits.float()",
        lambda case, setting: _nemo_rl(case, setting, chunked=False),
        lambda fraction: 68,
        "distributed/model_utils.py, DistributedLogprob: forward 46, backward 22",
    ),
    LogprobPath(
        "Megatron-core vocab_parallel_cross_entropy",
        lambda case, setting: _megatron(case, setting, fused=False),
        lambda fraction: 52,
        "core/tensor_parallel/cross_entropy.py: forward 38, backward 14",
    ),
    LogprobPath(
        "Megatron-core fused_vocab_parallel_cross_entropy",
        lambda case, setting: _megatron(case, setting, fused=True),
        None,
        "core/fusions/fused_cross_entropy.py: depends on what the compiler fuses",
    ),
    LogprobPath(
        "verl logprobs_from_logits",
        _verl,
        None,
        "utils/torch_functional.py: flash-attn's kernels where that is installed (6), else log_softmax row by row (16)",
        overwrites=True,
    ),
)
