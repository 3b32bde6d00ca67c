"""NeMo-RL's generation worker with vLLM, and a Hugging Face model as trainer, in one process and without Ray.

A rehearsal's workers take a minute to start. Here the probe's own jobs run against the same engine, restarted by the
same code, in seconds an arm. What is not NeMo-RL's: the trainer, and the refit, which hands weights over in memory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace

from nemo_geomask.tools.shared.json_output import write_json_file

MISSING = [name for name in ("ray", "vllm", "transformers", "nemo_rl") if importlib.util.find_spec(name) is None]

_VARIABLES = {
    "VLLM_CPU_SGL_KERNEL": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare():
    """Set what has to be set before vLLM is imported: variables and the shims of a rehearsal on CPUs."""
    os.environ.update(_VARIABLES)
    if importlib.util.find_spec("typing_extensions") is not None:
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
        typing.override = typing_extensions.override
    importlib.import_module("nemo_geomask.tools.rehearse.cpu_shims").register()


class _Remote:
    def __init__(self, actor):
        self.actor = actor

    def remote(self, function, *arguments):
        return function(self.actor, *arguments)


def _called_here(module_ray):
    """Ray's functions for actors that live in this process."""
    module_ray.get = lambda value, timeout=None: value
    module_ray.put = lambda value: value
    module_ray.get_gpu_ids = lambda: [0]


class Trainer:
    """As much of a training worker as the probe's jobs use."""

    def __init__(self, folder, dtype):
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.cfg = {"logprob_batch_size": 2}
        self.sampling_params = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=None)

    __ray_call__ = property(_Remote)


class Policy:
    """As much of NeMo-RL's policy as the probe's jobs use."""

    def __init__(self, worker):
        self.worker = worker
        self.worker_group = SimpleNamespace(workers=[worker])

    def prepare_for_lp_inference(self):
        pass

    def prepare_refit_info(self):
        return None

    def get_logprobs(self, data):
        torch = importlib.import_module("torch")
        worker = self.worker
        worker.model.eval()
        size, tokens, lengths = worker.cfg["logprob_batch_size"], data["input_ids"], data["input_lengths"]
        logprobs = torch.zeros(tokens.shape)
        with torch.no_grad():
            for start in range(0, len(tokens), size):
                ids = tokens[start : start + size]
                logits = _logits(worker, ids, lengths[start : start + size])
                kept = _filtered(logits / worker.sampling_params.temperature, worker.sampling_params.top_p)
                values = kept.log_softmax(-1)[:, :-1]
                logprobs[start : start + size, 1:] = values.gather(-1, ids[:, 1:, None])[..., 0]
        return {"logprobs": logprobs}

    def get_topk_logits(self, data, k):
        """The k largest logits of each position, under the temperature alone, as NeMo-RL's."""
        logits = _logits(self.worker, data["input_ids"], data["input_lengths"])
        values, indices = (logits / self.worker.sampling_params.temperature).topk(k, dim=-1)
        return {"topk_logits": values, "topk_indices": indices}


def _logits(worker, ids, lengths):
    torch = importlib.import_module("torch")
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    with torch.no_grad():
        return worker.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()


def _filtered(logits, top_p):
    """Logits within top-p, as NeMo-RL filters them for its trainer."""
    if top_p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return ordered.masked_fill(outside, float("-inf")).scatter(-1, order, ordered.masked_fill(outside, float("-inf")))


class OneProcess:
    """Answers a probe's jobs, as :class:`~nemo_geomask.tools.rehearse.hosted_job.JobSession` does.

    Args:
        folder: folder of the model.
        name: name of the model whose architecture the tiny one has.
        trainer: dtype of the trainer.
    """

    def __init__(self, folder: Path, name="Qwen/Qwen3-0.6B", trainer="float32"):
        prepare()
        plans = importlib.import_module("nemo_geomask.tools.rehearse.tiny_models")
        layout = importlib.import_module("nemo_geomask.tools.check").Layout()
        plans.write_model(plans.tiny_model(name, layout), folder)
        _called_here(importlib.import_module("ray"))
        workers = importlib.import_module("nemo_rl.models.generation.vllm.vllm_worker")
        self.sums = importlib.import_module("nemo_geomask.tools.rehearse.weight_sums")
        job = importlib.import_module("nemo_geomask.tools.probe.scoring_job")

        class Worker(workers.VllmGenerationWorkerImpl):
            __ray_call__ = property(_Remote)

            def post_init(self):
                """NeMo-RL's asks for the devices of the refit, and there is none by device here."""

        vllm = {
            **{f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "expert")},
            "gpu_memory_utilization": 0.1,
            "precision": "float32",
            "load_format": "auto",
            "max_model_len": 80,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "async_engine": False,
            "kv_cache_dtype": "auto",
            "logprobs_mode": "processed_logprobs",
        }
        processor = importlib.import_module("nemo_geomask.tools.probe.engine_scores").PROCESSOR
        config = {
            "model_name": str(folder / "model"),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "max_new_tokens": 48,
            "stop_token_ids": [1],
            "stop_strings": None,
            "colocated": {"enabled": True},
            "vllm_kwargs": {"logits_processors": [processor]},
            "vllm_cfg": vllm,
        }
        self.engine = Worker(config, bundle_indices=[0], fraction_of_gpus=1.0, seed=0)
        self.trainer = Trainer(folder / "model", trainer)
        generation = SimpleNamespace(
            worker_group=SimpleNamespace(workers=[self.engine]),
            finish_generation=lambda: None,
            prepare_for_generation=lambda: None,
            prepare_refit_info=lambda info: None,
        )
        settings = {"logprob_batch_size": 2, "generation": config}
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        self.session = job.Session(Policy(self.trainer), generation, {"policy": settings}, tokenizer, {})
        self.job = job
        self.differences = []
        job.refit = self.refit
        self.workers_started = 1
        self.seed = 11
        """Seed of the prompts."""

    def refit(self, session):
        """Hand the trainer's weights to the engine, and compare their sums."""
        model = self.trainer.model
        # A tied head has no weights of its own, and vLLM loads none for it.
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        weights = {name: value for name, value in model.state_dict().items() if name not in tied}
        if self.engine.llm.llm_engine.vllm_config.cache_config.cache_dtype.startswith("fp8"):
            weights |= _scales(model.config.num_hidden_layers)

        def send(params_generator):
            self.engine.llm.collective_rpc(_load, args=(dict(params_generator),))

        self.sums.sum_streamed(send)(iter(weights.items()))
        sent = self.sums.read_sent_sums()["sums"]
        self.differences = self.sums.compare(sent, self.sums.engine_sums(self.engine)[0])

    def __call__(self, job, *, name, settings, is_fresh):
        frozen = Path(job["frozen"])
        if not frozen.is_file():
            job = {**job, "engine": job["engine"] or {}}
            self._sample(frozen, job)
        with contextlib.ExitStack() as stack:
            faults = importlib.import_module("tests.tools.probe.planted_workers").FAULTS
            for fault, value in (job.get("faults") or {}).items():
                stack.enter_context(faults[fault](self.session, value))
            try:
                write_json_file(Path(job["out"]), self.session.answer({**job, "engine": job["engine"] or {}}))
                error = ""
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        event = {"kind": "weights", "differences": [vars(each) for each in self.differences]}
        return SimpleNamespace(error=error, is_timeout=False, events=(event,))

    def _sample(self, file, job):
        """Sample responses to prompts of three words, as a rehearsal's, by the engine with the job's settings."""
        torch = importlib.import_module("torch")
        restart = importlib.import_module("nemo_geomask.tools.probe.engine_scores").restart_engine
        restart(self.engine, job["engine"])
        self.refit(self.session)
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary = self.trainer.model.config.vocab_size
        prompts = torch.randint(3, vocabulary, (job["prompts"], 3), generator=generator).tolist()
        repeated = [prompt for prompt in prompts for _ in range(job["generations"])]
        make = self.engine._build_sampling_params
        lengths = [24 + index % 20 for index in range(len(repeated))]
        parameters = [make(greedy=False, stop_strings=None, max_new_tokens=length) for length in lengths]
        outputs = self.engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in repeated], parameters, use_tqdm=False
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        content = {
            "sequences": [prompt + response for prompt, response in zip(repeated, tokens, strict=True)],
            "prompt_lengths": [len(prompt) for prompt in repeated],
            "prompts": [index // job["generations"] for index in range(len(repeated))],
            "sampled": [
                [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response, strict=True)]
                for output, response in zip(outputs, tokens, strict=True)
            ],
            "texts": {},
        }
        self.session.sample_by_trainer(content)
        write_json_file(file, content)

    def close(self):
        """Nothing to end but the engine."""
        self.engine.shutdown()


def _scales(layers):
    """The scales of an fp8 cache before their calibration, which NeMo-RL's Megatron worker sends with the weights."""
    torch = importlib.import_module("torch")
    utils = importlib.import_module("nemo_rl.models.generation.vllm.quantization.fp8_train_utils")
    names = [name for layer in range(layers) for name in utils.get_vllm_qkv_scale_names(layer).values()]
    return {name: torch.ones(1) for name in names}


def _load(worker, weights):
    worker.model_runner.model.load_weights(iter(weights.items()))
    worker._maybe_process_fp8_kv_cache()


if __name__ == "__main__":
    print(json.dumps({"missing": MISSING}))
