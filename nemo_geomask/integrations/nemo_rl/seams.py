"""Where NeMo-RL builds and calls its policy loss, starts its workers, and what single settings need of it: as data."""

from __future__ import annotations

from nemo_geomask.integrations.nemo_rl.source import (
    LOSS_CLASS,
    TESTED,
    Builder,
    SeamError,
    SeamState,
    Signature,
    Uses,
    compared,
    root,
    version,
)

__all__ = [
    "BEFORE_STEP",
    "DTENSOR_WORKERS",
    "HIDDEN_STATES",
    "LOSS_MODULE",
    "PREV_LOGPROBS",
    "RECORD",
    "SCORING",
    "SEAMS",
    "WORKER_CODE",
    "inspect",
    "require",
]

LOSS_MODULE = "nemo_rl.algorithms.loss.loss_functions"
_CREATE_WORKER = ("self", "placement_group", "placement_group_bundle_index", "num_gpus", "bundle_indices")
_WORKER_GROUP = (
    *("self", "cluster", "remote_worker_builder", "workers_per_node", "name_prefix"),
    *("bundle_indices_list", "sharding_annotations", "env_vars"),
)

SEAMS: tuple[Signature | Builder, ...] = (
    Signature(
        LOSS_MODULE,
        f"{LOSS_CLASS}.__init__",
        (("self", "cfg"), ("self", "cfg", "use_fused_linear_logprobs")),
    ),
    Signature(
        LOSS_MODULE,
        f"{LOSS_CLASS}.__call__",
        (("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),),
    ),
    Builder("nemo_rl.algorithms.grpo"),
    Builder("nemo_rl.algorithms.ppo", optional=True),
    Builder("nemo_rl.algorithms.single_controller_utils.setup", optional=True),
    Signature(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerBuilder.IsolatedWorkerInitializer.__init__",
        (("self", "ray_actor_class_fqn", "*init_args", "**init_kwargs"),),
    ),
    Signature(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerBuilder.IsolatedWorkerInitializer.create_worker",
        ((*_CREATE_WORKER, "**extra_options"), (*_CREATE_WORKER, "num_gpus_per_node", "**extra_options")),
    ),
    Signature("nemo_rl.distributed.worker_groups", "RayWorkerGroup.__init__", (_WORKER_GROUP,)),
    Signature("nemo_rl.distributed.worker_groups", "RayWorkerGroup.workers", (("self",),)),
)
"""All that this package relies on; v0.6.0 has neither PPO nor the single controller, v0.7.0 no single controller."""


_TQ = ("nemo_rl.models.policy.tq_policy", "TQPolicy")
_DATA_PLANE = ("read_from_dataplane", "write_to_dataplane")
_VETO = "a step's metrics, loss_fn.batch_veto, denominator: kept, budgets and record"
BEFORE_STEP = (
    Uses("nemo_rl.models.policy.lm_policy", "Policy", {"train": ("data", "loss_fn")}, _VETO),
    Uses(*_TQ, {"train_from_meta": ("meta", "loss_fn")}, _VETO, _DATA_PLANE, optional=True),
    Uses(
        *_TQ,
        {"begin_train_step": ("loss_fn",), "train_microbatches_from_meta": ("meta",), "finish_train_step": ()},
        _VETO,
        (*_DATA_PLANE, "abort_train_step"),
        optional=True,
    ),
)
"""Where a batch is handed to the workers; v0.6.0 has no data plane, v0.7.0 none that is streamed into."""

_ANCHOR = "loss_fn.ratio_anchor: gen"
PREV_LOGPROBS = (
    Uses("nemo_rl.models.policy.lm_policy", "Policy", {"get_logprobs": ("data",)}, _ANCHOR),
    Uses(*_TQ, {"get_logprobs_from_meta": ("meta",)}, _ANCHOR, _DATA_PLANE, optional=True),
    Uses(
        "nemo_rl.algorithms.grpo",
        "",
        {"compute_and_apply_seq_logprob_error_masking": ("train_data", "seq_logprob_error_threshold")},
        _ANCHOR,
    ),
)
"""Who is asked for ``prev_logprobs``, and who masks by them; nothing else asks for them."""

_ESTIMATORS = ("GRPO", "GDPO", "ReinforcePlusPlus", "RawReward", "Generalized", "OPD")
RECORD = tuple(
    Uses(
        "nemo_rl.algorithms.advantage_estimator",
        f"{name}AdvantageEstimator",
        {"compute_advantage": ("rewards",)},
        "loss_fn.record",
        optional=True,
    )
    for name in _ESTIMATORS
)
"""Who hears a batch's rewards; v0.6.0 has three of them."""

_LOGIT = "loss_fn.logprob_backend"
_PACKING = "loss_fn.logprob_backend and packed rows in one call"
_GROUPS = ("vocab_parallel_group", "context_parallel_group")
_UNPACKING = {
    "__init__": (
        *("loss_fn", "prepare_fn", "cu_seqlens_q", "cu_seqlens_q_padded", "vocab_parallel_rank"),
        *_GROUPS,
    ),
    "__call__": ("next_token_logits", "data", "global_valid_seqs", "global_valid_toks"),
}
_WRAPPERS = "nemo_rl.algorithms.loss.wrapper"
_PREPARE = ("logits", "data", "loss_fn", *_GROUPS, "sampling_params")
WORKER_CODE = (
    Uses("nemo_rl.algorithms.loss.utils", "", {"prepare_loss_input": _PREPARE}, _LOGIT),
    Uses(_WRAPPERS, "SequencePackingLossWrapper", _UNPACKING, _PACKING),
    Uses(_WRAPPERS, "SequencePackingFusionLossWrapper", _UNPACKING, _PACKING),
)
"""Where a worker turns logits into what a loss takes, and unpacks packed rows."""

_SHARDS = ("vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index")
_AUTOMODEL = "nemo_rl.models.automodel.train"
_MODEL_UTILS, _SCORED = "nemo_rl.distributed.model_utils", f"{_LOGIT}: geomask"
SCORING = (
    Uses(_MODEL_UTILS, "DistributedLogprob", {"forward": _SHARDS}, _SCORED, last=("group", "inference_only")),
    Uses(
        _MODEL_UTILS,
        "ChunkedDistributedLogprob",
        {"forward": (*_SHARDS, "chunk_size")},
        _SCORED,
        last=("tp_group", "inference_only"),
    ),
    Uses(_AUTOMODEL, "LogprobsPostProcessor", {"_compute_local_logprobs": ("self", "logits", "input_ids")}, _SCORED),
)
"""What makes log-probs of a vocabulary shard's logits, forward only where it is told so by its last argument; and of a
whole vocabulary's in a DTensor v2 worker."""

_MEGATRON = "nemo_rl.models.megatron.train"
_HIDDEN = "loss_fn.logprob_backend: geomask_linear"
HIDDEN_STATES = (
    Uses(
        _MEGATRON,
        "",
        {"forward_with_post_processing_fn": ("model", "post_processing_fn"), "model_forward": ("model",)},
        _HIDDEN,
    ),
    Uses(
        _MEGATRON,
        "LogprobsPostProcessor",
        {"__call__": ("data_dict", "input_ids", "cu_seqlens_padded")},
        _HIDDEN,
    ),
    Uses(_AUTOMODEL, "", {"forward_with_post_processing_fn": ("model", "post_processing_fn")}, _HIDDEN),
    Uses(_AUTOMODEL, "LossPostProcessor", {"__init__": ("cp_size",)}, _HIDDEN),
    Uses(_AUTOMODEL, "LogprobsPostProcessor", {"__init__": ("cp_size", "sampling_params")}, _HIDDEN),
    Uses(_MODEL_UTILS, "", {"get_logprobs_from_vocab_parallel_logits": ("input_ids",)}, _HIDDEN),
)
"""Where a worker runs its model, and a Megatron one makes log-probs of what that puts out."""

_WORKERS = "nemo_rl.models.policy.workers.dtensor_policy_worker"
DTENSOR_WORKERS = {_WORKERS: False, f"{_WORKERS}_v2": True}
"""Modules of the workers whose models are of transformers; whether functions around the call say what it is for."""


def inspect() -> list[SeamState]:
    """Compare every seam with the source of the installed NeMo-RL, those of single settings included.

    Raises:
        MissingDependencyError: there is no NeMo-RL.
    """
    package = root()
    return [
        compared(seam, package)
        for seam in (*SEAMS, *BEFORE_STEP, *PREV_LOGPROBS, *RECORD, *WORKER_CODE, *SCORING, *HIDDEN_STATES)
    ]


def require() -> None:
    """Stop unless the seams that every run relies on are as known.

    Raises:
        SeamError: one differs; the message names it, the version found and those tested.
        MissingDependencyError: there is no NeMo-RL.
    """
    package = root()
    broken = [finding for finding in (compared(seam, package) for seam in SEAMS) if finding.problem]
    if broken:
        listed = "\n".join(f"  {finding.seam}: {finding.problem}" for finding in broken)
        raise SeamError(
            f"NeMo-RL {version()} ({package}) is not as nemo_geomask knows it (tested: {TESTED}), and a loss selected "
            f"by loss_fn.name might not be the one that trains:\n{listed}\n"
            "Use a tested NeMo-RL, or a nemo_geomask that knows this one"
        )
