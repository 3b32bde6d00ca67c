"""Gated delta nets, the linear attention of Qwen3.5, without flash-linear-attention and transformer-engine."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute
from nemo_geomask.tools.rehearse.cpu_shims.mamba_shim import conv
from nemo_geomask.tools.rehearse.cpu_shims.megatron_shim import local_layer_spec, normed_projection


def kernels(module: Any) -> Iterator[Patch]:
    """Compute what ssm/gated_delta_net/common.py:43 imports of flash-linear-attention, whose kernels need CUDA.

    Under no name of that library: Automodel and vLLM would find it too.
    """
    functions = {"causal_conv1d": short_conv, "l2norm": normalized, "chunk_gated_delta_rule": delta_rule}
    if not getattr(module, "HAVE_FLA", True):
        for name, value in {**functions, "HAVE_FLA": True}.items():
            yield attribute(module, name, functools.partial(_replacement, value))


def _replacement(value: Any, original: Any) -> Any:
    return value


def block_spec(module: Any) -> Iterator[Patch]:
    """Use Megatron's own layers (gpt/experimental_attention_variant_module_specs.py:513), as for other models."""
    backends = importlib.import_module("megatron.core.models.backends")
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    methods = {
        "fuse_layernorm_and_linear": lambda self: True,
        "column_parallel_layer_norm_linear": lambda self: normed_projection(),
        "layer_norm": lambda self, *args, **kwargs: norm,
    }
    provider = type("LocalSpecProvider", (backends.LocalSpecProvider,), methods)

    def self_attention(config: Any, backend: Any = None) -> Any:
        spec = local_layer_spec(config).submodules.self_attention
        spec.metainfo["fuse_input_layernorm"] = True
        return spec

    yield attribute(module, "_get_backend_spec_provider", lambda original: lambda config: provider())
    yield attribute(module, "_get_self_attention_module_spec", lambda original: self_attention)


def normalized(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Divide the last dimension by its L2 norm, x · rsqrt(Σ x² + 1e-6), as fla's ``l2norm``."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def short_conv(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, cu_seqlens: Any = None, **unused: Any
) -> tuple[Any, None]:
    """Convolve each channel causally within each sequence, as fla's ``causal_conv1d``.

    Args:
        x: [B, T, channels].
        weight: [channels, width].
        activation: ``silu``, ``swish`` or None.
        cu_seqlens: [sequences + 1], the positions at which packed sequences begin, and the end; None without packing.

    Returns:
        [B, T, channels], and no final state.
    """
    sequences = None if cu_seqlens is None else _sequence_of_token(cu_seqlens, x.shape[1])[None]
    return conv(x.transpose(1, 2), weight, bias, sequences, activation).transpose(1, 2), None


def delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, cu_seqlens: Any = None, **unused: Any
) -> tuple[Any, None]:
    """Apply the gated delta rule, as fla's ``chunk_gated_delta_rule`` without initial and final states.

    With S = 0 before a sequence: S ← exp(g) S, u = β (v - Sᵀ k), S ← S + k uᵀ, o = scale · Sᵀ q.

    Unrolled, with G the cumulative sum of g: u_t = β_t (v_t - Σ_{s<t} exp(G_t - G_s) (k_t · k_s) u_s), a triangular
    system of equations, and o_t = scale · Σ_{s≤t} exp(G_t - G_s) (q_t · k_s) u_s.

    Args:
        q: [B, T, heads, width].
        k: [B, T, heads, width].
        v: [B, T, heads, value width].
        g: [B, T, heads], logarithm of the decay.
        beta: [B, T, heads].
        scale: factor of the output; width ** -0.5 if None.
        cu_seqlens: as in :func:`short_conv`.

    Returns:
        [B, T, heads, value width] in the dtype of q, and no final state.

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464), eq. 10.
    """
    length = q.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if cu_seqlens is not None:
        sequence = _sequence_of_token(cu_seqlens, length)
        visible = visible & (sequence[:, None] == sequence[None, :])
    queries, keys, values = (part.float().transpose(1, 2) for part in (q, k, v))  # [B, heads, T, width]
    total = g.float().transpose(1, 2).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~visible, -torch.inf).exp()
    strength = beta.float().transpose(1, 2)[..., None]
    system = (strength * decay * (keys @ keys.transpose(-1, -2))).tril(-1)
    updates = torch.linalg.solve_triangular(system, strength * values, upper=False, unitriangular=True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    output = (decay * (queries @ keys.transpose(-1, -2))) @ updates * scale
    return output.transpose(1, 2).to(q.dtype), None


def _sequence_of_token(cu_seqlens: Any, length: int) -> Any:
    """Return the index of each token's sequence, [T]."""
    return torch.bucketize(torch.arange(length), cu_seqlens[1:], right=True)
