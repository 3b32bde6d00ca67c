"""Mistakes for real rehearsals: vLLM loads :func:`plant` into the processes of its engine, and recipes name the losses.

``PLANTED_MISTAKE`` in the environment selects the one in the sampler. On ``PYTHONPATH``, this folder is a distribution.
"""

from __future__ import annotations

import functools
import math
import os

from nemo_geomask import functional as F
from nemo_geomask.losses import Variant


def plant():
    """Make the sampler wrong in one way."""
    mistake = os.environ.get("PLANTED_MISTAKE", "")
    if mistake in WRAPPERS:
        from vllm import LLM

        if not hasattr(LLM.generate, "__wrapped__"):
            LLM.generate = WRAPPERS[mistake](LLM.generate)
    elif mistake == "frozen":
        from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

        if not hasattr(Qwen3ForCausalLM.load_weights, "__wrapped__"):
            Qwen3ForCausalLM.load_weights = frozen(Qwen3ForCausalLM.load_weights)


def sampling(**settings):
    """Return a wrapper of vLLM's ``generate`` that samples with other settings than NeMo-RL asked for."""

    def wrap(generate):
        @functools.wraps(generate)
        def call(self, prompts, sampling_params, *args, **kwargs):
            for each in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
                for name, value in settings.items():
                    setattr(each, name, value)
            return generate(self, prompts, sampling_params, *args, **kwargs)

        return call

    return wrap


def frozen(load_weights):
    """Take the weights of the first refit, and no others."""
    refits = iter((True,))

    @functools.wraps(load_weights)
    def call(self, weights):
        return load_weights(self, weights) if next(refits, False) else set()

    return call


def shifted(generate):
    """Give each token the log-prob of the one before it."""

    @functools.wraps(generate)
    def call(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        for request in outputs:
            for output in request.outputs:
                values = [entry[token] for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
                shifted_values = [values[0].logprob, *(value.logprob for value in values[:-1])]
                for value, logprob in zip(values, shifted_values, strict=True):
                    value.logprob = logprob
        return outputs

    return call


WRAPPERS = {"temperature": sampling(temperature=0.6), "top_p": sampling(top_p=0.8), "shift": shifted}


def surrogate(make):
    def compute(inputs, means):
        ratio = F.saturating_exp(inputs.log_ratio)
        return F.Surrogate(loss=make(-inputs.advantages * ratio), ratio=ratio, ratio_clamped=ratio)

    return compute


def raising(loss):
    if loss.numel() > 1:  # a loss runs on a single token when it is built
        raise ArithmeticError("the planted plugin fails on real batches")
    return loss


NAN = Variant(surrogate=surrogate(lambda loss: loss * math.nan), source="a planted mistake")
RAISES = Variant(surrogate=surrogate(raising), source="a planted mistake")
