"""Half-precision matrix products, attention and experts of the policy, registered with ``transformers``.

A product of two half-precision numbers is exact in float32. On a CPU, the lab sums the products in float32 and rounds
the sum once, as a GPU's tensor cores do. torch's own CPU kernels do the same, but take up to twenty times as long on a
CPU without half-precision instructions. On a GPU, the tensor cores compute the products of linear layers and experts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_geomask.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_geomask.tools.lab.packed_rows import Packing

_ATTENTION = "nemo_geomask_attention"
_EXPERTS = "nemo_geomask_experts"


def install_arithmetic(model: PreTrainedModel) -> None:
    """Replace a model's attention, experts and linear layers by those of this module, also for copies of the model."""
    require("transformers", "the lab needs", "demo").AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)
    widths = [parameter.shape[-1] for name, parameter in model.named_parameters() if "experts" in name]
    # grouped_mm exists since torch 2.10 and needs rows of a multiple of 16 bytes; on a CPU they are float32, on a GPU
    # perhaps of half precision. Without it, transformers loops over the experts.
    multiple = 4 if model.device.type == "cpu" else 8
    if hasattr(F, "grouped_mm") and not any(width % multiple for width in widths):
        require("transformers.integrations.moe", "the lab needs", "demo").ALL_EXPERTS_FUNCTIONS.register(
            _EXPERTS, _experts
        )
        model.set_experts_implementation(_EXPERTS)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _RoundedLinear


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a product is rounded to: autocast's if it is enabled, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _disable_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables autocast, or a null context if it is off, since entering autocast is slow."""
    autocast = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext()


def _round_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a tensor to a dtype and return it in float32."""
    return tensor.to(dtype).float()


def _product_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round an operand of a matrix product to a dtype; return it in float32 on a CPU, and in that dtype on a GPU."""
    return tensor.to(dtype) if tensor.is_cuda else _round_operand(tensor, dtype)


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Compute ``F.linear`` in float32, rounded once to the inputs' dtype, or to autocast's."""
    dtype = _product_dtype(inputs)
    if dtype == torch.float32:
        return F.linear(inputs, weight)
    with _disable_autocast(inputs.device.type):
        return F.linear(_product_operand(inputs, dtype), _product_operand(weight, dtype)).to(dtype)


class _RoundedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class KVCache:
    """KV cache with the interface that ``transformers`` calls, allocated once for all tokens.

    Args:
        longest: number of tokens of the longest sequence, for which memory is allocated.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # Keys and values of each layer, [2, B, G, longest, D], in float32, which saves conversions.
        self._layers: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens in the cache."""
        return self._filled.get(layer, 0)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, G, Q, D] to a layer; return all of the layer's, [B, G, K, D] each."""
        rows, heads, count, width = key.shape
        if layer not in self._layers:
            self._layers[layer] = torch.empty(2, rows, heads, self._longest, width, device=key.device)
        cached, start = self._layers[layer], self.get_seq_length(layer)
        end = self._filled[layer] = start + count
        cached[0, :, :, start:end], cached[1, :, :, start:end] = key, value
        return cached[0, :, :, :end], cached[1, :, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences with these row numbers."""
        for layer, cached in self._layers.items():
            self._layers[layer] = cached.index_select(1, rows)


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Send tokens [N, H] through their k experts [N, k] with weights [N, k], in one grouped product for all experts.

    For k = 2 the result is bit-identical to that of a loop over the experts. For larger k, the sum over a token's
    experts is rounded once here, and after each expert in a loop.
    """
    tokens, k = chosen.shape
    dtype = _product_dtype(hidden)
    expert_of_slot = chosen.flatten()
    order = expert_of_slot.argsort(stable=True)
    ends = torch.bincount(expert_of_slot, minlength=module.num_experts).cumsum(0, dtype=torch.int32)

    def product(inputs: Tensor, weight: Tensor) -> Tensor:
        operands = _product_operand(inputs, dtype), _product_operand(weight, dtype).mT
        return F.grouped_mm(*operands, offs=ends).to(dtype)

    gate, up = product(hidden.index_select(0, order // k), module.gate_up_proj).chunk(2, dim=-1)
    out = product(module.act_fn(gate) * up, module.down_proj)
    out = out * weights.flatten().index_select(0, order)[:, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return out.index_select(0, inverse).view(tokens, k, -1).sum(dim=1).to(hidden.dtype)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention, with the signature that ``transformers`` calls.

    query [B, H, Q, D] and key [B, G, K, D] have rotary embedding applied; value is [B, G, K, D]. Rows are padded on the
    right, so that causality hides the padding, and ``attention_mask`` is None. ``packing`` says which of packed tokens
    [1, H, N, D] a token may attend to.

    Returns: the output [B, Q, H, D], and None for the attention weights.
    """
    dtype = _product_dtype(query)
    with _disable_autocast(query.device.type):
        # Keys and values from the cache are already rounded, and are stored in float32 only for speed.
        query, key, value = (
            _round_operand(x, dtype if x.dtype == query.dtype else x.dtype) for x in (query, key, value)
        )
        if packing is not None:
            mixed = packing.attend(query, key, value, scaling)[None]
        elif query.shape[2] > 1:
            mixed = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2)
        else:
            # Query heads that share a key are treated as several queries of one head, which avoids copies of the key.
            grouped = (query * scaling).view(len(query), key.shape[1], -1, query.shape[-1])
            mixed = ((grouped @ key.mT).softmax(dim=-1) @ value).view(len(query), 1, -1, query.shape[-1])
    return mixed.to(dtype), None
