"""A NeMo-RL of a few lines, with the APIs that we rely on: tests that need no NeMo-RL install against it."""

from __future__ import annotations

import textwrap
from pathlib import Path

LOSS = """
from pydantic import BaseModel
from typing import Protocol


class LossFunction(Protocol):
    def __call__(self, data): ...


class ClippedPGLossConfig(BaseModel, extra="allow"):
    token_level_loss: bool = True
    ratio_clip_min: float = 0.2
    reference_policy_kl_penalty: float = 0.01
    use_importance_sampling_correction: bool = False
    force_on_policy_ratio: bool = False


class ClippedPGLossFn(LossFunction):
    def __init__({parameters}):
        if isinstance(cfg, dict):
            cfg["token_level_loss"]
        else:
            assert getattr(cfg, "nonfinite", None) != "raise"
        self.cfg = cfg

    def __call__({loss_call}):
        data["advantages"], data["token_mask"], data["sample_mask"], data["prev_logprobs"]
        data["generation_logprobs"], data["reference_policy_logprobs"], data["curr_logprobs_unfiltered"]
        raise NotImplementedError
"""

DICT_CONFIG = """
class ClippedPGLossConfig(TypedDict):
    token_level_loss: bool
    ratio_clip_min: float
    reference_policy_kl_penalty: float
    use_importance_sampling_correction: bool
"""

ALGORITHM = """
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy


class MasterConfig:
    def __init__(self, loss_fn, **sections):
        self.loss_fn = loss_fn
        self.policy = {{"sequence_packing": {{"enabled": False}}, **sections.pop("policy", {{}})}}
        self.__dict__.update(sections)


class Logger:
    def __init__(self):
        self.logged = []

    def log_batched_dict_as_jsonl(self, to_log, filename):
        self.logged.append(filename)

    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False):
        self.logged += sorted(metrics)


class CheckpointManager:
    def get_latest_checkpoint_path(self):
        return "checkpoints/step_7"


def setup({setup}):
    section = master_config["policy"] if isinstance(master_config, dict) else master_config.policy
    loss_config = master_config["loss_fn"] if isinstance(master_config, dict) else master_config.loss_fn
    policy = (policy_factory or Policy)(config=section)
    loss_fn = {call}
    return policy, "generation", loss_fn, Logger(), CheckpointManager(), loss_config
"""

TRAINER = """

def grpo_train(batch):
    train_data = {"input_ids": batch, "input_lengths": batch, "token_mask": batch, "sample_mask": batch["total_reward"]}
    train_data["generation_logprobs"] = train_data["prev_logprobs"] = batch
    train_data["reference_policy_logprobs"] = train_data["advantages"] = batch
"""

CONTROLLER = """
import dataclasses
from typing import Any

from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy


@dataclasses.dataclass
class SingleControllerActorArgs:
    trainer_handle: Any
    loss_fn: Any
    last_checkpoint_path: Any = None


def setup_single_controller(master_config, tokenizer=None):
    policy = Policy(config=master_config.policy)
    return SingleControllerActorArgs(policy, ClippedPGLossFn(master_config.loss_fn)), "timing"
"""

RAY = """
import pickle
import types

cloudpickle = types.SimpleNamespace(
    dumps=pickle.dumps, register_pickle_by_value=lambda module: None, unregister_pickle_by_value=lambda module: None
)


def is_initialized():
    return {initialized}


def get(calls, timeout=None):
    return list(calls)
"""

WORKERS = """
class Call:
    def __init__(self, actor):
        self.actor = actor

    def remote(self, function, *arguments):
        self.actor.calls.append((function.__name__, arguments))
        return function(self.actor, *arguments)


class Actor:
    def __init__(self):
        self.calls = []

    @property
    def __ray_call__(self):
        return Call(self)


class RayWorkerGroup:
    def __init__(self, size=2):
        self._workers = [Actor() for _ in range(size)]

    @property
    def workers(self):
        return self._workers
"""

REGISTRY = """
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": "/venv/bin/python",
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker": "uv run --locked",
}
"""

VENVS = """
DEFAULT_VENV_DIR = "/nowhere"
"""

POLICY = """
import abc

from nemo_rl.distributed.worker_groups import RayWorkerGroup

WORKERS = [
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
]


class PolicyInterface(abc.ABC): ...


class GenerationInterface(abc.ABC): ...


class Policy(PolicyInterface, GenerationInterface):
    def __init__(self, config, **kwargs):
        self.cfg = config
        self.worker_group = RayWorkerGroup()

    def train({parameters}):
        return {{"all_mb_metrics": {{"geomask/a_max": [1.0, 3.0], "loss": [1.0, 2.0]}}}}

    def get_logprobs(self, data, timer=None):
        raise NotImplementedError
"""

POLICY_WORKERS = {
    "__init__": "",
    "dtensor_policy_worker": "DTensorPolicyWorker",
    "dtensor_policy_worker_v2": "DTensorPolicyWorkerV2",
    "megatron_policy_worker": "MegatronPolicyWorker",
}

MEGATRON = """
def model_forward(model, data_dict, input_ids_cp_sharded):
    return model(input_ids_cp_sharded)


def forward_with_post_processing_fn(data_iterator, model, post_processing_fn):
    return model_forward(model, {}, next(data_iterator)), post_processing_fn


class LogprobsPostProcessor:
    def __call__(self, data_dict, input_ids, cu_seqlens_padded):
        return lambda output: output
"""

UTILS = """
KEYS = "curr_logprobs_unfiltered", "input_ids", "seq_index"
"""

WRAPPER = """
class SequencePackingLossWrapper:
    def __init__(
        self,
        loss_fn,
        prepare_fn,
        cu_seqlens_q,
        cu_seqlens_q_padded=None,
        vocab_parallel_rank=None,
        vocab_parallel_group=None,
        context_parallel_group=None,
    ):
        self.loss_fn = loss_fn

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        return "NeMo-RL's own"
"""


# To be looked at: as elsewhere, what it needs is only where its workers run.
AUTOMODEL = """
import nemo_automodel_is_not_here


def forward_with_post_processing_fn(model, post_processing_fn, processed_mb):
    pass


class LossPostProcessor:
    def __init__(self, loss_fn, cp_size):
        pass


class LogprobsPostProcessor:
    def __init__(self, cp_size, sampling_params=None):
        pass

    def _compute_local_logprobs(self, logits, input_ids):
        pass
"""

MODEL_UTILS = """
def get_logprobs_from_vocab_parallel_logits(vocab_parallel_logits, input_ids, seq_index=None):
    pass


class DistributedLogprob:
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False):
        return "NeMo-RL's own"

    @classmethod
    def apply(cls, *given):
        return cls.forward(None, *given)


class ChunkedDistributedLogprob(DistributedLogprob):
    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        return "NeMo-RL's own, in chunks"
"""


def write(
    folder: Path,
    *,
    parameters: str = "self, cfg, use_fused_linear_logprobs=False",
    loss_call: str = "self, next_token_logprobs, data, global_valid_seqs, global_valid_toks",
    call: str = "ClippedPGLossFn(loss_config)",
    setup: str = "master_config, tokenizer=None, policy_factory=None",
    version: str = "9.8.7",
    pydantic: bool = True,
    single_controller: bool = False,
    ray_runs: bool = False,
    train: str = "self, data, loss_fn, eval_mode=False",
) -> Path:
    """Write the package ``nemo_rl`` into ``folder``, and a ``ray`` that runs everything in the calling process."""
    loss = LOSS.format(parameters=parameters, loss_call=loss_call)
    if not pydantic:
        start, end = loss.index("class ClippedPGLossConfig"), loss.index("class ClippedPGLossFn")
        loss = "from typing import TypedDict\n" + loss[:start] + DICT_CONFIG + "\n\n" + loss[end:]
    files = {
        "../ray/__init__.py": RAY.format(initialized=ray_runs),
        "__init__.py": f"__version__ = {version!r}\n",
        "algorithms/__init__.py": "",
        "algorithms/loss/__init__.py": "from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn\n",
        "algorithms/loss/loss_functions.py": loss,
        "algorithms/loss/wrapper.py": WRAPPER + WRAPPER.replace("PackingLoss", "PackingFusionLoss"),
        "algorithms/loss/utils.py": UTILS,
        "algorithms/grpo.py": ALGORITHM.format(call=call, setup=setup) + TRAINER,
        "models/__init__.py": "",
        "models/automodel/__init__.py": "",
        "models/automodel/train.py": AUTOMODEL,
        "models/megatron/__init__.py": "",
        "models/megatron/train.py": MEGATRON,
        "models/policy/__init__.py": "",
        "models/policy/lm_policy.py": POLICY.format(parameters=train),
        **{
            f"models/policy/workers/{module}.py": f"class {name}: ...\n" if name else ""
            for module, name in POLICY_WORKERS.items()
        },
        "distributed/__init__.py": "",
        "distributed/model_utils.py": MODEL_UTILS,
        "distributed/ray_actor_environment_registry.py": "ACTOR_ENVIRONMENT_REGISTRY = {}\n",
        "distributed/worker_groups.py": WORKERS,
        "utils/__init__.py": "",
        "utils/venvs.py": "DEFAULT_VENV_DIR = '/default'\n",
    }
    if ray_runs:
        files["distributed/ray_actor_environment_registry.py"] = REGISTRY
        files |= {"utils/__init__.py": "", "utils/venvs.py": VENVS}
    if single_controller:
        files["algorithms/single_controller_utils/__init__.py"] = ""
        files["algorithms/single_controller_utils/setup.py"] = CONTROLLER
    for name, text in files.items():
        path = folder / "nemo_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder
