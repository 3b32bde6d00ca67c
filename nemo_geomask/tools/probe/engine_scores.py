"""What a probe asks of an engine: log-probs of given tokens, decoded one by one and as a prompt (prefill); a restart.

These functions run in the process of NeMo-RL's generation worker, ``actor``, with its own sampling parameters.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_geomask.errors import EngineError

REPLAY = "nemo_geomask_replay"
"""Key of a request's tokens in ``SamplingParams.extra_args``."""

PROCESSOR = "nemo_geomask.tools.probe.token_replay:TokenReplay"
"""Value for the engine argument ``logits_processors``; its module imports vLLM, so it is named and not imported."""


def decode_scores(
    actor: Any, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Decode given responses, and return the engine's log-prob of each token as NeMo-RL would get it.

    Args:
        options: ``reversed``: True to send the last sequence first; ``batch``: number of them that are sent at once,
            all if it is missing; other keys replace fields of the sampling parameters, such as ``temperature``.

    Returns:
        ``logprobs``: a list for each response; ``settings``, what the requests were sent with.

    Raises:
        EngineError: the engine decoded other tokens, or returned no log-prob for one.
    """
    order = list(range(len(sequences)))[:: -1 if options.get("reversed") else 1]
    size = int(options.get("batch", 0)) or len(order)
    fields = {key: value for key, value in options.items() if key not in ("reversed", "batch")}
    actor.llm.reset_prefix_cache()
    logprobs: list[list[float]] = [[] for _ in sequences]
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        responses = [list(sequences[index][prompt_lengths[index] :]) for index in indices]
        prompts = [{"prompt_token_ids": list(sequences[index][: prompt_lengths[index]])} for index in indices]
        parameters = [_parameters(actor, each, fields) for each in responses]
        outputs = actor.llm.generate(prompts, parameters, use_tqdm=False)
        for index, response, output in zip(indices, responses, outputs, strict=True):
            decoded = list(output.outputs[0].token_ids)
            if decoded != response:
                raise EngineError(
                    f"sequence {index}: the engine was given {len(response)} tokens to decode and decoded {decoded}; "
                    "its sampler does not use the logits processor of the probe"
                )
            logprobs[index] = [
                _logprob_of(entry, token) for entry, token in zip(output.outputs[0].logprobs, response, strict=True)
            ]
    settings = {f"request.{name}": str(getattr(parameters[0], name)) for name in ("temperature", "top_p", "top_k")}
    return {
        "logprobs": logprobs,
        "settings": {**settings, "request.batch": str(size)},
    }


def _parameters(actor: Any, response: Sequence[int], fields: Mapping[str, Any]) -> Any:
    parameters = actor._build_sampling_params(greedy=False, stop_strings=None, max_new_tokens=len(response))
    # The response ends where it ended; a stop token is one of the given tokens.
    parameters.ignore_eos = True
    parameters.stop_token_ids = []
    parameters.extra_args = {REPLAY: list(response)}
    for name, value in fields.items():
        setattr(parameters, name, value)
    return parameters


def prefill_scores(actor: Any, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """Return the engine's log-prob of each token of the responses, with the whole sequence as a prompt.

    vLLM computes them from the raw logits, whatever the temperature and the filters of a request.

    Returns:
        ``logprobs``: a list for each response.
    """
    actor.llm.reset_prefix_cache()
    parameters = actor.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    outputs = actor.llm.generate(
        [{"prompt_token_ids": list(sequence)} for sequence in sequences], parameters, use_tqdm=False
    )
    logprobs = [
        [_logprob_of(output.prompt_logprobs[place], sequence[place]) for place in range(length, len(sequence))]
        for sequence, length, output in zip(sequences, prompt_lengths, outputs, strict=True)
    ]
    return {"logprobs": logprobs}


def _logprob_of(entry: Mapping[int, Any] | None, token: int) -> float:
    if entry is None or token not in entry:
        raise EngineError(f"the engine returned no log-prob of token {token}, which it was given")
    return float(entry[token].logprob)


_ORIGINAL = "nemo_geomask_original_config"
"""Attribute of the worker with its settings as NeMo-RL started it."""


def restart_engine(actor: Any, values: Mapping[str, Any]) -> None:
    """Replace the engine of a generation worker by one with other settings, in the worker's process.

    NeMo-RL's own code constructs the worker anew. That saves most of a start's time, which goes to Ray, imports and the
    trainer; a former engine may leave memory behind on a GPU, so it is for CPUs alone.

    The new engine has no weights before the next refit, and has to be told of them as after NeMo-RL's own start.

    Args:
        values: settings that differ from those NeMo-RL started the worker with, by dotted key below
            ``policy.generation``. A mapping replaces the one that is there.

    Raises:
        EngineError: the engine has several processes.
    """
    if actor.tensor_parallel_size * actor.pipeline_parallel_size > 1:
        raise EngineError("an engine of several processes can't be restarted within its worker")
    if not hasattr(actor, _ORIGINAL):
        setattr(actor, _ORIGINAL, copy.deepcopy(dict(actor.cfg)))
    config: dict[str, Any] = copy.deepcopy(getattr(actor, _ORIGINAL))
    for key, value in values.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    seed = actor.llm.llm_engine.vllm_config.model_config.seed
    fraction = actor.fraction_of_gpus
    actor.shutdown()
    state = importlib.import_module("vllm.distributed.parallel_state")
    state.cleanup_dist_env_and_memory()
    _undo_fp8_patches()
    constructor = type(actor).__init__
    arguments = {"bundle_indices": [0], "fraction_of_gpus": fraction, "seed": seed}
    accepted = inspect.signature(constructor).parameters
    constructor(actor, config, **{name: value for name, value in arguments.items() if name in accepted})
    actor.post_init()


def _undo_fp8_patches() -> None:
    """Take back what NeMo-RL's ``init_fp8`` patches in vLLM for an engine: it refuses to patch a process twice."""
    module: Any = sys.modules.get("nemo_rl.models.generation.vllm.quantization.fp8")
    if module is None or not module.fp8_patches_applied:
        return
    for patcher in module.fp8_state.vllm_patches:
        patcher.stop()
    module.fp8_state = type(module.fp8_state)()
    module.fp8_patches_applied = False
