"""Facts about NeMo-RL: the tested versions, the fields of its loss, and which version reads which setting.

Versions are told apart by their source and not by their number, because NeMo-RL's main carries the number of the last
release between releases.
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig
from nemo_geomask.recipe.input_limits import parse_python, read_source

TESTED_VERSIONS = "v0.6.0, v0.7.0 and main of August 2026"
LOSS_MODULE = "nemo_rl.algorithms.loss.loss_functions"
LOSS_CLASS = "ClippedPGLossFn"
LOSS_CONFIG = "ClippedPGLossConfig"
POLICY = ("nemo_rl.models.policy.lm_policy", "Policy")
"""Module and name of the class through which NeMo-RL's driver trains and scores."""
DATA_PLANE_POLICY = ("nemo_rl.models.policy.tq_policy", "TQPolicy")
"""Module and name of the subclass of ``Policy`` whose batches are in the data plane; since v0.7.0."""
SETUPS = (
    ("nemo_rl.algorithms.grpo", "setup"),
    ("nemo_rl.algorithms.ppo", "setup"),
    ("nemo_rl.algorithms.single_controller_utils.setup", "setup_single_controller"),
)
"""Module and name of each function that builds the arguments of a training loop, among them the policy and its loss."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Fields of Hugging Face's model configurations with the number of experts in a layer."""
REPLAY_BUFFERS = "nemo_rl.algorithms.async_utils"
"""Module of the replay buffer of the asynchronous loops."""

LOSS_FIELDS = frozenset(
    {
        "disable_ppo_ratio",
        "force_on_policy_ratio",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "positive_example_nll_weight",
        "ratio_clip_c",
        "ratio_clip_max",
        "ratio_clip_min",
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "sequence_level_importance_ratios",
        "token_level_loss",
        "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
        "truncated_importance_sampling_type",
        "use_cispo",
        "use_importance_sampling_correction",
        "use_kl_in_reward",
        "use_on_policy_kl_approximation",
    }
)
"""Fields of NeMo-RL's ``ClippedPGLossConfig`` in any version from v0.6.0 to main."""

FIELDS_READ_BY_TRAINERS = (
    "force_on_policy_ratio",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "use_importance_sampling_correction",
    "use_kl_in_reward",
)
"""Fields of ``loss_fn`` that NeMo-RL's trainers read themselves, for example to decide on loading a reference model."""

FUSED_LOGPROBS = "policy.megatron_cfg.use_fused_linear_logprobs"
FUSED_LOGPROBS_UNTIL_V0_7_0 = "policy.megatron_cfg.use_linear_ce_fusion_loss"
"""Name of :data:`FUSED_LOGPROBS` in v0.6.0 and v0.7.0, where only supervised fine-tuning and DPO use it."""

SETTING_READERS: dict[str, tuple[str, str]] = {
    "policy.router_replay.enabled": ("models/megatron/router_replay.py", "router_replay"),
    "policy.quant_cfg": ("models/policy/__init__.py", "quant_cfg"),
    "policy.generation.bad_words": ("models/generation/interfaces.py", "bad_words"),
    "policy.generation.vllm_cfg.is_mx": ("models/generation/vllm/config.py", "is_mx"),
    "policy.generation.vllm_cfg.logprobs_mode": ("models/generation/vllm/config.py", "logprobs_mode"),
    FUSED_LOGPROBS: ("models/policy/__init__.py", "use_fused_linear_logprobs"),
}
"""Settings that only some versions of NeMo-RL read: for each, the module that reads it, and a word in that module.

A version reads a setting if its module contains the word. v0.6.0 reads none of these settings, v0.7.0 the first two.
"""


def reads_setting(checkout: Path, key: str) -> bool:
    """Return True if the NeMo-RL in ``checkout`` reads ``key``, one of :data:`SETTING_READERS`."""
    return _mentions(checkout, *SETTING_READERS[key])


def trains_on_chunks(checkout: Path) -> bool:
    """Return True if a NeMo-RL computes training log-probs in chunks of ``policy.logprob_chunk_size``.

    v0.6.0 has chunks in forward passes only.
    """
    return _mentions(checkout, "algorithms/loss/utils.py", "chunk_size")


def skips_unread_logprobs(checkout: Path) -> bool:
    """Return True if a NeMo-RL skips the forward passes for log-probs that its own loss does not read.

    v0.6.0 always runs them.
    """
    return _mentions(checkout, "algorithms/grpo.py", "_skip_prev_logprobs")


def has_kl_score_function(checkout: Path) -> bool:
    """Return True if a NeMo-RL's own KL term is also differentiated through the samples, see docs/background/kl.md.

    v0.6.0's is not.
    """
    utils = "algorithms/utils.py"
    return _mentions(checkout, utils, "importance_sampling_weights") or not (checkout / "nemo_rl" / utils).is_file()


def loads_moe_in_bfloat16(checkout: Path | None) -> bool:
    """Return True if a NeMo-RL's Automodel casts the weights of its own MoE classes to bfloat16 when it loads them.

    v0.6.0, v0.7.0 and main of August 2026 pin such an Automodel (NeMo-RL's issue 2322); later ones keep the type in
    which the model was built. A checkout without its submodules counts as one of these.
    """
    file = "3rdparty/Automodel-workspace/Automodel/nemo_automodel/components/checkpoint/checkpointing.py"
    return checkout is None or "initialize_weights(dtype=" not in read_source(checkout / file)


def merges_expert_adapters(checkout: Path | None) -> bool:
    """Return True if a NeMo-RL's refit merges LoRA adapters of Automodel's grouped experts into their weights.

    v0.6.0, v0.7.0 and main of August 2026 merge those of linear layers alone; NeMo-RL's pull request 3353 would merge
    both.
    """
    return checkout is not None and _mentions(
        checkout, "models/policy/workers/dtensor_policy_worker_v2.py", "lora_gate_and_up"
    )


def resets_reference_on_resume(checkout: Path) -> bool:
    """Return True if a NeMo-RL's DTensor v2 workers copy the reference policy after they have loaded a checkpoint.

    A resumed run then measures the KL to the policy of the checkpoint (NeMo-RL's issue 2955). v0.6.0, v0.7.0 and main
    of August 2026 do so; its pull request 3722 loads the checkpoint after the copy.
    """
    source = read_source(checkout / "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py")
    _, copy, after = source.partition("setup_reference_model_state(self.model)")
    return bool(copy) and "load_checkpoint(" not in after.partition("\n    def ")[0]


def has_dtensor_v1(checkout: Path) -> bool:
    """Return True if a NeMo-RL starts DTensor v1's workers under ``_v2: false``, which its pull request 4207 ends."""
    return _mentions(checkout, "models/policy/lm_policy.py", 'dtensor_policy_worker.DTensorPolicyWorker"')


def splits_replicated_experts(checkout: Path) -> bool:
    """Return True if a NeMo-RL's Megatron-LM leaves expert gradients unsummed where each rank of a TP group has all.

    That is the layout with an expert-parallel size of 1 and an expert-tensor-parallel size below the tensor-parallel
    size: the ranks share a sequence's tokens, and each updates its copies of the experts from its own tokens.
    Megatron-LM's pull request 5916, of July 2026, sums the gradients; v0.6.0 pins an older one. False if the source is
    not there.
    """
    bridge = "Megatron-Bridge-workspace/Megatron-Bridge"
    for folder in ("Megatron-LM-workspace/Megatron-LM", f"{bridge}/3rdparty/Megatron-LM"):
        source = read_source(checkout / "3rdparty" / folder / "megatron/core/tensor_parallel/layers.py")
        if source:
            return "expert_tensor_parallel_size !=" not in source
    return False


def single_controller_lacks(checkout: Path, word: str) -> bool:
    """Return True if a NeMo-RL has a single controller whose source does not contain a word; only main has one."""
    algorithms = checkout / "nemo_rl" / "algorithms"
    modules = [algorithms / "single_controller.py", *sorted(algorithms.glob("single_controller_utils/*.py"))]
    return modules[0].is_file() and not any(word in read_source(module) for module in modules)


def calls_dynamic_sampling_in_ppo(checkout: Path) -> bool:
    """Return True if a NeMo-RL's PPO calls its function for dynamic sampling; v0.7.0 and main only define it."""
    return read_source(checkout / "nemo_rl" / "algorithms" / "ppo.py").count("dynamic_sampling(") > 1


def _mentions(checkout: Path, module: str, word: str) -> bool:
    return word in read_source(checkout / "nemo_rl" / module)


def policy_worker_class(policy_settings: Mapping[str, Any]) -> str | None:
    """Return the dotted name of the worker class that NeMo-RL's policy starts; None if it is not one of its three.

    Args:
        policy_settings: section ``policy`` of the recipe.
    """
    workers = "nemo_rl.models.policy.workers"
    if policy_settings.get("quant_cfg"):
        return None
    if (policy_settings.get("megatron_cfg") or {}).get("enabled"):
        return f"{workers}.megatron_policy_worker.MegatronPolicyWorker"
    dtensor = policy_settings.get("dtensor_cfg") or {}
    if not dtensor.get("enabled"):
        return None
    if dtensor.get("_v2"):
        return f"{workers}.dtensor_policy_worker_v2.DTensorPolicyWorkerV2"
    return f"{workers}.dtensor_policy_worker.DTensorPolicyWorker"


NeutralValues = Mapping[str, tuple[Any, ...]]
"""Fields of NeMo-RL's loss, each with the values under which it changes nothing."""

_OFF = (None, False)
"""Values that change nothing in a ``TypedDict``, which has no defaults; 0 is among them, because it equals False."""


def neutral_values(config_class: Any) -> NeutralValues:
    """Return the fields of an imported ``ClippedPGLossConfig``, each with the values under which it changes nothing.

    A field at its default changes nothing, since a recipe that leaves the field out gets the same loss. The
    ``TypedDict`` of v0.6.0 has no defaults; there, null, false and 0 are taken to switch a field off.
    """
    if not (isinstance(config_class, type) and issubclass(config_class, BaseModel)):
        return dict.fromkeys(getattr(config_class, "__annotations__", {}), _OFF)
    return {
        name: () if field.is_required() else (_plain(field.get_default(call_default_factory=True)),)
        for name, field in config_class.model_fields.items()
    }


def neutral_values_in_source(checkout: Path) -> NeutralValues:
    """Return :func:`neutral_values` of the NeMo-RL in ``checkout``, whose source is parsed and not imported.

    A default that is not a literal is unknown, so no value of its field is neutral. Without NeMo-RL's source, there are
    no fields.
    """
    try:
        tree = parse_python(read_source(checkout.joinpath(*LOSS_MODULE.split(".")).with_suffix(".py")))
    except SyntaxError:
        return {}
    return _fields_in_source({node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, LOSS_CONFIG)


def _fields_in_source(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, tuple[Any, ...]]:
    if name not in classes:
        return {}
    fields: dict[str, tuple[Any, ...]] = {}
    bases = [ast.unparse(base) for base in classes[name].bases]
    for base in bases:
        fields |= _fields_in_source(classes, base)
    is_dict = any(base.endswith("TypedDict") for base in bases)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = _OFF if is_dict else _literal_default(node.value)
    return fields


def _literal_default(node: ast.expr | None) -> tuple[Any, ...]:
    """Return the default of a pydantic field, alone in a tuple; an empty tuple if there is none or it is no literal."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Field"):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = keywords.get("default_factory")
        if factory is not None:
            return {"list": ([],), "dict": ({},)}.get(ast.unparse(factory), ())
        node = node.args[0] if node.args else keywords.get("default")
    try:
        value = ast.literal_eval(node) if node is not None else ...
    except ValueError:
        value = ...
    return () if value is ... else (value,)  # Field(...) marks a required field


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def build_loss_config(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """Build an imported ``ClippedPGLossConfig`` from settings that differ from its defaults.

    The ``TypedDict`` of v0.6.0 has no defaults; it gets those of later versions, which are ours.
    """
    if isinstance(config_class, type) and issubclass(config_class, BaseModel):
        return config_class(**settings)
    return {**LossConfig().model_dump(include=set(neutral_values(config_class))), **settings}


@contextlib.contextmanager
def replace_loss_config(master_config: Any, config_class: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Replace ``loss_fn`` in NeMo-RL's complete configuration within the context.

    Args:
        master_config: a pydantic model, or a mapping in v0.6.0.
        config_class: the imported ``ClippedPGLossConfig``.
        settings: those that differ from NeMo-RL's defaults.
    """
    is_mapping = isinstance(master_config, MutableMapping)
    original = master_config["loss_fn"] if is_mapping else master_config.loss_fn
    assign = operator.setitem if is_mapping else setattr
    assign(master_config, "loss_fn", build_loss_config(config_class, settings))
    try:
        yield
    finally:
        assign(master_config, "loss_fn", original)


def describe_filter(sampling_params: Any) -> str:
    """Describe the top-k or top-p filter in NeMo-RL's sampling parameters; empty if they keep the whole vocabulary."""
    top_k, top_p = getattr(sampling_params, "top_k", None), getattr(sampling_params, "top_p", 1.0)
    return f"top_k: {top_k}, top_p: {top_p}" if top_k not in (None, -1) or top_p != 1.0 else ""
