"""NeMo-RL APIs that this package relies on, as data.

``EVERY_RUN`` is compared with NeMo-RL's source before a run starts. Each other group is needed by some settings only,
and is checked when a policy or a worker gets a loss with such a setting.

Not every tested version has all of these APIs. The data plane (the storage through which ``TQPolicy`` exchanges batches
with its workers) and PPO exist since v0.7.0. The single controller, which trains on parts of a batch as they are
generated, exists only in later commits.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nemo_geomask import data_keys
from nemo_geomask.errors import HostAPIError
from nemo_geomask.hosts.nemo_rl.accepted_apis import accepted, check_accepted, not_accepted, warn_of_accepted, way_out
from nemo_geomask.hosts.nemo_rl.facts import (
    DATA_PLANE_POLICY,
    LOSS_CLASS,
    LOSS_MODULE,
    POLICY,
    SETUPS,
    TESTED_VERSIONS,
)
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version, package_folder
from nemo_geomask.hosts.nemo_rl.source_signature import APIState, Uses, compare

WORKER_GROUPS = "nemo_rl.distributed.worker_groups"
LOSS_WRAPPERS = "nemo_rl.algorithms.loss.wrapper"
MEGATRON_TRAIN = "nemo_rl.models.megatron.train"
AUTOMODEL_TRAIN = "nemo_rl.models.automodel.train"
MODEL_UTILS = "nemo_rl.distributed.model_utils"

_EVERY_RUN = "every run"
EVERY_RUN = (
    Uses(
        LOSS_MODULE,
        LOSS_CLASS,
        {"__call__": ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")},
        f"{_EVERY_RUN}, which calls our losses in its place",
        is_replaced=True,
    ),
    *(
        Uses(
            module,
            "",
            {name: ("master_config",)},
            f"{_EVERY_RUN}, which replaces the loss that it returns",
            optional=module != "nemo_rl.algorithms.grpo",
        )
        for module, name in SETUPS
    ),
    Uses(WORKER_GROUPS, "RayWorkerGroup", {"workers": ()}, _EVERY_RUN),
)
"""APIs that every run relies on: how the loss is called, where it is built, and how workers are reached."""

_DATA_PLANE = ("read_from_dataplane", "write_to_dataplane")

_PRESTEP = "the metrics of a step, loss_fn.batch_veto, denominator: kept, budgets and record"
PRESTEP = (
    Uses(*POLICY, {"train": ("data", "loss_fn")}, _PRESTEP),
    Uses(*DATA_PLANE_POLICY, {"train_from_meta": ("meta", "loss_fn")}, _PRESTEP, _DATA_PLANE, optional=True),
    Uses(
        *DATA_PLANE_POLICY,
        {"begin_train_step": ("loss_fn",), "train_microbatches_from_meta": ("meta",), "finish_train_step": ()},
        _PRESTEP,
        (*_DATA_PLANE, "abort_train_step"),
        optional=True,
    ),
)
"""Methods of the policy that send a batch to the workers for training."""

_ANCHOR = "loss_fn.ratio_anchor: gen"
PREV_LOGPROBS = (
    Uses(*POLICY, {"get_logprobs": ("data",)}, _ANCHOR),
    Uses(*DATA_PLANE_POLICY, {"get_logprobs_from_meta": ("meta",)}, _ANCHOR, _DATA_PLANE, optional=True),
)
"""Methods of the policy that compute ``prev_logprobs``."""

_BACKEND = "loss_fn.logprob_backend"
_PACKING = "packed rows in one call of the loss"
_GROUPS = ("vocab_parallel_group", "context_parallel_group")
_PACKING_WRAPPER = {
    "__init__": ("loss_fn", "prepare_fn", "cu_seqlens_q", "cu_seqlens_q_padded", "vocab_parallel_rank", *_GROUPS),
    "__call__": ("next_token_logits", "data", "global_valid_seqs", "global_valid_toks"),
}
PACKED_ROWS = (
    Uses(LOSS_WRAPPERS, "SequencePackingLossWrapper", _PACKING_WRAPPER, _PACKING),
    Uses(LOSS_WRAPPERS, "SequencePackingFusionLossWrapper", _PACKING_WRAPPER, _PACKING),
)
"""Worker code that splits packed rows into sequences and calls the loss for each."""

_SHARD = ("vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index", "inference_only")
_FORWARD = f"{_BACKEND}: geomask"
FORWARD_LOGPROBS = (
    Uses(MODEL_UTILS, "DistributedLogprob", {"forward": (*_SHARD, "group")}, _FORWARD),
    Uses(MODEL_UTILS, "ChunkedDistributedLogprob", {"forward": (*_SHARD, "chunk_size", "tp_group")}, _FORWARD),
    Uses(
        AUTOMODEL_TRAIN,
        "LogprobsPostProcessor",
        {"_compute_local_logprobs": ("self", "logits", "input_ids")},
        _FORWARD,
    ),
)
"""Functions that compute log-probs in forward passes.

The first two take the logits of a vocabulary shard; if ``inference_only`` is True, they save nothing for a backward
pass. The third takes the logits of the whole vocabulary in a DTensor v2 worker.
"""

_HIDDEN = f"{_BACKEND}: geomask_linear"
HIDDEN_STATES = (
    Uses(
        MEGATRON_TRAIN,
        "",
        {"forward_with_post_processing_fn": ("model", "post_processing_fn"), "model_forward": ("model",)},
        _HIDDEN,
    ),
    Uses(
        MEGATRON_TRAIN,
        "LogprobsPostProcessor",
        {"__call__": ("data_dict", "input_ids", "cu_seqlens_padded")},
        _HIDDEN,
    ),
    Uses(AUTOMODEL_TRAIN, "", {"forward_with_post_processing_fn": ("model", "post_processing_fn")}, _HIDDEN),
    Uses(AUTOMODEL_TRAIN, "LossPostProcessor", {"__init__": ("cp_size",)}, _HIDDEN),
    Uses(AUTOMODEL_TRAIN, "LogprobsPostProcessor", {"__init__": ("cp_size", "sampling_params")}, _HIDDEN),
    Uses(MODEL_UTILS, "", {"get_logprobs_from_vocab_parallel_logits": ("input_ids",)}, _HIDDEN),
)
"""Worker code that runs the model and computes log-probs from its output."""

_WORKERS = "nemo_rl.models.policy.workers.dtensor_policy_worker"
DTENSOR_WORKERS = {_WORKERS: False, f"{_WORKERS}_v2": True}
"""Modules of DTensor workers; True if the worker calls its model through ``forward_with_post_processing_fn``."""

_QUANTIZED = "nemo_rl.modelopt.models.policy.workers"
POLICY_WORKERS = {
    f"{_WORKERS}.DTensorPolicyWorker": False,
    f"{_WORKERS}_v2.DTensorPolicyWorkerV2": False,
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": False,
    f"{_QUANTIZED}.dtensor_quant_policy_worker.DTensorQuantPolicyWorker": True,
    f"{_QUANTIZED}.dtensor_quant_policy_worker_v2.DTensorQuantPolicyWorkerV2": True,
    f"{_QUANTIZED}.megatron_quant_policy_worker.MegatronQuantPolicyWorker": True,
}
"""Classes of the workers that receive the loss; True for those that v0.6.0 does not have."""


def receives_loss(worker_class: str) -> bool:
    """Return True if workers of a class, by its dotted name, may be sent the loss.

    NeMo-RL's generation, value and environment workers are not; workers of other packages may be.
    """
    return ".policy." in worker_class or not worker_class.startswith("nemo_rl.")


WORKER_REGISTRIES = (
    "nemo_rl.models.policy.utils",
    "nemo_rl.distributed.ray_actor_environment_registry",
    "nemo_rl.modelopt.registry",
)
"""Modules that contain the dotted names of worker classes, in addition to the module of ``Policy``."""


class DataKeys(NamedTuple):
    """Keys of a batch that a module of NeMo-RL writes or reads, as string literals.

    Attributes:
        module: dotted name.
        keys: the keys.
        owner: class of the module that has them; empty for the complete module.
        optional: True if some tested versions do not have the module.
    """

    module: str
    keys: tuple[str, ...]
    owner: str = ""
    optional: bool = False


_LOSS_KEYS = (
    *(data_keys.PREV_LOGPROBS, data_keys.GENERATION_LOGPROBS, data_keys.REFERENCE_POLICY_LOGPROBS),
    *(data_keys.TOKEN_MASK, "sample_mask", "advantages"),
)
_TRAINER_KEYS = (*_LOSS_KEYS, "input_ids", "input_lengths", "total_reward")
DATA_KEYS = (
    DataKeys(LOSS_MODULE, (*_LOSS_KEYS, data_keys.CURR_LOGPROBS_UNFILTERED), owner=LOSS_CLASS),
    DataKeys("nemo_rl.algorithms.loss.utils", (data_keys.CURR_LOGPROBS_UNFILTERED, "input_ids", "seq_index")),
    DataKeys("nemo_rl.algorithms.grpo", _TRAINER_KEYS),
    DataKeys("nemo_rl.algorithms.ppo", _TRAINER_KEYS, optional=True),
    DataKeys("nemo_rl.algorithms.grpo_sync", _TRAINER_KEYS, optional=True),
    DataKeys("nemo_rl.algorithms.single_controller_utils.config", _LOSS_KEYS, optional=True),
    DataKeys("nemo_rl.data_plane.schema", (*_LOSS_KEYS, "input_ids", "input_lengths"), optional=True),
)
"""Keys of a batch that our losses read, listed for each module of NeMo-RL that writes or reads them.

NeMo-RL's own loss is among these modules. A trainer that renamed a key may still mention the old name, because it
writes its own log; the loss then no longer does.
"""


def compare_all(package: Path) -> list[APIState]:
    """Compare the APIs of all groups in this module with NeMo-RL's source in the package folder ``package``."""
    apis = (*EVERY_RUN, *PRESTEP, *PREV_LOGPROBS, *PACKED_ROWS, *FORWARD_LOGPROBS, *HIDDEN_STATES)
    return [compare(api, package) for api in apis]


def require_every_run() -> None:
    """Check the APIs that every run relies on, and those that the user accepts with ``--accept``.

    Raises:
        HostAPIError: an API differs; the message names it, the installed version and the tested ones.
        ConfigError: an accepted API does not differ.
        MissingDependencyError: NeMo-RL is not importable.
    """
    package = package_folder()
    if accepted():
        differences = [difference for state in compare_all(package) for difference in state.differences]
        check_accepted(differences)
        warn_of_accepted(differences)
    states = [compare(api, package) for api in EVERY_RUN]
    remaining = not_accepted(difference for state in states for difference in state.differences)
    if remaining:
        lines = [
            f"  {state.api}: {state.difference}" for state in states if not set(remaining).isdisjoint(state.differences)
        ]
        raise HostAPIError(
            f"NeMo-RL {describe_version()} ({package}) differs from the versions that nemo_geomask knows (tested: "
            f"{TESTED_VERSIONS}), so a loss selected by loss_fn.name might not be the one that trains:\n"
            + "\n".join(lines)
            + "\n"
            f"Use a tested NeMo-RL, or a version of nemo_geomask that knows this one{way_out(remaining)}. See "
            "docs/how_to/upgrade.md"
        )
