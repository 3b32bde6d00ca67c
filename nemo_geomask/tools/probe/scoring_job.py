"""Scores of one start of NeMo-RL's workers; runs in its driver, in place of training.

The job's file is JSON: ``frozen``, path of the frozen sequences, which are sampled and written if the file is missing;
``prompts`` and ``generations``, numbers of what is sampled; ``decode`` and ``trainer``, requests by name, each with its
options; ``prefill``, True to score the prompt too; ``out``, path of the answer. The answer is written in one piece.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, EngineError
from nemo_geomask.tools.probe import engine_scores, resolved_settings

__all__ = ["FUNCTION", "score"]

FUNCTION = f"{__name__}:score"
"""Name of :func:`score` for the process that starts NeMo-RL."""

_RAY_TIMEOUT = 3600.0  # seconds


def score(
    *, policy: Any, policy_generation: Any, master_config: Any, tokenizer: Any, file: Path, **arguments: Any
) -> None:
    """Score the frozen sequences with the workers of NeMo-RL, and write the answer.

    Args:
        policy: NeMo-RL's policy.
        policy_generation: NeMo-RL's vLLM.
        master_config: the recipe as NeMo-RL has read it.
        tokenizer: its tokenizer.
        file: the job's file.
        arguments: the other arguments of NeMo-RL's training function.
    """
    job = json.loads(file.read_text(encoding="utf-8"))
    config = master_config if isinstance(master_config, Mapping) else vars(master_config)
    actors = [] if policy_generation is None else _engines(policy_generation)
    if not actors:
        raise ConfigError("the probe needs vLLM's synchronous engine: set policy.generation.backend to vllm")
    colocated = config["policy"]["generation"]["colocated"]["enabled"]
    importlib.import_module("nemo_rl.algorithms.grpo").refit_policy_generation(policy, policy_generation, colocated)
    frozen_file = Path(job["frozen"])
    if not frozen_file.is_file():
        loader = arguments.get("wrapped_dataloader", arguments.get("dataloader"))
        _write(frozen_file, _sampled(policy_generation, loader, tokenizer, job))
    frozen = json.loads(frozen_file.read_text(encoding="utf-8"))
    sequences, lengths = frozen["sequences"], frozen["prompt_lengths"]
    answer: dict[str, Any] = {"decode": {}, "trainer": {}, "prefill": None}
    for name, options in job["decode"].items():
        answer["decode"][name] = _call(actors[0], engine_scores.decode_scores, sequences, lengths, options)
    if job["prefill"]:
        answer["prefill"] = _call(actors[0], engine_scores.prefill_scores, sequences, lengths)
    answer["engine_settings"] = _call(actors[0], resolved_settings.engine_settings)
    policy_generation.finish_generation()
    policy.prepare_for_lp_inference()
    for name, options in job["trainer"].items():
        answer["trainer"][name] = _trainer_scores(policy, config["policy"], tokenizer, frozen, options)
    _write(Path(job["out"]), answer)


def _engines(generation: Any) -> list[Any]:
    workers = generation.worker_group.workers
    return [worker for worker in workers if _call(worker, _has_engine)]


def _has_engine(actor: Any) -> bool:
    return hasattr(getattr(actor, "llm", None), "llm_engine")


def _call(worker: Any, function: Any, *args: Any) -> Any:
    return importlib.import_module("ray").get(worker.__ray_call__.remote(function, *args), timeout=_RAY_TIMEOUT)


def _write(path: Path, content: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


def _sampled(generation: Any, loader: Any, tokenizer: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Sample responses to prompts of the recipe's data, by NeMo-RL's own call."""
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    flatten = importlib.import_module("nemo_rl.data.llm_message_utils").batched_message_log_to_flat_message
    frozen: dict[str, Any] = {"sequences": [], "prompt_lengths": [], "prompts": [], "sampled": []}
    prompts = 0
    for batch in loader:
        repeated = batch.repeat_interleave(job["generations"])
        flat, lengths = flatten(repeated["message_log"], pad_value_dict={"token_ids": tokenizer.pad_token_id})
        data = batches({"input_ids": flat["token_ids"], "input_lengths": lengths})
        output = generation.generate(data, greedy=False)
        ends = output["unpadded_sequence_lengths"].tolist()
        for index, (start, end) in enumerate(zip(lengths.tolist(), ends, strict=True)):
            frozen["sequences"].append(output["output_ids"][index, :end].tolist())
            frozen["prompt_lengths"].append(start)
            frozen["prompts"].append(prompts + index // job["generations"])
            frozen["sampled"].append(output["logprobs"][index, start:end].tolist())
        prompts += len(ends) // job["generations"]
        if prompts >= job["prompts"]:
            return frozen
    raise EngineError(f"the data set has {prompts} prompts, and the probe was asked for {job['prompts']}")


def _trainer_scores(
    policy: Any, config: Mapping[str, Any], tokenizer: Any, frozen: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer's log-probs of the responses, by NeMo-RL's own ``get_logprobs``.

    ``options``: ``reversed``, True for the last sequence first; other keys replace settings of ``policy``, such as
    ``logprob_batch_size``, in all workers for this request.
    """
    torch, ray = importlib.import_module("torch"), importlib.import_module("ray")
    batches = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    order = list(range(len(frozen["sequences"])))[:: -1 if options.get("reversed") else 1]
    multiple = int(config.get("make_sequence_length_divisible_by") or 1)
    longest = max(map(len, frozen["sequences"]))
    width = -(-longest // multiple) * multiple
    tokens = torch.full((len(order), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(order), width)
    for row, index in enumerate(order):
        sequence = frozen["sequences"][index]
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, frozen["prompt_lengths"][index] : len(sequence)] = 1
    lengths = torch.tensor([len(frozen["sequences"][index]) for index in order])
    data = batches(
        {"input_ids": tokens, "input_lengths": lengths, "token_mask": mask, "sample_mask": torch.ones(len(order))}
    )
    workers = policy.worker_group.workers
    settings = {name: value for name, value in options.items() if name != "reversed"}
    before = ray.get([worker.__ray_call__.remote(_replace_settings, settings) for worker in workers])[0]
    ray.get([worker.__ray_call__.remote(resolved_settings.watch_forward) for worker in workers])
    began = time.monotonic()
    try:
        logprobs = policy.get_logprobs(data)["logprobs"]
    finally:
        ray.get([worker.__ray_call__.remote(_replace_settings, before) for worker in workers])
    seconds = time.monotonic() - began
    scores: list[list[float]] = [[] for _ in order]
    for row, index in enumerate(order):
        start, end = frozen["prompt_lengths"][index], len(frozen["sequences"][index])
        scores[index] = logprobs[row, start:end].float().tolist()
    answer = _call(workers[0], resolved_settings.trainer_settings)
    return {"logprobs": scores, "seconds": seconds, "settings": answer}


def _replace_settings(actor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace top-level settings of a training worker, and return the earlier ones."""
    before = {name: actor.cfg.get(name) for name in settings}
    actor.cfg.update(settings)
    return before
