"""Paths from hidden states to log-probs: ours, and those of torch and the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.tools.bench.linear_cases import LinearCase, LinearOutputs, LinearSample
from nemo_geomask.tools.bench.logprob_cases import IGNORE
from nemo_geomask.tools.bench.paths.path import Setting, import_peer, refuse_entropy, require_gpu

__all__ = ["PATHS"]

_CHUNK = 1024  # rows in a chunk of the paths that work in chunks
_Path = Callable[[LinearSample, LinearCase, Setting], LinearOutputs]


def _ours(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    function: Any = linear_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel}
    outputs = function(sample.hidden, sample.weight, sample.targets, **options)
    return outputs if case.entropy else (outputs, None)


def _with_logits(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    function: Any = vocab_parallel_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
    outputs = function(logits, sample.targets, **options)
    return outputs if case.entropy else (outputs, None)


def _torch(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    refuse_entropy(case.entropy)
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    return -torch.nn.functional.cross_entropy(logits, sample.targets, reduction="none", ignore_index=IGNORE), None


def _torch_chunked(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    def chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> LinearOutputs:
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return logp.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, hidden, sample.weight, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(sample.hidden, _CHUNK), torch.split(sample.labels, _CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if case.entropy else None


def _nemo_rl(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    refuse_entropy(case.entropy)
    function = import_peer("nemo_rl.distributed.model_utils").ChunkedDistributedHiddenStatesToLogprobs
    hidden, labels = sample.hidden.unsqueeze(1), sample.labels.unsqueeze(0)
    logprobs = function.apply(hidden, labels, sample.weight, 0, case.width, _CHUNK, setting.required_group(), False)
    return logprobs.squeeze(0), None


def _skyrl(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    refuse_entropy(case.entropy)
    function = import_peer(
        "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    ).FusedLinearChunkedDistributedLogprob
    hidden, labels = sample.hidden.unsqueeze(0), sample.labels.unsqueeze(0)
    logprobs = function.apply(hidden, sample.weight, labels, 0, case.width, _CHUNK, setting.required_group(), False)
    return logprobs.squeeze(0), None


def _verl(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    function = import_peer("verl.utils.experimental.torch_functional").FusedLinearForPPO(chunk_size=_CHUNK)
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels)
    return logprobs, entropy if case.entropy else None


def _verl_kernels(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    require_gpu(setting.device)
    function = import_peer("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels, 1.0, "none", None)
    return logprobs, entropy if case.entropy else None


def _liger(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    loss = function.apply(
        sample.hidden, sample.weight, sample.targets, None, None, IGNORE, 0.0, 0.0, "none", None, False, torch.float32
    )
    return -(loss[0] if isinstance(loss, tuple) else loss), None


def _quack(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    # QuACK's chunked form returns only a sum or mean of the losses, so this is its form with logits.
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("quack.linear_cross_entropy").linear_cross_entropy_func
    arguments = (sample.hidden, sample.weight, None, sample.targets, IGNORE, "none", True)
    loss: Tensor = function(*arguments)
    return -loss, None


def _cut_cross_entropy(sample: LinearSample, case: LinearCase, setting: Setting) -> LinearOutputs:
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("cut_cross_entropy").linear_cross_entropy
    loss: Tensor = function(sample.hidden, sample.weight, sample.targets, reduction="none", filter_eps=None)
    return -loss, None


PATHS: dict[str, _Path] = {
    "nemo_geomask linear_logprobs": _ours,
    "nemo_geomask with logits": _with_logits,
    "torch F.linear, F.cross_entropy": _torch,
    f"torch in chunks of {_CHUNK}, recomputed": _torch_chunked,
    f"NeMo-RL fused linear ({_CHUNK})": _nemo_rl,
    f"SkyRL fused linear ({_CHUNK})": _skyrl,
    f"verl FusedLinearForPPO ({_CHUNK})": _verl,
    "verl linear_cross_entropy kernels": _verl_kernels,
    "Liger fused linear CE": _liger,
    "cut-cross-entropy": _cut_cross_entropy,
    "QuACK linear_cross_entropy_func": _quack,
}
"""The paths by name; each returns log-probs [T] and, if the case has them, entropies [T]."""
