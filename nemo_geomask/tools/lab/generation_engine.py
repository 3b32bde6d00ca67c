"""The generation engine: a copy of the policy in another precision, decoding one token at a time with a KV cache.

The engine samples from the float32 softmax of its logits, and reports its log-probs as ``generation_logprobs``. The
mismatch with the training engine's forward pass over complete sequences comes only from arithmetic; no noise is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_geomask.tools.lab.arithmetic import KVCache
from nemo_geomask.tools.lab.policy_config import GenerationConfig
from nemo_geomask.tools.lab.policy_model import hook_routers
from nemo_geomask.tools.lab.tasks import Prompts, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def filter_logits(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Divide logits by the temperature, and set the logits to -inf that top-k, and then top-p of the rest, exclude.

    As in vLLM and NeMo-RL's trainer, tokens with the same logit as the k-th stay. A token stays if the more likely
    tokens together have a probability below ``top_p``. The most likely token always stays.

    Logits are [..., V] float32.
    """
    logits = logits / config.temperature
    if config.top_k is not None:
        kth = logits.topk(min(config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if config.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        dropped = probs.cumsum(dim=-1) - probs >= config.top_p
        dropped[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits


def zero_filtered(logprobs: Tensor) -> Tensor:
    """Replace the infinite log-probs of tokens that the trainer's filter excludes by 0, as NeMo-RL does."""
    return torch.where(torch.isinf(logprobs), 0.0, logprobs)


def draw_tokens(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each row of log-probs [B, V] by uniform numbers [B] in [0, 1); never one of probability 0."""
    cumulative = distribution.double().exp().cumsum(dim=-1)
    return (cumulative <= uniform[:, None].double() * cumulative[:, -1:]).sum(dim=-1)


@dataclass(frozen=True)
class SampledResponses:
    """Sampled responses together with their prompts, on the CPU.

    Attributes:
        routes: [B, T, L, K] int16, the experts of each token in each layer. -1 for tokens that no engine processed: the
            last token of each response, and padding. None if the engine does not report routes.
    """

    input_ids: Tensor  # [B, T] long, prompt and response, then PAD
    input_lengths: Tensor  # [B] long, number of tokens of prompt and response
    logprobs: Tensor  # [B, T] float32, log μ of each sampled token, 0 elsewhere
    token_mask: Tensor  # [B, T] float32, 1 on sampled tokens (EOS included), 0 on prompts and the environment's tokens
    engine_index: Tensor  # [B, T] long, index of the engine that sampled each token, 0 elsewhere
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
) -> SampledResponses:
    """Sample one response per prompt, until EOS or the number of terms that the prompt requests.

    After a token that calls the environment, the environment's reply is inserted into the response, and the policy
    continues after it.

    Args:
        engines: models from :func:`nemo_geomask.tools.lab.policy_model.generation_copy`. Several simulate in-flight
            weight updates: the longest response is divided into equal parts, and each engine samples one of them.
        prompts: B prompts.
        task: supplies EOS and PAD, and the environment's replies.
        config: temperature, filters, and which log-probs are reported.
        generator: random number generator of the sampling.
        recompute_cache: recompute the KV cache when an engine replaces another; otherwise the new engine continues with
            the keys and values of its predecessors.
    """
    count, width = prompts.token_ids.shape
    terms = int(prompts.terms.max())
    longest = width + terms
    device = engines[0].device
    prompt_ids, requested_terms = prompts.token_ids.to(device), prompts.terms.to(device)
    input_ids = torch.full((count, longest), task.pad_id, device=device)
    input_ids[:, :width] = prompt_ids
    logprobs, token_mask = torch.zeros(2, count, longest, dtype=torch.float32, device=device)
    engine_index = torch.zeros_like(input_ids)
    replies = torch.full_like(input_ids, -1)  # the environment's tokens; -1 where the policy generates
    ends = torch.full((count,), longest, device=device)
    call_id = getattr(task, "call_id", None)

    is_calling = torch.zeros(count, dtype=torch.bool, device=device)

    rows = torch.arange(count, device=device)  # Row numbers, in the full batch, of the responses that are not complete.
    current = 0  # index of the engine that samples
    with contextlib.ExitStack() as stack:
        decoder = _Decoder(engines, count, longest, stack)
        logits = decoder.run(current, rows, prompt_ids, slice(0, width))
        for position in range(width, longest):
            logits = logits / config.unknown_temperature
            distribution = filter_logits(logits, config).log_softmax(dim=-1)
            reported = logits.log_softmax(dim=-1) if config.logprobs_mode == "raw_logprobs" else distribution
            # Draw numbers for complete responses, too, so that no response depends on the lengths of others.
            uniform = torch.rand(count, dtype=torch.float32, generator=generator).to(device)[rows]
            # Where the environment writes the next tokens, the number that would draw one of them is its luck.
            for row, luck in zip(rows.tolist(), uniform.tolist(), strict=True):
                if is_calling[row]:
                    ids = input_ids[row, :position].tolist()
                    reply = task.reply(ids[:width], ids[width:], luck)[: longest - position]  # type: ignore[attr-defined]
                    replies[row, position : position + len(reply)] = torch.tensor(reply, dtype=torch.long)
            is_sampled = replies[rows, position] < 0
            token = torch.where(is_sampled, draw_tokens(distribution, uniform), replies[rows, position])
            input_ids[rows, position] = token
            logprobs[rows, position] = torch.where(is_sampled, reported.gather(-1, token[:, None]).squeeze(-1), 0.0)
            token_mask[rows, position] = is_sampled.float()
            engine_index[rows, position] = current * is_sampled
            is_calling[rows] = is_sampled & (token == (-1 if call_id is None else call_id))

            ends_here = is_sampled & (token == task.eos_id) & (not config.ignore_eos)
            running = ~ends_here & (position + 1 < width + requested_terms[rows])
            ends[rows[~running]] = position + 1
            if not running.any():
                break
            if not running.all():
                rows = rows[running]
                decoder.cache.keep(running.nonzero().squeeze(-1))
            previous, current = current, (position + 1 - width) * len(engines) // terms
            if recompute_cache and current != previous:
                decoder.cache = KVCache(longest)
            uncached = slice(decoder.cache.get_seq_length(), position + 1)
            logits = decoder.run(current, rows, input_ids[rows, uncached], slice(position, position + 1))
    tensors = (input_ids, ends, logprobs, token_mask, engine_index, decoder.routes)
    return SampledResponses(*(tensor.cpu() for tensor in tensors))


class _Decoder:
    """Generation engines that share a KV cache; they also record the experts of each token, ``routes``."""

    def __init__(
        self, engines: Sequence[PreTrainedModel], count: int, longest: int, stack: contextlib.ExitStack
    ) -> None:
        sizes: Any = engines[0].config
        self.engines, self.cache = engines, KVCache(longest)
        shape = (count, longest, sizes.num_hidden_layers, sizes.num_experts_per_tok)
        self.routes = torch.full(shape, -1, dtype=torch.int16, device=engines[0].device)
        self._chosen = [stack.enter_context(hook_routers(engine)) for engine in engines]

    @torch.inference_mode()
    def run(self, current: int, rows: Tensor, tokens: Tensor, route_columns: slice) -> Tensor:
        """Process tokens [rows, Q] that are not in the cache; return the logits [rows, V] after the last one.

        Engine ``current`` runs. The routes of the last tokens are stored in the columns ``route_columns`` of
        ``routes``.
        """
        output = self.engines[current](input_ids=tokens, past_key_values=self.cache)
        chosen = torch.stack(self._chosen[current], dim=1).view(*tokens.shape, *self.routes.shape[2:])
        self._chosen[current].clear()
        self.routes[rows, route_columns] = chosen[:, route_columns.start - route_columns.stop :].to(torch.int16)
        logits: Tensor = output.logits[:, -1].float()
        return logits
