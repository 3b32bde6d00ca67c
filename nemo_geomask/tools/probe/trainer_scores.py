"""What a probe asks of a trainer: log-probs of given tokens, samples of its own, and values for its adapters.

NeMo-RL's ``get_logprobs`` gives the log-probs and its ``get_topk_logits`` the samples, as they do in training. A new
adapter (LoRA) changes nothing until it was trained, since its second matrix is zero; with values, an adapter that a
refit does not deliver shows.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.probe import resolved_settings

_SAMPLING = ("temperature", "top_p", "top_k")
"""Options that are sampling parameters, which NeMo-RL's trainers apply to the logits as the engine does."""
_MOST_LOGITS = 4096  # of a position; all of them for the vocabulary of a tiny model
_SEED = 20261
_RAY_TIMEOUT = 3600.0  # seconds
_SECOND_MATRIX = re.compile(r"(lora_(\w+_)?B|adapter\.linear_out)(\.weight)?$")
"""Name of the matrix that begins as zero, in Automodel's adapters, also of experts, and in Megatron-Bridge's."""
_STANDARD_DEVIATION = 0.1


def call(worker: Any, function: Any, *args: Any) -> Any:
    """Call a function in a worker's process, with the worker as its first argument."""
    return call_all([worker], function, *args)[0]


def call_all(workers: Sequence[Any], function: Any, *args: Any) -> list[Any]:
    """Call a function in the processes of all workers at once, with each worker as its first argument."""
    calls = [worker.__ray_call__.remote(function, *args) for worker in workers]
    return list(importlib.import_module("ray").get(calls, timeout=_RAY_TIMEOUT))


def batch_of(config: Mapping[str, Any], tokenizer: Any, frozen: Mapping[str, Any]) -> Any:
    """Return sequences as a batch of NeMo-RL's, padded on the right."""
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    sequences, prompt_lengths = frozen["sequences"], frozen["prompt_lengths"]
    multiple = int(config.get("make_sequence_length_divisible_by") or 1)
    width = -(-max(map(len, sequences)) // multiple) * multiple
    tokens = torch.full((len(sequences), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(sequences), width)
    for row, (sequence, start) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, start : len(sequence)] = 1
    lengths = torch.tensor(list(map(len, sequences)))
    samples = torch.ones(len(sequences))
    return batches({"input_ids": tokens, "input_lengths": lengths, "token_mask": mask, "sample_mask": samples})


def trainer_scores(
    policy: Any, config: Mapping[str, Any], tokenizer: Any, frozen: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer's log-probs of the responses.

    Args:
        options: ``reversed``, True for the last sequence first; other keys replace sampling parameters, or settings of
            ``policy`` such as ``logprob_batch_size``, in all workers for this request.

    Returns:
        ``logprobs``: a list for each response; ``settings``, what the forward passes really used.
    """
    workers = policy.worker_group.workers
    count = len(frozen["sequences"])
    order = list(range(count))[:: -1 if options.get("reversed") else 1]
    rows = [order[row % count] for row in range(whole_batches(count, policy, config))]
    names = ("sequences", "prompt_lengths")
    data = batch_of(config, tokenizer, {name: [frozen[name][index] for index in rows] for name in names})
    settings = {name: value for name, value in options.items() if name != "reversed"}
    with replaced_settings(workers, settings):
        call_all(workers, resolved_settings.watch_forward)
        logprobs = policy.get_logprobs(data)["logprobs"]
        resolved = call(workers[0], resolved_settings.trainer_settings)
    scores: list[list[float]] = [[] for _ in order]
    for row, index in enumerate(order):
        start, end = frozen["prompt_lengths"][index], len(frozen["sequences"][index])
        scores[index] = logprobs[row, start:end].float().tolist()
    return {"logprobs": scores, "settings": resolved}


def whole_batches(count: int, policy: Any, config: Mapping[str, Any]) -> int:
    """Return the smallest number of rows, at least ``count``, of which every worker computes whole batches."""
    multiple = len(policy.worker_group.workers) * int(config["logprob_batch_size"])
    return -(-count // multiple) * multiple


@contextlib.contextmanager
def replaced_settings(workers: Sequence[Any], settings: Mapping[str, Any]) -> Iterator[None]:
    """Replace settings of the training workers within the context, in which excluded tokens have a log-prob of -inf.

    NeMo-RL sets the log-prob of a token that top-p or top-k excludes to 0, so that the loss leaves it out.
    """
    before = call_all(workers, _replace_settings, settings)[0]
    call_all(workers, _keep_excluded)
    try:
        yield
    finally:
        call_all(workers, _mask_excluded)
        call_all(workers, _replace_settings, before)


_MASKING = "mask_out_neg_inf_logprobs"
# Of this process: the patches of that function that are in force.
_patches: list[patch.Patch] = []


def _keep_excluded(actor: Any) -> None:
    module = importlib.import_module("nemo_rl.algorithms.utils")
    if hasattr(module, _MASKING):
        namespaces = patch.nemo_rl_namespaces(actor)
        _patches.append(patch.function(module, _MASKING, lambda original: _as_they_are, namespaces=namespaces))
        _patches[-1].apply()


def _as_they_are(logprobs: Any, *args: Any, **kwargs: Any) -> Any:
    return logprobs


def _mask_excluded(actor: Any) -> None:
    while _patches:
        _patches.pop().undo()


def _replace_settings(actor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace sampling parameters or top-level settings of a training worker, and return the earlier ones."""
    before: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _SAMPLING:
            sampling = actor.sampling_params
            before[name] = getattr(sampling, name)
            setattr(sampling, name, value)
        else:
            before[name] = actor.cfg.get(name)
            actor.cfg[name] = value
    return before


def sample_by_trainer(
    policy: Any, config: Mapping[str, Any], tokenizer: Any, prompts: Sequence[Sequence[int]], *, vocabulary: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample a response to each prompt from the trainer, with the recipe's temperature, top-p and top-k.

    Each token costs a forward pass over all sequences.

    Returns:
        The sequences, each a prompt and its response, and the log-probs of each response. A response ends with a stop
        token, or at ``policy.generation.max_new_tokens``.
    """
    generation = config["generation"]
    stop_tokens = {tokenizer.eos_token_id, *(generation.get("stop_token_ids") or ())}
    generator = torch.Generator().manual_seed(_SEED)
    sequences = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    copies = whole_batches(len(prompts), policy, config)
    count = min(vocabulary, _MOST_LOGITS)
    for _ in range(int(generation["max_new_tokens"])):
        is_open = [
            len(row) == len(prompt) or row[-1] not in stop_tokens
            for row, prompt in zip(sequences, prompts, strict=True)
        ]
        if not any(is_open):
            break
        rows = [sequences[index % len(sequences)] for index in range(copies)]
        data = batch_of(config, tokenizer, {"sequences": rows, "prompt_lengths": list(map(len, rows))})
        output = policy.get_topk_logits(data, k=count)
        # Columns of padding would displace tokens.
        while count < _MOST_LOGITS and (width := int(output["topk_indices"].max()) + 1) > count:
            count = min(width, _MOST_LOGITS)
            output = policy.get_topk_logits(data, k=count)
        for index, sequence in enumerate(sequences):
            if not is_open[index]:
                continue
            last = len(sequence) - 1
            distribution = _distribution(
                output["topk_logits"][index, last], output["topk_indices"][index, last], vocabulary, generation
            )
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            sequence.append(token)
            logprobs[index].append(float(distribution[token]))
    return sequences, logprobs


def _distribution(logits: Any, ids: Any, vocabulary: int, generation: Mapping[str, Any]) -> Any:
    """Return the log-probs of all token ids, [vocabulary] float64, from the largest logits of a position.

    NeMo-RL's trainers apply the temperature to these logits, and neither top-p nor top-k.
    """
    apply_filter = importlib.import_module("nemo_rl.algorithms.logits_sampling_utils").apply_top_k_top_p
    is_token = ids < vocabulary
    full = torch.full((vocabulary,), float("-inf"), dtype=torch.float32)
    full[ids[is_token]] = logits[is_token].float()
    kept, _ = apply_filter(full[None], generation.get("top_k"), generation.get("top_p", 1.0))
    return kept[0].double().log_softmax(-1)


def fill_adapters(actor: Any) -> int:
    """Fill the second matrices of a training worker's adapters with noise, and return their number.

    A matrix, or this worker's shard of it, gets values that depend on its name and shape alone: the same ones in every
    start with the same layout.
    """
    count = 0
    with torch.no_grad():
        for model in resolved_settings.trainer_models(actor):
            for name, parameter in model.named_parameters():
                if _SECOND_MATRIX.search(name):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    noise = torch.randn(local.shape, generator=generator)
                    local.copy_(_STANDARD_DEVIATION * noise)
                    count += 1
    return count
