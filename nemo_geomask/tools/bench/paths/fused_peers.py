"""Peers with GPU kernels: TransformerEngine, Liger, flash-attn, QuACK, Fast-LLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    require_gpu,
)

__all__ = ["PATHS"]


def _require_gpu_without_entropy(case: LogprobCase, setting: Setting) -> None:
    require_gpu(setting.device)
    refuse_entropy(case.entropy)


def _transformer_engine(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    function = import_peer("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy

    def forward(sample: LogprobSample) -> PathOutput:
        logits, targets = divide_by_temperature(sample, case).unsqueeze(0), sample.targets.unsqueeze(0)
        loss = function(logits, targets, 0.0, False, setting.group, IGNORE)
        return output_by_autograd(sample.logits, -loss.squeeze(0))

    return forward


def _liger_vocab_parallel(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    function = import_peer("liger_kernel.ops.vocab_parallel_cross_entropy").LigerVocabParallelCEFunction

    def forward(sample: LogprobSample) -> PathOutput:
        logits, targets = divide_by_temperature(sample, case).unsqueeze(1), sample.targets.unsqueeze(1)
        loss = function.apply(logits, targets, setting.group, IGNORE, 0.0, "pytorch", "global")
        return output_by_autograd(sample.logits, -loss.squeeze(1))

    return forward


def _liger_grpo(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    if setting.group is not None:
        raise NotApplicable("takes no shards")
    function = import_peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def forward(sample: LogprobSample) -> PathOutput:
        # The batch is one sequence, whose last row predicts nothing. Without old log-probs the ratio is 1, so with an
        # advantage of -1 the derivative of the loss with respect to the log-prob is 1.
        count = case.tokens - 1
        loss, *_ = function(
            sample.logits.unsqueeze(0),
            None,
            None,
            sample.labels[:count].unsqueeze(0).contiguous(),
            torch.full((1,), -1.0, dtype=torch.float32, device=setting.device),
            completion_mask=sample.is_trained[:count].unsqueeze(0).int().contiguous(),
            temperature=case.temperature,
            beta=0.0,
            inplace=False,
        )

        def gradient(g: Tensor, h: Tensor | None) -> Tensor:
            return torch.autograd.grad(loss, sample.logits, g[:count].unsqueeze(0))[0]

        return PathOutput(None, None, gradient)

    return forward


def _flash_attn(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    function = import_peer("flash_attn.ops.triton.cross_entropy").cross_entropy_loss

    def forward(sample: LogprobSample) -> PathOutput:
        loss, _ = function(
            sample.logits,
            sample.targets,
            logit_scale=1 / case.temperature,
            ignore_index=IGNORE,
            process_group=setting.group,
        )
        return output_by_autograd(sample.logits, -loss)

    return forward


def _quack(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    if setting.group is not None:
        raise NotApplicable("takes no shards")
    function = import_peer("quack.cross_entropy").cross_entropy

    def forward(sample: LogprobSample) -> PathOutput:
        loss = function(divide_by_temperature(sample, case), sample.targets, ignore_index=IGNORE, reduction="none")
        return output_by_autograd(sample.logits, -loss)

    return forward


def _fast_llm(case: LogprobCase, setting: Setting) -> ForwardPass:
    _require_gpu_without_entropy(case, setting)
    module = import_peer("fast_llm.functional.triton.monolithic_loss")
    scale = 1 / case.temperature

    def forward(sample: LogprobSample) -> PathOutput:
        # As in Fast-LLM's GSPO: first the softmax of the row, then the gradient from one coefficient for each token.
        logits = sample.logits.detach()
        softmax = module._monolithic_forward_reduce(logits, sample.targets, setting.group, scale)
        max_logit, sum_exp, target_logit = softmax

        def gradient(g: Tensor, h: Tensor | None) -> Tensor:
            outputs: Any = module.triton_monolithic_loss_forward_backward(
                logits, sample.targets, None, scale, setting.group, 1.0, gspo_coeff=-g * scale, softmax=softmax
            )
            grad_logits: Tensor = outputs[4]
            return grad_logits

        return PathOutput(target_logit - sum_exp.log() - max_logit, None, gradient)

    return forward


def _cut_cross_entropy(case: LogprobCase, setting: Setting) -> ForwardPass:
    raise Absent("left out: it fuses the output projection and takes no logits")


_EVERY_ROW = "2 read forward, 2 read and 2 written backward, also for rows that do not train"

PATHS = (
    LogprobPath(
        "TransformerEngine parallel_cross_entropy",
        _transformer_engine,
        lambda fraction: 20 + 2 * fraction,
        "common/triton/cross_entropy.py: online_softmax 2, cross_entropy 2 + 4 (float32 gradient), element_mul 4 + 4, "
        "autograd's cast 4 + 2",
    ),
    LogprobPath(
        "Liger vocabulary-parallel CE",
        _liger_vocab_parallel,
        lambda fraction: 18 + 4 * fraction,
        "ops/vocab_parallel_cross_entropy.py: amax 2, forward 2 + 4, backward 4 + 4, cast 4 + 2",
    ),
    LogprobPath(
        "Liger GRPO loss",
        _liger_grpo,
        lambda fraction: 4 * fraction + 2,
        "ops/grpo_loss.py, token level: forward 2, backward 2 + 2, masked rows written only",
    ),
    LogprobPath("flash-attn CE", _flash_attn, lambda fraction: 6, f"ops/triton/cross_entropy.py: {_EVERY_ROW}"),
    LogprobPath("QuACK CE", _quack, lambda fraction: 6, f"cross_entropy.py: {_EVERY_ROW}"),
    LogprobPath(
        "Fast-LLM monolithic loss",
        _fast_llm,
        lambda fraction: 6,
        "functional/triton/monolithic_loss.py after a forward pass of its own, as for GSPO: 2, then 2 + 2",
    ),
    LogprobPath("cut-cross-entropy", _cut_cross_entropy, None, "a fused linear"),
)
