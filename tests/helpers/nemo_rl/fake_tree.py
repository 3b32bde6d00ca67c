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
        self.cfg = cfg

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
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

BUILDER = """
from nemo_rl.algorithms.loss import ClippedPGLossFn


def setup(config):
    loss_fn = {call}
    return loss_fn
"""

TRAINER = """

def grpo_train(batch):
    train_data = {"input_ids": batch, "input_lengths": batch, "token_mask": batch, "sample_mask": batch["total_reward"]}
    train_data["generation_logprobs"] = train_data["prev_logprobs"] = batch
    train_data["reference_policy_logprobs"] = train_data["advantages"] = batch
"""

MASKING = """

def compute_and_apply_seq_logprob_error_masking(train_data, rewards, seq_logprob_error_threshold):
    return {}
"""

WORKERS = """
class ActorClass:
    def __init__(self, started):
        self.started = started

    def options(self, **options):
        return self

    def remote(self, ray_actor_class_fqn, *args, **kwargs):
        return Handle(ray_actor_class_fqn, self.started)


class Handle:
    def __init__(self, actor, started):
        self.create_worker = Method(actor, started)


class Method:
    def __init__(self, actor, started):
        self.actor, self.started = actor, started

    def remote(self, *args, **options):
        self.started.append(self.actor)
        return args, options


class RayWorkerBuilder:
    class IsolatedWorkerInitializer:
        def __init__(self, ray_actor_class_fqn, *init_args, **init_kwargs): ...

        def create_worker(
            self, placement_group, placement_group_bundle_index, num_gpus, bundle_indices=None, **extra_options
        ): ...

    # As ray.remote leaves it.
    IsolatedWorkerInitializer = ActorClass([])

    def __init__(self, ray_actor_class_fqn="", *args, **kwargs):
        self.ray_actor_class_fqn = ray_actor_class_fqn


class RayWorkerGroup:
    def __init__(
        self,
        cluster,
        remote_worker_builder,
        workers_per_node=None,
        name_prefix="",
        bundle_indices_list=None,
        sharding_annotations=None,
        env_vars={},
    ):
        self._workers = list(cluster)

    @property
    def workers(self):
        return self._workers
"""

POLICY = """
WORKERS = [
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
]


class Policy:
    def train({parameters}):
        raise NotImplementedError

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


def prepare_loss_input(
    logits, data, loss_fn, vocab_parallel_group=None, context_parallel_group=None, sampling_params=None
):
    return {"logits": logits}, data
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


class SequencePackingFusionLossWrapper:
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
    parameters: str = "self, cfg",
    call: str = "ClippedPGLossFn(config)",
    version: str = "9.8.7",
    pydantic: bool = True,
    single_controller: bool = False,
    train: str = "self, data, loss_fn, eval_mode=False",
) -> Path:
    """Write the package ``nemo_rl`` into ``folder``."""
    loss = LOSS.format(parameters=parameters)
    if not pydantic:
        start, end = loss.index("class ClippedPGLossConfig"), loss.index("class ClippedPGLossFn")
        loss = "from typing import TypedDict\n" + loss[:start] + DICT_CONFIG + "\n\n" + loss[end:]
    files = {
        "__init__.py": f"__version__ = {version!r}\n",
        "algorithms/__init__.py": "",
        "algorithms/loss/__init__.py": "from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn\n",
        "algorithms/loss/loss_functions.py": loss,
        "algorithms/loss/utils.py": UTILS,
        "algorithms/loss/wrapper.py": WRAPPER,
        "algorithms/grpo.py": BUILDER.format(call=call) + TRAINER + MASKING,
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
    if single_controller:
        files["algorithms/single_controller_utils/__init__.py"] = (
            "raise ImportError('not needed to look at setup.py')\n"
        )
        files["algorithms/single_controller_utils/setup.py"] = BUILDER.format(call=call)
    for name, text in files.items():
        path = folder / "nemo_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder
