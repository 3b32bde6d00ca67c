"""The generation engine: a copy of the policy in another precision, decoding one token at a time with a KV cache.

What it samples from, and what it reports as ``generation_logprobs``, is its own distribution: the softmax in float32
of its own logits. What parts it from the training forward over whole sequences is real arithmetic; nothing is injected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.lab.arithmetic import Cache
from nemo_geomask.lab.policy import GenerationConfig
from nemo_geomask.lab.routing import routing
from nemo_geomask.lab.sampling import draw, filtered
from nemo_geomask.lab.task import Prompts, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Generated", "generate"]


@dataclass(frozen=True)
class Generated:
    """Sampled responses.

    Attributes:
        input_ids: [B, T] long, prompt and response, PAD after it.
        input_lengths: [B] long, tokens of prompt and response.
        logprobs: [B, T] float32, log μ of each sampled token, 0 elsewhere.
        token_mask: [B, T] float32, 1 on sampled tokens (EOS among them), 0 on what the environment wrote.
        engine: [B, T] long, which of the engines sampled each token, 0 elsewhere.
        routes: [B, T, L, K] int16, the experts that each token went through in each layer, -1 where it went through
            none: the last token of a response, and padding. None: not known.
    """

    input_ids: Tensor
    input_lengths: Tensor
    logprobs: Tensor
    token_mask: Tensor
    engine: Tensor
    routes: Tensor | None = None


@torch.no_grad()
def generate(
    engines: Sequence[PreTrainedModel],
    prompts: Prompts,
    task: Task,
    config: GenerationConfig,
    generator: torch.Generator,
    *,
    recompute_cache: bool = False,
) -> Generated:
    """Sample one response a prompt, until EOS or the number of terms that the prompt asks for.

    After a token that calls the environment, what that replies stands in the response, and the policy goes on from it.

    Args:
        engines: see :func:`nemo_geomask.lab.model.generation_copy`; of several, each takes the place of the one before
            it after an equal share of the longest response, as weights do that are updated while responses are written.
        prompts: B prompts.
        task: supplies EOS and PAD, and the environment's replies.
        config: temperature, filters, and which log-probs are reported.
        generator: source of all randomness.
        recompute_cache: whether the cache is then that of the new engine; else it is that of the engines before it.
    """
    count, width = prompts.token_ids.shape
    terms = int(prompts.terms.max())
    longest = width + terms
    input_ids = torch.full((count, longest), task.pad_id)
    input_ids[:, :width] = prompts.token_ids
    logprobs, token_mask = torch.zeros(2, count, longest, dtype=torch.float32)
    engine, replies = torch.zeros_like(input_ids), torch.full_like(input_ids, -1)
    ends = torch.full((count,), longest)
    call = getattr(task, "call_id", None)

    rows = torch.arange(count)  # Sequences still running: row numbers of the full batch.
    current = 0
    with contextlib.ExitStack() as stack:
        decoder = _Decoder(engines, count, longest, stack)
        logits = decoder.run(current, rows, prompts.token_ids, slice(0, width))
        for position in range(width, longest):
            distribution = filtered(logits, config).log_softmax(dim=-1)
            reported = logits.log_softmax(dim=-1) if config.logprobs_mode == "raw_logprobs" else distribution
            # Drawn for the whole batch, so that a response does not depend on when others end.
            uniform = torch.rand(count, dtype=torch.float32, generator=generator)[rows]
            own = replies[rows, position] < 0
            token = torch.where(own, draw(distribution, uniform), replies[rows, position])
            input_ids[rows, position] = token
            logprobs[rows, position] = torch.where(own, reported.gather(-1, token[:, None]).squeeze(-1), 0.0)
            token_mask[rows, position] = own.float()
            engine[rows, position] = current * own
            if call is not None:
                _reply(task, input_ids, width, position + 1, rows[own & (token == call)], replies)

            running = (~own | (token != task.eos_id) | config.ignore_eos) & (position + 1 < width + prompts.terms[rows])
            ends[rows[~running]] = position + 1
            if not running.any():
                break
            if not running.all():
                rows = rows[running]
                decoder.cache.keep(running.nonzero().squeeze(-1))
            before, current = current, (position + 1 - width) * len(engines) // terms
            if recompute_cache and current != before:
                decoder.cache = Cache(longest)
            new = slice(decoder.cache.get_seq_length(), position + 1)
            logits = decoder.run(current, rows, input_ids[rows, new], slice(position, position + 1))
    return Generated(input_ids, ends, logprobs, token_mask, engine, decoder.routes)


class _Decoder:
    """The engines at work, and the routes that tokens took through them."""

    def __init__(
        self, engines: Sequence[PreTrainedModel], count: int, longest: int, stack: contextlib.ExitStack
    ) -> None:
        sizes: Any = engines[0].config
        self.engines, self.cache = engines, Cache(longest)
        self.routes = torch.full(
            (count, longest, sizes.num_hidden_layers, sizes.num_experts_per_tok), -1, dtype=torch.int16
        )
        self._chosen = [stack.enter_context(routing(engine)) for engine in engines]

    @torch.inference_mode()
    def run(self, current: int, rows: Tensor, tokens: Tensor, places: slice) -> Tensor:
        """Logits [rows, V] after tokens [rows, new]; the routes of the last of them go to ``places``."""
        output = self.engines[current](input_ids=tokens, past_key_values=self.cache)
        chosen = torch.stack(self._chosen[current], dim=1).view(*tokens.shape, *self.routes.shape[2:])
        self._chosen[current].clear()
        self.routes[rows, places] = chosen[:, places.start - places.stop :].to(torch.int16)
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _reply(task: Any, input_ids: Tensor, width: int, written: int, rows: Tensor, replies: Tensor) -> None:
    """Put what the environment replies to the calls of some rows into ``replies``, as far as there is room."""
    for row in rows.tolist():
        ids = input_ids[row, :written].tolist()
        reply = task.reply(ids[:width], ids[width:])[: input_ids.shape[1] - written]
        replies[row, written : written + len(reply)] = torch.tensor(reply, dtype=torch.long)
