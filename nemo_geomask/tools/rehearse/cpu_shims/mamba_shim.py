"""Functions of mamba_ssm and causal_conv1d, whose kernels need CUDA, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def conv(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: str | None = None) -> Any:
    """Convolve each channel causally along the sequence, without mixing packed sequences.

    Args:
        x: [B, channels, T].
        weight: [channels, width].
        seq_idx: [B, T], the index of each token's sequence; None if each row is one sequence.
        activation: ``silu``, ``swish`` or None.

    Returns:
        [B, channels, T].
    """
    output = torch.zeros_like(x, dtype=torch.float32)
    for back in range(weight.shape[1]):
        if back >= x.shape[2]:
            break
        term = weight[:, -1 - back].float()[:, None] * x[:, :, : x.shape[2] - back].float()
        if seq_idx is not None:
            term = term * (seq_idx[:, back:] == seq_idx[:, : x.shape[2] - back])[:, None]
        output = output + torch.nn.functional.pad(term, (back, 0))
    if bias is not None:
        output = output + bias.float()[:, None]
    return (torch.nn.functional.silu(output) if activation in ("silu", "swish") else output).to(x.dtype)


def chunk_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int = 0,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    seq_idx: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **unused: Any,
) -> Any:
    """Scan a state space, as mamba_ssm's ``mamba_chunk_scan_combined``.

    The state of a head decays by exp(dt A) from token to token and grows by dt B x; the output is C · state + D x. The
    output is computed as a weighted sum over all earlier tokens of the same sequence, with [T, T] weights per head.

    Args:
        x: [B, T, heads, width].
        dt: [B, T, heads].
        A: [heads], negative.
        B: [B, T, groups, states]; heads / groups neighbouring heads share one group.
        C: [B, T, groups, states].
        chunk_size: unused; it does not change the result.
        D: [heads] or [heads, width], or None.
        z: [B, T, heads, width], whose silu multiplies the output, or None.
        dt_bias: [heads], or None.
        initial_states: must be None.
        seq_idx: [B, T], the index of each token's sequence; None if each row is one sequence.
        dt_softplus: apply softplus to dt.
        dt_limit: bounds of dt.
        return_final_states: must be False.

    Returns:
        [B, T, heads, width].
    """
    if initial_states is not None or return_final_states:
        raise NotImplementedError(
            "the shim of mamba_ssm neither continues from a state nor returns one: rehearsals only train with it"
        )
    heads, length = x.shape[2], x.shape[1]
    step = dt.float() + (0 if dt_bias is None else dt_bias.float())
    step = torch.nn.functional.softplus(step) if dt_softplus else step
    if tuple(dt_limit) != (0.0, float("inf")):
        step = step.clamp(*dt_limit)
    decay = (step * A.float()).cumsum(1)  # [B, T, heads]
    visible = torch.ones(length, length, dtype=torch.bool).tril()[None]
    if seq_idx is not None:
        visible = visible & (seq_idx[:, :, None] == seq_idx[:, None, :])
    exponent = (decay[:, :, None] - decay[:, None]).masked_fill(~visible[..., None], -torch.inf)
    inputs, outputs = (part.float().repeat_interleave(heads // part.shape[2], dim=2) for part in (B, C))
    weights = torch.einsum("bthn,bshn->btsh", outputs, inputs) * exponent.exp()
    y = torch.einsum("btsh,bsh,bshp->bthp", weights, step, x.float())
    if D is not None:
        y = y + x.float() * (D.float() if D.dim() == 2 else D.float()[:, None])
    if z is not None:
        y = y * torch.nn.functional.silu(z.float())
    return y.to(x.dtype)


def gated_norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    z: Any = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Any:
    """Apply an RMS norm to groups of channels, gated by silu(z) before or after it, as mamba_ssm's ``rmsnorm_fn``."""
    gate = 1.0 if z is None else torch.nn.functional.silu(z.float())
    y = x.float() if norm_before_gate else x.float() * gate
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    y = y if bias is None else y + bias.float()
    return (y * gate if norm_before_gate else y).to(x.dtype)


def split_conv_scan(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,
    D: Any,
    chunk_size: int,
    initial_states: Any = None,
    seq_idx: Any = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Any = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **unused: Any,
) -> Any:
    """Convolve, scan, gate and project, as mamba_ssm's ``mamba_split_conv1d_scan_combined``.

    Args:
        zxbcdt: [B, T, 2 inner + 2 groups states + heads]: gate, inputs of the convolution, and dt.
        conv1d_weight: [inner + 2 groups states, width].

    The other arguments are those of :func:`chunk_scan`, :func:`gated_norm` and a linear layer.

    Returns:
        [B, T, inner], or the layer's outputs.
    """
    heads = dt_bias.shape[0]
    width = headdim if headdim is not None else D.shape[1]
    inner = heads * width
    gate, mixed, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    mixed = conv(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation).transpose(1, 2)
    states = (conv1d_weight.shape[0] - inner) // 2
    x, inputs, outputs = mixed.split([inner, states, states], dim=-1)
    y = chunk_scan(
        x.unflatten(-1, (heads, width)),
        dt,
        A,
        inputs.unflatten(-1, (ngroups, -1)),
        outputs.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=gate.unflatten(-1, (heads, width)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    ).flatten(-2)
    if rmsnorm_weight is not None:
        norm = {"eps": rmsnorm_eps, "group_size": inner // ngroups, "norm_before_gate": norm_before_gate}
        y = gated_norm(y, rmsnorm_weight, z=gate, **norm)
    return y if outproj_weight is None else torch.nn.functional.linear(y, outproj_weight, outproj_bias)


class RMSNorm(torch.nn.Module):
    """Layer of :func:`gated_norm`, as mamba_ssm's ``RMSNorm``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Any, z: Any = None) -> Any:
        """Return the norm of x, gated by z if there is one."""
        return gated_norm(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


MODULES: Mapping[str, Mapping[str, Any]] = {
    "mamba_ssm": {"__version__": "2.3.0"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm, "rmsnorm_fn": gated_norm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": chunk_scan,
        "mamba_split_conv1d_scan_combined": split_conv_scan,
    },
    "causal_conv1d": {"__version__": "1.6.0", "causal_conv1d_fn": conv, "causal_conv1d_update": None},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
}
"""Attributes of the modules of both packages."""
