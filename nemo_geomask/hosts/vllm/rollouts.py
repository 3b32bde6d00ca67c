"""Rollout batches from vLLM's ``RequestOutput`` objects, and new weights for an engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemo_geomask.data_keys import GENERATION_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import ConfigError, DataError, EngineError

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

# Values of sampling parameters that keep the distribution of the model's logits. Any other value changes it after vLLM
# has computed the "raw" log-probs.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "thinking_token_budget": (None,),
}
_GREEDY_TEMPERATURE = 1e-5  # below this temperature, vLLM takes the most likely token


@dataclass(frozen=True)
class _Ending:
    """Meaning of a finish reason for training.

    Attributes:
        trained: True if the response is a sample of the policy, from which it can learn.
        truncated: True if the engine ended the response and not the policy.
    """

    trained: bool
    truncated: bool


_ENDINGS = {
    "stop": _Ending(trained=True, truncated=False),
    "length": _Ending(trained=True, truncated=True),
    "repetition": _Ending(trained=True, truncated=True),
    # A client or a fault decided the length of these responses, and not the policy or the settings.
    "abort": _Ending(trained=False, truncated=True),
    "error": _Ending(trained=False, truncated=True),
}


@dataclass(frozen=True)
class _Row:
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    ending: _Ending


def rollout_batch(
    outputs: Sequence[RequestOutput],
    *,
    pad_token_id: int,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    logprobs_mode: str,
    overlong_filtering: bool = False,
) -> dict[str, Tensor]:
    """Make a rollout batch in NeMo-RL's layout from vLLM's outputs.

    Each completion is a row: prompts in the order of ``outputs``, the ``n`` completions of each in the order of their
    index. Rows are padded on the right; column t describes token t.

    Args:
        outputs: finished requests, as ``LLM.generate`` returns them.
        pad_token_id: fills ``input_ids`` behind a response.
        sampling_params: as passed to ``generate``: one for all requests, or one for each.
        logprobs_mode: the engine's, ``llm.model_config.logprobs_mode``. ``processed_logprobs`` belong to the
            distribution that was sampled from; ``raw_logprobs`` do only if nothing reshapes it.
        overlong_filtering: exclude truncated responses from training, as NeMo-RL's ``grpo.overlong_filtering``.

    Returns:
        ``input_ids`` [B, T] long, prompt and response;
        ``input_lengths`` [B] long;
        ``generation_logprobs`` [B, T] float32, log μ of each response token, 0 elsewhere;
        ``token_mask`` [B, T] float32, 1 on response tokens, including the stop token;
        ``sample_mask`` [B] float32, 0 if the request was aborted or failed (or, with ``overlong_filtering``,
        truncated);
        ``truncated`` [B] bool, True if a limit, an abort or a fault ended the response and not the policy.

    Raises:
        ConfigError: the log-probs are not those of the sampled distribution: none were requested, the mode gives
            logits, or raw log-probs are combined with a temperature, penalty or filter.
        DataError: there are no outputs, or one of them is unfinished, lacks its prompt's token ids, has no response, or
            lacks the log-prob of a sampled token.
    """
    if not outputs:
        raise DataError("outputs is empty; pass at least one finished request")
    has_many_params = isinstance(sampling_params, Sequence)
    params = list(sampling_params) if has_many_params else [sampling_params] * len(outputs)
    if len(params) != len(outputs):
        raise DataError(f"sampling_params has {len(params)} entries for {len(outputs)} outputs; give one for each")
    for request_params in params if has_many_params else params[:1]:
        _check_sampling(request_params, logprobs_mode)

    pairs = zip(outputs, params, strict=True)
    rows = [row for output, request_params in pairs for row in _rows(output, request_params)]
    lengths = [len(row.prompt) + len(row.response) for row in rows]
    shape = len(rows), max(lengths)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64, device="cpu")
    logprobs, token_mask = torch.zeros((2, *shape), dtype=torch.float32, device="cpu")
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = torch.tensor(row.prompt + row.response, dtype=torch.int64, device="cpu")
        logprobs[index, len(row.prompt) : length] = torch.tensor(row.logprobs, dtype=torch.float32, device="cpu")
        token_mask[index, len(row.prompt) : length] = 1.0
    truncated = torch.tensor([row.ending.truncated for row in rows], device="cpu")
    trained = torch.tensor([row.ending.trained for row in rows], device="cpu")
    return {
        "input_ids": input_ids,
        "input_lengths": torch.tensor(lengths, device="cpu"),
        GENERATION_LOGPROBS: logprobs,
        TOKEN_MASK: token_mask,
        "sample_mask": (trained & ~truncated if overlong_filtering else trained).float(),
        "truncated": truncated,
    }


def load_weights(llm: LLM, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace an engine's weights by the trainer's, and clear its prefix cache.

    Args:
        llm: an idle engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
        weights: all weights of the model, by their names in a Hugging Face checkpoint. A weight that is missing keeps
            its value, and vLLM logs a warning.

    Raises:
        EngineError: the engine runs in another process, or requests are running.
    """
    if not hasattr(llm.llm_engine, "model_executor"):
        raise EngineError(
            "the engine runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it is created"
        )
    if llm.llm_engine.has_unfinished_requests():
        raise EngineError(
            "the engine has unfinished requests, which two policies would answer; load weights when it is idle"
        )
    llm.apply_model(_unpack_experts)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


def _unpack_experts(model: nn.Module) -> None:
    """Reset the experts' kernels on a CPU, so that a reload packs the weights for them, as the first load did.

    vLLM (as of 0.32.0) packs them when it builds the experts' kernel, which it does once. After a reload the kernel
    would read unpacked weights as packed ones, without an error. A layer without a kernel builds a new one.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _check_sampling(params: SamplingParams, mode: str) -> None:
    remedy = "create the engine with logprobs_mode='processed_logprobs'"
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise ConfigError(f"logprobs_mode is '{mode}', which gives no log-probs; {remedy}")
    if params.logprobs is None:
        raise ConfigError(
            "sampling_params.logprobs is None, so vLLM returns no log-probs; set it to 0, the sampled token's alone"
        )
    if params.temperature < _GREEDY_TEMPERATURE:
        raise ConfigError(
            f"sampling_params.temperature is {params.temperature}: greedy decoding does not sample, so "
            "no importance weight is defined for its tokens; set a temperature above 0"
        )
    if params.output_kind.name == "DELTA":
        raise ConfigError(
            "sampling_params.output_kind is DELTA, so an output contains only the latest tokens; use FINAL_ONLY"
        )
    reshaped = {
        name: value for name, neutral in _NEUTRAL.items() if (value := getattr(params, name, neutral[0])) not in neutral
    }
    if mode == "raw_logprobs" and reshaped:
        settings = ", ".join(f"{name}={value}" for name, value in reshaped.items())
        raise ConfigError(
            f"logprobs_mode is 'raw_logprobs', which ignores {settings} of sampling_params, so the log-probs are not "
            f"those of the sampled distribution; {remedy}, or leave these parameters at their defaults"
        )


def _rows(output: RequestOutput, params: SamplingParams) -> Iterator[_Row]:
    name = f"request {output.request_id}"
    if not output.finished:
        raise DataError(f"{name} is not finished; wait for its last output")
    if not output.prompt_token_ids:
        raise DataError(f"{name} has no prompt_token_ids; give prompts as text or token ids, not as embeddings")
    completions = output.outputs if isinstance(output.outputs, Sequence) else ()
    if len(completions) != params.n:
        raise DataError(
            f"{name} holds {len(completions)} of {params.n} completions; use the output of LLM.generate, or "
            "output_kind FINAL_ONLY"
        )
    prompt = list(output.prompt_token_ids)
    for completion in sorted(completions, key=lambda completion: completion.index):
        yield _row(prompt, completion, f"{name}, completion {completion.index}")


def _row(prompt: list[int], completion: CompletionOutput, name: str) -> _Row:
    ending = _ENDINGS.get(completion.finish_reason or "")
    if ending is None:
        raise DataError(f"{name} has finish_reason {completion.finish_reason!r}; known: {', '.join(_ENDINGS)}")
    response = list(completion.token_ids)
    if not response and ending.trained:
        raise DataError(f"{name} has no tokens, though it ended with '{completion.finish_reason}'")
    return _Row(prompt, response, _sampled_logprobs(response, completion.logprobs, name), ending)


def _sampled_logprobs(response: list[int], logprobs: Any, name: str) -> list[float]:
    """Select the log-prob of each sampled token; vLLM may return those of the most likely tokens too."""
    count = 0 if logprobs is None else len(logprobs)
    if count != len(response):
        raise DataError(
            f"{name} has log-probs of {count} of its {len(response)} tokens; set sampling_params.logprobs to 0"
        )
    sampled = []
    for position, token in enumerate(response):
        entry = logprobs[position].get(token)
        if entry is None:
            raise DataError(f"{name} lacks the log-prob of token {token} at position {position} of the response")
        sampled.append(float(entry.logprob))
    return sampled
