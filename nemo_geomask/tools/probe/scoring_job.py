"""Scores of NeMo-RL's workers; runs in its driver, in place of training.

The job's file is JSON: ``frozen``, path of the frozen sequences, which are sampled and written if the file is missing;
``prompts`` and ``generations``, numbers of what is sampled; ``decode`` and ``trainer``, requests by name, each with its
options; ``prefill``, True to score the prompt too; ``states``, number of sequences whose hidden states are compared by
layer; ``engine``, settings below ``policy.generation`` with which the engine is restarted first, or null; ``out``, path
of the answer; ``more``, path of the next job's file, or null for none. The answer is written in one piece. The driver
waits for the next job; an empty object ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, EngineError
from nemo_geomask.tools.probe import engine_scores, layer_states, resolved_settings
from nemo_geomask.tools.probe.engine_restart import restart_engine
from nemo_geomask.tools.shared.json_output import write_json_file

__all__ = ["FUNCTION", "Session", "refit", "score"]

FUNCTION = f"{__name__}:score"
"""Name of :func:`score` for the process that starts NeMo-RL."""

_RAY_TIMEOUT = 3600.0  # seconds
_SAMPLING = ("temperature", "top_p", "top_k")
"""Options that are sampling parameters, which NeMo-RL's trainers apply to the logits as the engine does."""
_TICK = 0.1  # seconds between looks for the next job


def score(
    *, policy: Any, policy_generation: Any, master_config: Any, tokenizer: Any, file: Path, **arguments: Any
) -> None:
    """Score the frozen sequences with the workers of NeMo-RL, and write the answers of one job after the other.

    Args:
        policy: NeMo-RL's policy.
        policy_generation: NeMo-RL's vLLM.
        master_config: the recipe as NeMo-RL has read it.
        tokenizer: its tokenizer.
        file: the first job's file.
        arguments: the other arguments of NeMo-RL's training function.
    """
    config = master_config if isinstance(master_config, Mapping) else vars(master_config)
    session = Session(policy, policy_generation, config, tokenizer, arguments)
    next_file: Path | None = file
    while next_file is not None:
        while not next_file.is_file():
            time.sleep(_TICK)
        job = json.loads(next_file.read_text(encoding="utf-8"))
        if not job:
            return
        write_json_file(Path(job["out"]), session.answer(job))
        next_file = None if job["more"] is None else Path(job["more"])


class Session:
    """NeMo-RL's workers, and what they answer to jobs.

    Args:
        policy: NeMo-RL's policy.
        generation: NeMo-RL's vLLM.
        config: the recipe.
        tokenizer: NeMo-RL's tokenizer.
        arguments: the other arguments of NeMo-RL's training function.

    Raises:
        ConfigError: vLLM's synchronous engine does not run.
    """

    def __init__(
        self, policy: Any, generation: Any, config: Mapping[str, Any], tokenizer: Any, arguments: Mapping[str, Any]
    ) -> None:
        self.policy = policy
        self.generation = generation
        self.config = config["policy"]
        self._tokenizer = tokenizer
        self._loader = arguments.get("wrapped_dataloader", arguments.get("dataloader"))
        self.actors = [] if generation is None else _engines(generation)
        if not self.actors:
            raise ConfigError("the probe needs vLLM's synchronous engine: set policy.generation.backend to vllm")

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores that a job asks for."""
        seconds: dict[str, float] = {}
        if job["engine"] is not None:
            with _timed(seconds, "engine"):
                for actor in self.actors:
                    _call(actor, restart_engine, job["engine"])
                self.generation.prepare_refit_info(self.policy.prepare_refit_info())
        with _timed(seconds, "refit"):
            refit(self)
        frozen_file = Path(job["frozen"])
        if not frozen_file.is_file():
            with _timed(seconds, "sampling"):
                write_json_file(frozen_file, _sampled(self.generation, self._loader, self._tokenizer, job))
        frozen = json.loads(frozen_file.read_text(encoding="utf-8"))
        sequences, lengths = frozen["sequences"], frozen["prompt_lengths"]
        answer: dict[str, Any] = {"decode": {}, "trainer": {}, "prefill": None, "seconds": seconds}
        with _timed(seconds, "engine's scores"):
            for name, options in job["decode"].items():
                answer["decode"][name] = _call(self.actors[0], engine_scores.decode_scores, sequences, lengths, options)
            if job["prefill"]:
                answer["prefill"] = _call(self.actors[0], engine_scores.prefill_scores, sequences, lengths)
            answer["engine_settings"] = _call(self.actors[0], resolved_settings.engine_settings)
            try:
                chosen = sequences[: job["states"]]
                states = [_call(self.actors[0], layer_states.capture_engine, sequence) for sequence in chosen]
            except Exception as error:  # as in _layers
                states = []
                answer["layers"] = {"error": f"{type(error).__name__}: {error}"}
        self.generation.finish_generation()
        with _timed(seconds, "trainer's scores"):
            if job["trainer"]:
                self.policy.prepare_for_lp_inference()
            for name, options in job["trainer"].items():
                answer["trainer"][name] = _trainer_scores(self.policy, self.config, self._tokenizer, frozen, options)
        if states:
            with _timed(seconds, "hidden states"):
                answer["layers"] = self._layers(frozen, states)
        return answer

    def _layers(self, frozen: Mapping[str, Any], states: list[layer_states.States]) -> dict[str, Any]:
        """Compare hidden states of the first sequences; ``error`` says why there are none."""
        as_they_run: list[dict[str, float]] = []
        replayed: list[dict[str, float]] = []
        heads = []
        try:
            experts = _call(self.actors[0], _experts_per_token)
            for index, each in enumerate(states):
                if not each:
                    raise EngineError(
                        "the engine's layers were not called as modules: it is compiled, or has other names"
                    )
                sequence = {name: [frozen[name][index]] for name in ("sequences", "prompt_lengths")}
                for replay, rows in ((False, as_they_run), (True, replayed)):
                    logprobs, differences = self._watched_pass(sequence, each, experts, replay=replay)
                    rows.append(differences)
                heads.append(logprobs)
        except Exception as error:  # what can't be looked into is reported, and the scores stand
            return {"error": f"{type(error).__name__}: {error}"}
        return {"own": _means(as_they_run), "replayed": _means(replayed), "head": heads, "error": ""}

    def _watched_pass(
        self, sequence: Mapping[str, Any], states: layer_states.States, experts: int, *, replay: bool
    ) -> tuple[list[float], dict[str, float]]:
        workers = self.policy.worker_group.workers
        # As many copies as make every worker compute at least one whole batch.
        copies = len(workers) * int(self.config["logprob_batch_size"])
        data = _batch_of(self.config, self._tokenizer, {name: value * copies for name, value in sequence.items()})
        reference = importlib.import_module("ray").put(states)
        _call_all(workers, layer_states.watch_trainer, reference, replay)
        try:
            logprobs = self.policy.get_logprobs(data)["logprobs"]
            differences = _call(workers[0], layer_states.compare_trainer, reference, experts)
        finally:
            _call_all(workers, layer_states.stop_trainer)
        start, end = sequence["prompt_lengths"][0], len(sequence["sequences"][0])
        return logprobs[0, start:end].float().tolist(), differences


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _experts_per_token(actor: Any) -> int:
    config = actor.llm.llm_engine.vllm_config.model_config.hf_text_config
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts")
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def refit(session: Session) -> None:
    """Send the trainer's weights to the engine, by NeMo-RL's own call."""
    colocated = session.config["generation"]["colocated"]["enabled"]
    refit_generation = importlib.import_module("nemo_rl.algorithms.grpo").refit_policy_generation
    refit_generation(session.policy, session.generation, colocated)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - began, 3)


def _engines(generation: Any) -> list[Any]:
    workers = generation.worker_group.workers
    return [worker for worker in workers if _call(worker, _has_engine)]


def _has_engine(actor: Any) -> bool:
    return hasattr(getattr(actor, "llm", None), "llm_engine")


def _call(worker: Any, function: Any, *args: Any) -> Any:
    return _call_all([worker], function, *args)[0]


def _call_all(workers: Sequence[Any], function: Any, *args: Any) -> list[Any]:
    """Call a function in the processes of all workers at once, with each worker as its first argument."""
    calls = [worker.__ray_call__.remote(function, *args) for worker in workers]
    return list(importlib.import_module("ray").get(calls, timeout=_RAY_TIMEOUT))


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
            ids = sorted({token for sequence in frozen["sequences"] for token in sequence})
            frozen["texts"] = {str(token): tokenizer.decode([token]) for token in ids}
            return frozen
    raise EngineError(f"the data set has {prompts} prompts, and the probe was asked for {job['prompts']}")


def _batch_of(config: Mapping[str, Any], tokenizer: Any, frozen: Mapping[str, Any]) -> Any:
    """Return sequences as a batch of NeMo-RL's, padded on the right."""
    torch = importlib.import_module("torch")
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


def _trainer_scores(
    policy: Any, config: Mapping[str, Any], tokenizer: Any, frozen: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer's log-probs of the responses, by NeMo-RL's own ``get_logprobs``.

    ``options``: ``reversed``, True for the last sequence first; other keys replace sampling parameters, or settings of
    ``policy`` such as ``logprob_batch_size``, in all workers for this request.
    """
    order = list(range(len(frozen["sequences"])))[:: -1 if options.get("reversed") else 1]
    names = ("sequences", "prompt_lengths")
    data = _batch_of(config, tokenizer, {name: [frozen[name][index] for index in order] for name in names})
    workers = policy.worker_group.workers
    settings = {name: value for name, value in options.items() if name != "reversed"}
    before = _call_all(workers, _replace_settings, settings)[0]
    _call_all(workers, resolved_settings.watch_forward)
    began = time.monotonic()
    try:
        logprobs = policy.get_logprobs(data)["logprobs"]
    finally:
        _call_all(workers, _replace_settings, before)
    seconds = time.monotonic() - began
    scores: list[list[float]] = [[] for _ in order]
    for row, index in enumerate(order):
        start, end = frozen["prompt_lengths"][index], len(frozen["sequences"][index])
        scores[index] = logprobs[row, start:end].float().tolist()
    answer = _call(workers[0], resolved_settings.trainer_settings)
    return {"logprobs": scores, "seconds": seconds, "settings": answer}


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
