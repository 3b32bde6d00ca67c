"""How the policy's products are computed on a CPU, by the interfaces that ``transformers`` leaves open.

Half-precision products are exact in float32; they are summed there and rounded once, as a GPU's tensor cores do. It is
what torch's own kernels do too, but those take up to twenty times as long where the CPU has no instructions for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_geomask.lab.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_geomask.lab.packed import Packing

__all__ = ["Cache", "linear", "set_up"]

_ATTENTION = "nemo_geomask_attention"
_EXPERTS = "nemo_geomask_experts"


def set_up(model: PreTrainedModel) -> None:
    """Have a model compute its attention, experts and linear layers here; copies of it do too."""
    require("transformers").AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)
    widths = [parameter.shape[-1] for name, parameter in model.named_parameters() if "experts" in name]
    # Since torch 2.10, and of rows of whole 16 bytes; otherwise the plain loop over experts.
    if hasattr(F, "grouped_mm") and not any(width % 4 for width in widths):
        require("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
        model.set_experts_implementation(_EXPERTS)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _RoundedLinear


def _format(tensor: Tensor) -> torch.dtype:
    """What products are rounded to: autocast's choice, where it is on."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype


def _exactly() -> contextlib.AbstractContextManager[object]:
    """No autocast; entering its context takes as long as a small product."""
    autocast = torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", enabled=False) if autocast else contextlib.nullcontext()


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """``F.linear``, rounded once to the inputs' format, or to autocast's."""
    dtype = _format(inputs)
    if dtype == torch.float32:
        return F.linear(inputs, weight)
    with _exactly():
        return F.linear(_operand(inputs, dtype), _operand(weight, dtype)).to(dtype)


class _RoundedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class Cache:
    """Keys and values of what was decoded, as ``transformers`` asks for them, in one piece of memory for all tokens.

    Args:
        longest: tokens of the longest sequence.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # By layer: keys and values, [2, B, G, longest, D] float32, which need no conversion to be multiplied.
        self._held: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens that are held."""
        return self._filled.get(layer, 0)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add [B, G, Q, D] to a layer; returns all that it holds."""
        rows, heads, more, width = key.shape
        if layer not in self._held:
            self._held[layer] = torch.empty(2, rows, heads, self._longest, width)
        held, start = self._held[layer], self.get_seq_length(layer)
        end = self._filled[layer] = start + more
        held[0, :, :, start:end], held[1, :, :, start:end] = key, value
        return held[0, :, :, :end], held[1, :, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Forget the other sequences."""
        for layer, held in self._held.items():
            self._held[layer] = held.index_select(1, rows)


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Tokens [N, H] through their k experts [N, k], weighted [N, k], in one product for all experts.

    For k = 2 these are the bits of the plain loop over experts; for more, a token's sum is rounded once.
    """
    tokens, k = chosen.shape
    dtype = _format(hidden)
    of_expert = chosen.flatten()
    order = of_expert.argsort(stable=True)
    ends = torch.bincount(of_expert, minlength=module.num_experts).cumsum(0, dtype=torch.int32)

    def product(inputs: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(_operand(inputs, dtype), _operand(weight, dtype).mT, offs=ends).to(dtype)

    gate, up = product(hidden.index_select(0, order // k), module.gate_up_proj).chunk(2, dim=-1)
    out = product(module.act_fn(gate) * up, module.down_proj)
    out = out * weights.flatten().index_select(0, order)[:, None]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return out.index_select(0, places).view(tokens, k, -1).sum(dim=1).to(hidden.dtype)


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
    """Causal attention, by the signature that ``transformers`` calls.

    Args:
        module: the layer.
        query: [B, H, Q, D], rotated; of packed tokens [1, H, N, D].
        key: [B, G, K, D], likewise; while decoding, of what is in the cache too.
        value: [B, G, K, D].
        attention_mask: None; rows are padded on the right, where causality hides it.
        packing: of packed tokens, who sees whom.
        scaling: of the scores.

    Returns:
        [B, Q, H, D] and no weights.
    """
    dtype = _format(query)
    with _exactly():
        # What comes out of a cache is rounded, but for the format that it is kept in.
        query, key, value = (_operand(x, dtype if x.dtype == query.dtype else x.dtype) for x in (query, key, value))
        if packing is not None:
            mixed = packing.attend(query, key, value, scaling)[None]
        elif query.shape[2] > 1:
            mixed = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2)
        else:
            # The heads that share a key are as good as several queries, and need no copies of it.
            grouped = (query * scaling).view(len(query), key.shape[1], -1, query.shape[-1])
            mixed = ((grouped @ key.mT).softmax(dim=-1) @ value).view(len(query), 1, -1, query.shape[-1])
    return mixed.to(dtype), None
