"""Peers with kernels of their own, which need a GPU: TransformerEngine, Liger, flash-attn, QuACK, Fast-LLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_geomask.bench.inputs import IGNORE, Answer, Case, Sample
from nemo_geomask.bench.paths.base import (
    Absent,
    Path,
    Setting,
    Start,
    Unfit,
    by_autograd,
    module,
    on_gpu,
    scaled,
    without_entropy,
)

__all__ = ["PATHS"]


def _gpu(case: Case, setting: Setting) -> None:
    on_gpu(setting.device)
    without_entropy(case.entropy)


def _transformer_engine(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    function = module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy

    def start(sample: Sample) -> Answer:
        logits, targets = scaled(sample, case).unsqueeze(0), sample.targets.unsqueeze(0)
        loss = function(logits, targets, 0.0, False, setting.group, IGNORE)
        return by_autograd(sample.logits, -loss.squeeze(0))

    return start


def _liger_vocab_parallel(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    function = module("liger_kernel.ops.vocab_parallel_cross_entropy").LigerVocabParallelCEFunction

    def start(sample: Sample) -> Answer:
        logits, targets = scaled(sample, case).unsqueeze(1), sample.targets.unsqueeze(1)
        loss = function.apply(logits, targets, setting.group, IGNORE, 0.0, "pytorch", "global")
        return by_autograd(sample.logits, -loss.squeeze(1))

    return start


def _liger_grpo(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    if setting.group is not None:
        raise Unfit("takes no shards")
    function = module("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def start(sample: Sample) -> Answer:
        # One sequence whose last row predicts nothing. Without old log-probs the ratio is 1, and with an advantage of
        # -1 the derivative of the loss by the log-prob is 1.
        count = case.tokens - 1
        loss, *_ = function(
            sample.logits.unsqueeze(0),
            None,
            None,
            sample.labels[:count].unsqueeze(0).contiguous(),
            torch.full((1,), -1.0, dtype=torch.float32, device=setting.device),
            completion_mask=sample.kept[:count].unsqueeze(0).int().contiguous(),
            temperature=case.temperature,
            beta=0.0,
            inplace=False,
        )

        def gradient(g: Tensor, h: Tensor | None) -> Tensor:
            return torch.autograd.grad(loss, sample.logits, g[:count].unsqueeze(0))[0]

        return Answer(None, None, gradient)

    return start


def _flash_attn(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    function = module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss

    def start(sample: Sample) -> Answer:
        loss, _ = function(
            sample.logits,
            sample.targets,
            logit_scale=1 / case.temperature,
            ignore_index=IGNORE,
            process_group=setting.group,
        )
        return by_autograd(sample.logits, -loss)

    return start


def _quack(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    if setting.group is not None:
        raise Unfit("takes no shards")
    function = module("quack.cross_entropy").cross_entropy

    def start(sample: Sample) -> Answer:
        loss = function(scaled(sample, case), sample.targets, ignore_index=IGNORE, reduction="none")
        return by_autograd(sample.logits, -loss)

    return start


def _fast_llm(case: Case, setting: Setting) -> Start:
    _gpu(case, setting)
    functions = module("fast_llm.functional.triton.monolithic_loss")
    scale = 1 / case.temperature

    def start(sample: Sample) -> Answer:
        # As its GSPO runs: the softmax of the row first, then the gradient from a coefficient a token.
        logits = sample.logits.detach()
        softmax = functions._monolithic_forward_reduce(logits, sample.targets, setting.group, scale)
        peak, mass, own = softmax

        def gradient(g: Tensor, h: Tensor | None) -> Tensor:
            made: Any = functions.triton_monolithic_loss_forward_backward(
                logits, sample.targets, None, scale, setting.group, 1.0, gspo_coeff=-g * scale, softmax=softmax
            )
            result: Tensor = made[4]
            return result

        return Answer(own - mass.log() - peak, None, gradient)

    return start


def _cut_cross_entropy(case: Case, setting: Setting) -> Start:
    raise Absent("left out: it fuses the output projection and takes no logits")


_CE = "6 whatever is masked: the row is read forward, read backward and its gradient written"

PATHS = (
    Path(
        "TransformerEngine parallel_cross_entropy",
        _transformer_engine,
        lambda fraction: 20 + 2 * fraction,
        "common/triton/cross_entropy.py: online_softmax 2, cross_entropy 2 + 4 (float32 gradient), element_mul 4 + 4, "
        "autograd's cast 4 + 2",
    ),
    Path(
        "Liger vocabulary-parallel CE",
        _liger_vocab_parallel,
        lambda fraction: 18 + 4 * fraction,
        "ops/vocab_parallel_cross_entropy.py: amax 2, forward 2 + 4, backward 4 + 4, cast 4 + 2",
    ),
    Path(
        "Liger GRPO loss",
        _liger_grpo,
        lambda fraction: 4 * fraction + 2,
        "ops/grpo_loss.py, token level: forward 2, backward 2 + 2, masked rows written only",
    ),
    Path("flash-attn CE", _flash_attn, lambda fraction: 6, f"ops/triton/cross_entropy.py: {_CE}"),
    Path("QuACK CE", _quack, lambda fraction: 6, f"cross_entropy.py: {_CE}"),
    Path(
        "Fast-LLM monolithic loss",
        _fast_llm,
        lambda fraction: 6,
        "functional/triton/monolithic_loss.py after a forward pass of its own, as for GSPO: 2, then 2 + 2",
    ),
    Path("cut-cross-entropy", _cut_cross_entropy, None, "a fused linear"),
)
