"""Shims of Megatron-LM and Megatron-Bridge, which replace what they use of CUDA and transformer-engine."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute


def jit(module: Any) -> Iterator[Patch]:
    """Leave functions uncompiled: megatron/core/jit.py compiles each at its first call, which takes 10 s on a CPU."""
    yield attribute(module, "jit_fuser", lambda original: lambda function: function)


def random(module: Any) -> Iterator[Patch]:
    """Keep no states of CUDA's random generators (tensor_parallel/random.py), by Megatron's tracker for inference."""

    def seed(*args: Any, **kwargs: Any) -> None:
        module.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)

    module.initialize_rng_tracker(inference_rng_tracker=True)
    yield attribute(module, "model_parallel_cuda_manual_seed", lambda original: seed)
    # :118 and :142, for recomputed activations (activation_checkpointing), which store the CPU's own state as well.
    state = torch.get_rng_state
    yield attribute(module, "_get_cuda_rng_state", lambda original: lambda *args, **kwargs: state())
    yield attribute(module, "_set_cuda_rng_state", lambda original: lambda *args, **kwargs: None)


def buffers(module: Any) -> Iterator[Patch]:
    """Offload no buffers (param_and_grad_buffer.py): on a CPU, the freed storage would be that of the copy."""
    for name in ("offload_to_cpu", "reload_from_cpu"):
        if hasattr(module._ParamAndGradBuffer, name):
            yield attribute(module._ParamAndGradBuffer, name, lambda original: lambda self, *args, **kwargs: None)


def reduced(module: Any) -> Iterator[Patch]:
    """Copy the output of layers.py:1524, which without TP is a view of its input.

    Experts with a bias add it to this output in place (mlp.py:353), which autograd forbids for such a view.
    transformer-engine's grouped experts, which train on GPUs, do not.
    """

    def reduce(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs).clone()

    yield attribute(module, "reduce_from_tensor_model_parallel_region", reduce)


def dispatcher(module: Any) -> Iterator[Patch]:
    """Convert split sizes to numpy arrays, which token_dispatcher.py does for CUDA tensors alone."""

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    yield attribute(module, "maybe_move_tensor_to_cpu", lambda original: on_host)


def experts(module: Any) -> Iterator[Patch]:
    """Define a name of transformer-engine that moe_utils.py reads even where it calls another function."""
    if not hasattr(module, "te_general_gemm"):

        def apply() -> None:
            module.te_general_gemm = None

        yield Patch(module, "te_general_gemm", apply, lambda: delattr(module, "te_general_gemm"))


def norm(module: Any) -> Iterator[Patch]:
    """Allow torch's norms under sequence parallelism and with weights around zero: torch_norm.py:46,52 refuses both.

    Each token is normalised by itself, so a shard of the tokens is no difficulty. Megatron sums the gradients of
    parameters that are marked as ``sequence_parallel``.
    """

    def allow_sequence_parallel(original: Any) -> Any:
        def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            plain = copy.copy(config)
            plain.sequence_parallel = False
            is_zero_centered = config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm"
            plain.layernorm_zero_centered_gamma = config.layernorm_zero_centered_gamma and not is_zero_centered
            norm = original.__new__(original, plain, *args, **kwargs)
            if is_zero_centered:
                norm.__class__ = _zero_centered_class(type(norm))
                norm.weight.data.zero_()
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

        return type(original.__name__, (original,), {"__new__": new})

    yield attribute(module, "WrappedTorchNorm", allow_sequence_parallel)


def _zero_centered_class(rms_norm: type) -> type:
    """Return the class of an RMS norm that multiplies by 1 + weight."""

    def forward(self: Any, x: Any) -> Any:
        weight = 1.0 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)

    # The bridge chooses a parameter's mapping by the class's name.
    return type("RMSNorm", (rms_norm,), {"forward": forward})


def clip_grads(module: Any) -> Iterator[Patch]:
    """Clip gradients on a CPU: clip_grads.py:174 accepts only gradients of the type torch.cuda.FloatTensor."""

    def clip(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        scale = max_norm / (float(total_norm) + 1e-6)
        for parameter in [parameters] if hasattr(parameters, "grad") else parameters:
            if parameter.grad is not None and scale < 1:
                parameter.grad.mul_(scale)

    yield attribute(module, "clip_grad_by_total_norm_fp32", lambda original: clip)


def initialize(module: Any) -> Iterator[Patch]:
    """Initialise Megatron without a GPU: bridge/training/initialize.py:91 requires CUDA and :703 counts GPUs.

    The C++ helpers for data sets are not compiled, and no kernels are warmed up.
    """
    cuda = torch.cuda

    def claim_a_gpu(original: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            available, count = cuda.is_available, cuda.device_count
            cuda.is_available, cuda.device_count = (lambda: True), (lambda: 1)
            try:
                return original(*args, **kwargs)
            finally:
                cuda.is_available, cuda.device_count = available, count

        return start

    yield attribute(module, "initialize_megatron", claim_a_gpu)
    for name in ("compile_helpers", "set_jit_fusion_options"):
        if hasattr(module, name):
            yield attribute(module, name, lambda original: lambda *args, **kwargs: None)


def layer_spec(module: Any) -> Iterator[Patch]:
    """Use Megatron's own layers in place of transformer-engine's (bridge/models/gpt_provider.py:51).

    The parameters keep the names that the bridge maps, where the norm before a projection is part of the projection.
    """

    yield attribute(module, "transformer_engine_layer_spec", lambda original: local_layer_spec)


_FUSED = (
    # llama_bridge.py:60 and qwen3_moe_bridge.py:62,67 switch these on whatever the recipe says. The first three need
    # transformer-engine (transformer_config.py:2250, :2732), the others CUDA streams or Apex.
    *("apply_rope_fusion", "moe_permute_fusion", "moe_grouped_gemm"),
    *("moe_shared_expert_overlap", "gradient_accumulation_fusion", "persist_layer_norm"),
)


def fusions(module: Any) -> Iterator[Patch]:
    """Switch off the fused kernels that a bridge enables itself (bridge/models/transformer_config.py:165,242)."""

    def without_fusion(original: Any) -> Any:
        def finalize(self: Any) -> None:
            for name in _FUSED:
                if hasattr(self, name):
                    setattr(self, name, False)
            original(self)

        return finalize

    for name in ("TransformerConfig", "MLATransformerConfig"):
        if "finalize" in vars(getattr(module, name, object)):
            yield attribute(getattr(module, name), "finalize", without_fusion)


def latent_experts(module: Any) -> Iterator[Patch]:
    """Replace transformer-engine's projections to and from the experts' smaller size (moe_layer.py:266).

    Each rank holds the whole projection, as there.
    """
    if not hasattr(module, "HAVE_TE"):
        return
    if not hasattr(module, "TELinear"):
        module.TELinear = None  # before Megatron-LM 0.17
    yield attribute(module, "HAVE_TE", lambda original: True)
    yield attribute(module, "TELinear", lambda original: _duplicated_linear())


def _duplicated_linear() -> Any:

    def init(self: Any, inputs: int, outputs: int, *, config: Any, init_method: Any, bias: bool, **kwargs: Any) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(outputs, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self: Any, values: Any) -> Any:
        return torch.nn.functional.linear(values, self.weight, self.bias), None

    # The bridge recognises a weight that each rank holds whole by the class's name and parallel_mode.
    names = {"__init__": init, "forward": forward, "parallel_mode": "duplicated"}
    return type("TELinear", (torch.nn.Module,), names)


def yarn(module: Any) -> Iterator[Patch]:
    """Create YaRN's frequencies on the CPU: yarn_rotary_pos_embedding.py:78 passes the index of a GPU as device."""

    def on_cpu(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **{**kwargs, "use_cpu_initialization": True})

        return init

    yield attribute(module.YarnRotaryEmbedding, "__init__", on_cpu)


def final_norm(module: Any) -> Iterator[Patch]:
    """Replace transformer-engine's final norm (hybrid_block.py:223), which is not part of a layer specification."""
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    yield attribute(module, "TENorm", lambda original: norm)


def hybrid_spec(module: Any) -> Iterator[Patch]:
    """Use Megatron's own layers in hybrid models (models/hybrid/hybrid_provider.py:76), as :func:`layer_spec`."""
    yield attribute(module, "transformer_engine_hybrid_stack_spec", lambda original: _local_hybrid_spec)


def _local_hybrid_spec() -> Any:
    stack = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    moe = importlib.import_module("megatron.core.models.gpt.moe_module_specs")
    row = importlib.import_module("megatron.core.tensor_parallel").RowParallelLinear
    spec, add, normed = stack.ModuleSpec, stack.get_bias_dropout_add, normed_projection()
    mixer = spec(stack.MambaMixer, submodules=stack.MambaMixerSubmodules(in_proj=normed, out_proj=row))
    self_attention = spec(
        stack.SelfAttention,
        params={"attn_mask_type": stack.AttnMaskType.causal},
        submodules=stack.SelfAttentionSubmodules(linear_qkv=normed, core_attention=attention, linear_proj=row),
    )
    dense = stack.MLPSubmodules(linear_fc1=normed, linear_fc2=row)
    experts = moe.get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    layer = stack.TransformerLayerSubmodules
    # No other kinds of layers: a specification is deep-copied, which transformer-engine's missing classes can't be.
    layers = stack.HybridStackSubmodules(
        mamba_layer=spec(stack.MambaLayer, submodules=stack.MambaLayerSubmodules(mixer=mixer, mamba_bda=add)),
        attention_layer=spec(
            stack.TransformerLayer, submodules=layer(self_attention=self_attention, self_attn_bda=add)
        ),
        mlp_layer=spec(
            stack.MLPLayer,
            submodules=layer(mlp=functools.partial(stack.MLP.as_mlp_submodule, submodules=dense), mlp_bda=add),
        ),
        moe_layer=spec(stack.MoETransformerLayer, submodules=layer(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add)),
    )
    return spec(stack.HybridStack, submodules=layers)


def local_layer_spec(config: Any) -> Any:
    """Return the specification of a layer of Megatron's own, whose parameters have the names that the bridge maps."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    identity = importlib.import_module("megatron.core.transformer.identity_op").IdentityOp
    normed = normed_projection()
    spec = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = spec.submodules
    parts.input_layernorm, parts.sharded_state_dict_keys_map = identity, {}
    parts.self_attention.submodules.linear_qkv = normed
    if config.num_moe_experts is None:
        parts.pre_mlp_layernorm = identity
        # A partial in Megatron-LM 0.20, a ModuleSpec before.
        mlp = parts.mlp.keywords["submodules"] if hasattr(parts.mlp, "keywords") else parts.mlp.submodules
        mlp.linear_fc1 = normed
    return spec


def normed_projection() -> Any:
    """Return the class of a column-parallel projection with an RMS norm before it, as transformer-engine's."""
    column: Any = importlib.import_module("megatron.core.tensor_parallel").ColumnParallelLinear

    def init(self: Any, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        kwargs.pop(
            "pg_collection", None
        )  # passed for a state space's projection; only transformer-engine's layers take it
        column.__init__(self, input_size, output_size, config=config, **kwargs)
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(initial(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.epsilon = config.layernorm_epsilon

    def forward(self: Any, input_: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer_norm_weight.float() + (1.0 if self.zero_centered else 0.0)
        normed = torch.nn.functional.rms_norm(input_.float(), (input_.shape[-1],), weight, self.epsilon)
        return column.forward(self, normed.to(input_.dtype), *args, **kwargs)

    # The bridge chooses a parameter's mapping by the class's name.
    return type("TELayerNormColumnParallelLinear", (column,), {"__init__": init, "forward": forward})
