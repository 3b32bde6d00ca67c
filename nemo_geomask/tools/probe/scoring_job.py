"""Scores of NeMo-RL's workers; runs in its driver, in place of training.

The job's file is JSON: ``frozen``, path of the frozen sequences, which are sampled and written if the file is missing;
``prompts`` and ``generations``, numbers of what is sampled; ``decode`` and ``trainer``, requests by name, each with its
options; ``states``, number of sequences whose hidden states are compared by
layer; ``engine``, settings below ``policy.generation`` with which the engine is restarted first, or null; ``out``, path
of the answer; ``more``, path of the next job's file, or null for none. The answer is written in one piece. The driver
waits for the next job; an empty object ends it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError, EngineError
from nemo_geomask.tools.probe import engine_scores, layer_states, resolved_settings
from nemo_geomask.tools.probe.trainer_scores import (
    batch_of,
    call,
    call_all,
    fill_adapters,
    replaced_settings,
    sample_by_trainer,
    trainer_scores,
    whole_batches,
)
from nemo_geomask.tools.shared.json_output import write_json_file

FUNCTION = f"{__name__}:score"
"""Name of :func:`score` for the process that starts NeMo-RL."""

_TICK = 0.1  # seconds between looks for the next job


def score(
    *, policy: Any, policy_generation: Any, master_config: Any, tokenizer: Any, file: Path, **arguments: Any
) -> None:
    """Score the frozen sequences with the workers of NeMo-RL, and write the answers of one job after the other."""
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
        self._adapters: dict[str, Any] | None = None
        self._loader = arguments.get("wrapped_dataloader", arguments.get("dataloader"))
        self.actors = [] if generation is None else _engines(generation)
        if not self.actors:
            raise ConfigError("the probe needs vLLM's synchronous engine: set policy.generation.backend to vllm")

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores that a job asks for."""
        if job["engine"] is not None:
            for actor in self.actors:
                call(actor, engine_scores.restart_engine, job["engine"])
            self.generation.prepare_refit_info(self.policy.prepare_refit_info())
        refit(self)
        if self._adapters is None:
            self._adapters = self._deliver_adapters()
        frozen_file = Path(job["frozen"])
        if not frozen_file.is_file():
            frozen = _sampled(self.generation, self._loader, self._tokenizer, job)
            self.sample_by_trainer(frozen)
            write_json_file(frozen_file, frozen)
        frozen = json.loads(frozen_file.read_text(encoding="utf-8"))
        sequences, lengths = frozen["sequences"], frozen["prompt_lengths"]
        answer: dict[str, Any] = {"decode": {}, "trainer": {}, "adapters": self._adapters}
        for name, options in job["decode"].items():
            answer["decode"][name] = call(self.actors[0], engine_scores.decode_scores, sequences, lengths, options)
        answer["prefill"] = call(self.actors[0], engine_scores.prefill_scores, sequences, lengths)
        answer["engine_settings"] = call(self.actors[0], resolved_settings.engine_settings)
        try:
            chosen = sequences[: job["states"]]
            states = [call(self.actors[0], layer_states.capture_engine, sequence) for sequence in chosen]
        except Exception as error:  # as in _layers
            states = []
            answer["layers"] = {"error": _cause_of(error)}
        self._end_generation()
        if job["trainer"]:
            self.policy.prepare_for_lp_inference()
        for name, options in job["trainer"].items():
            answer["trainer"][name] = trainer_scores(self.policy, self.config, self._tokenizer, frozen, options)
        if states:
            answer["layers"] = self._layers(frozen, states)
        return answer

    def _deliver_adapters(self) -> dict[str, Any]:
        """Give values to the trainer's adapters, and send them to the engine.

        Returns:
            ``count``: number of adapters; ``is_delivered``: True if the engine got other weights by it.
        """
        # Workers of a pipeline have different adapters; the others have the same.
        count = max(call_all(self.policy.worker_group.workers, fill_adapters))
        if not count:
            return {"count": 0, "is_delivered": True}
        before = call(self.actors[0], resolved_settings.engine_settings)
        refit(self)
        after = call(self.actors[0], resolved_settings.engine_settings)
        return {"count": count, "is_delivered": before["engine.checksum"] != after["engine.checksum"]}

    def sample_by_trainer(self, frozen: dict[str, Any]) -> None:
        """Replace every second response by one that the trainer samples.

        A sampler's own tokens are those that it finds likely: what the engine has excluded, only the trainer samples.
        """
        count = len(frozen["sequences"])
        chosen = range(1, count, 2)
        prompts = [frozen["sequences"][index][: frozen["prompt_lengths"][index]] for index in chosen]
        frozen["by_trainer"], frozen["trainer_error"] = [False] * count, ""
        self._end_generation()
        self.policy.prepare_for_lp_inference()
        try:
            vocabulary = call(self.actors[0], _vocabulary_size)
            sequences, logprobs = sample_by_trainer(
                self.policy, self.config, self._tokenizer, prompts, vocabulary=vocabulary
            )
        except Exception as error:  # the engine's samples alone are enough for a probe, and the report says so
            frozen["trainer_error"] = _cause_of(error)
        else:
            for index, sequence, values in zip(chosen, sequences, logprobs, strict=True):
                frozen["sequences"][index], frozen["sampled"][index] = sequence, values
                frozen["by_trainer"][index] = True
        if self.generation.prepare_for_generation() is False:
            raise EngineError("NeMo-RL could not wake the engine after the trainer had sampled; its log says why")

    def _end_generation(self) -> None:
        # NeMo-RL catches the errors of its workers, and returns False.
        if self.generation.finish_generation() is False:
            raise EngineError("NeMo-RL could not end the engine's generation; its log says why")

    def _layers(self, frozen: Mapping[str, Any], states: list[layer_states.States]) -> dict[str, Any]:
        """Compare hidden states of the first sequences; ``error`` says why there are none."""
        as_they_run: list[dict[str, float]] = []
        replayed: list[dict[str, float]] = []
        heads = []
        try:
            experts = call(self.actors[0], _experts_per_token)
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
            return {"error": _cause_of(error)}
        return {"own": _means(as_they_run), "replayed": _means(replayed), "head": heads, "error": ""}

    def _watched_pass(
        self, sequence: Mapping[str, Any], states: layer_states.States, experts: int, *, replay: bool
    ) -> tuple[list[float], dict[str, float]]:
        workers = self.policy.worker_group.workers
        copies = whole_batches(1, self.policy, self.config)
        data = batch_of(self.config, self._tokenizer, {name: value * copies for name, value in sequence.items()})
        reference = importlib.import_module("ray").put(states)
        call_all(workers, layer_states.watch_trainer, reference, replay)
        try:
            # The engine's prefill, with which the head is compared, ignores all three.
            with replaced_settings(workers, {"temperature": 1.0, "top_p": 1.0, "top_k": None}):
                logprobs = self.policy.get_logprobs(data)["logprobs"]
            answers = call_all(workers, layer_states.compare_trainer, reference, experts, sequence["sequences"][0])
        finally:
            call_all(workers, layer_states.stop_trainer)
        # Each stage of a pipeline has layers of its own.
        differences = {name: value for answer in reversed(answers) for name, value in answer.items()}
        start, end = sequence["prompt_lengths"][0], len(sequence["sequences"][0])
        return logprobs[0, start:end].float().tolist(), differences


def _cause_of(error: Exception) -> str:
    """Return an error in one line; of an error in a worker, which Ray wraps, the worker's own."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _experts_per_token(actor: Any) -> int:
    config = actor.llm.llm_engine.vllm_config.model_config.hf_text_config
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts")
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _vocabulary_size(actor: Any) -> int:
    return int(actor.llm.llm_engine.vllm_config.model_config.get_vocab_size())


def refit(session: Session) -> None:
    """Send the trainer's weights to the engine, by NeMo-RL's own call."""
    colocated = session.config["generation"]["colocated"]["enabled"]
    refit_generation = importlib.import_module("nemo_rl.algorithms.grpo").refit_policy_generation
    refit_generation(session.policy, session.generation, colocated)


def _engines(generation: Any) -> list[Any]:
    workers = generation.worker_group.workers
    return [worker for worker in workers if call(worker, _has_engine)]


def _has_engine(actor: Any) -> bool:
    return hasattr(getattr(actor, "llm", None), "llm_engine")


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
        rows_left = (job["prompts"] - prompts) * job["generations"]  # the loader's batches may hold more
        for index, (start, end) in enumerate(zip(lengths.tolist()[:rows_left], ends[:rows_left], strict=True)):
            frozen["sequences"].append(output["output_ids"][index, :end].tolist())
            frozen["prompt_lengths"].append(start)
            frozen["prompts"].append(prompts + index // job["generations"])
            frozen["sampled"].append(output["logprobs"][index, start:end].tolist())
        prompts += len(ends) // job["generations"]
        if prompts >= job["prompts"]:
            return frozen
    raise EngineError(f"the data set has {prompts} prompts, and the probe was asked for {job['prompts']}")
