"""The generation engine: a copy of the policy in another precision, decoding one token at a time with a KV cache.

What it samples from, and what it reports as ``generation_logprobs``, is its own distribution: the softmax in float32
of its own logits. What parts it from the training forward over whole sequences is real arithmetic; nothing is injected.
"""

from __future__ import annotations

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
    """

    input_ids: Tensor
    logprobs: Tensor
    token_mask: Tensor


@torch.no_grad()
def generate(
    engine: PreTrainedModel,
    prompts: Prompts,
    task: Task,
    generator: torch.Generator,
) -> Generated:
    """Sample one response a prompt at temperature 1, until EOS or the number of terms that the prompt asks for.

    Args:
        engine: see :func:`nemo_geomask.lab.model.generation_copy`.
        prompts: B prompts.
        task: supplies EOS and PAD.
        generator: source of all randomness.
    """
    count, width = prompts.token_ids.shape
    longest = width + int(prompts.terms.max())
    input_ids = torch.full((count, longest), task.pad_id)
    input_ids[:, :width] = prompts.token_ids
    logprobs, token_mask = torch.zeros(2, count, longest, dtype=torch.float32)

    rows = torch.arange(count)  # Sequences still running: row numbers of the full batch.
    cache = Cache(longest)
    logits = _decode(engine, prompts.token_ids, cache)
    for position in range(width, longest):
        distribution = logits.log_softmax(dim=-1)
        # Drawn for the whole batch, so that a response does not depend on when others end.
        uniform = torch.rand(count, dtype=torch.float32, generator=generator)[rows, None]
        token = (distribution.exp().cumsum(dim=-1) < uniform).sum(dim=-1).clamp(max=task.vocab_size - 1)
        input_ids[rows, position] = token
        logprobs[rows, position] = distribution.gather(-1, token[:, None]).squeeze(-1)
        token_mask[rows, position] = 1.0

        running = (token != task.eos_id) & (position + 1 < width + prompts.terms[rows])
        if not running.any():
            break
        if not running.all():
            rows = rows[running]
            cache.keep(running.nonzero().squeeze(-1))
        logits = _decode(engine, token[running, None], cache)
    return Generated(input_ids, logprobs, token_mask)


@torch.inference_mode()
def _decode(engine: PreTrainedModel, token_ids: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] of what comes after tokens [B, Q], which are added to the cache."""
    return engine(input_ids=token_ids, past_key_values=cache).logits[:, -1].float()
