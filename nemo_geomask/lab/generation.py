"""The generation engine: a copy of the policy in another precision, decoding one token at a time with a KV cache.

What it samples from, and what it reports as ``generation_logprobs``, is its own distribution: the softmax in float32
of its own logits. What parts it from the training forward over whole sequences is real arithmetic; nothing is injected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.arithmetic import Cache
from nemo_geomask.lab.task import Prompts, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Generated", "generate"]


@dataclass(frozen=True)
class Generated:
    """Sampled responses.

    Attributes:
        input_ids: [B, T] long, prompt and response, PAD after it.
        logprobs: [B, T] float32, log μ of each response token, 0 elsewhere.
        token_mask: [B, T] float32, 1 on response tokens (EOS among them).
        engine: [B, T] long, which of the engines sampled each response token, 0 elsewhere.
    """

    input_ids: Tensor
    logprobs: Tensor
    token_mask: Tensor
    engine: Tensor


@torch.no_grad()
def generate(
    engines: Sequence[PreTrainedModel],
    prompts: Prompts,
    task: Task,
    generator: torch.Generator,
    *,
    recompute_cache: bool = False,
) -> Generated:
    """Sample one response a prompt at temperature 1, until EOS or the number of terms that the prompt asks for.

    Args:
        engines: see :func:`nemo_geomask.lab.model.generation_copy`; of several, each takes the place of the one before
            it after an equal share of the longest response, as weights do that are updated while responses are written.
        prompts: B prompts.
        task: supplies EOS and PAD.
        generator: source of all randomness.
        recompute_cache: whether the cache is then that of the new engine; else it is that of the engines before it.
    """
    count, width = prompts.token_ids.shape
    terms = int(prompts.terms.max())
    longest = width + terms
    input_ids = torch.full((count, longest), task.pad_id)
    input_ids[:, :width] = prompts.token_ids
    logprobs, token_mask = torch.zeros(2, count, longest, dtype=torch.float32)
    sampled_by = torch.zeros(count, longest, dtype=torch.long)

    rows = torch.arange(count)  # Sequences still running: row numbers of the full batch.
    current, cache = 0, Cache(longest)
    logits = _decode(engines[current], prompts.token_ids, cache)
    for position in range(width, longest):
        distribution = logits.log_softmax(dim=-1)
        # Drawn for the whole batch, so that a response does not depend on when others end.
        uniform = torch.rand(count, dtype=torch.float32, generator=generator)[rows, None]
        token = (distribution.exp().cumsum(dim=-1) < uniform).sum(dim=-1).clamp(max=task.vocab_size - 1)
        input_ids[rows, position] = token
        logprobs[rows, position] = distribution.gather(-1, token[:, None]).squeeze(-1)
        token_mask[rows, position] = 1.0
        sampled_by[rows, position] = current

        running = (token != task.eos_id) & (position + 1 < width + prompts.terms[rows])
        if not running.any():
            break
        if not running.all():
            rows = rows[running]
            cache.keep(running.nonzero().squeeze(-1))
        before, current = current, (position + 1 - width) * len(engines) // terms
        added = token[running, None]
        if recompute_cache and current != before:
            added, cache = input_ids[rows, : position + 1], Cache(longest)
        logits = _decode(engines[current], added, cache)
    return Generated(input_ids, logprobs, token_mask, sampled_by)


@torch.inference_mode()
def _decode(engine: PreTrainedModel, token_ids: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] of what comes after tokens [B, Q], which are added to the cache."""
    logits: Tensor = engine(input_ids=token_ids, past_key_values=cache).logits
    return logits[:, -1].float()
