"""A generation engine with weights in fewer bits: rounded and scaled back, which is the arithmetic of one that computes
in a wider format with quantised weights. Activations are not quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.lab.policy import QuantizationConfig
from nemo_geomask.lab.recipe import LabRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["numerics", "quantize", "rounded"]

# The largest code of each format, onto which the largest weight of a block is scaled; whole numbers are symmetric.
_LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3": 448.0}
_NAMES = {"experts": (".experts.",), "linears": (".experts.", "_proj.")}


def rounded(weight: Tensor, to: str, block_size: int | None) -> Tensor:
    r"""What is left of a weight in a format of fewer bits.

    .. math:: s = \max_{j \in block} |w_j| / c_{max}, \qquad \hat w_j = s \cdot \mathrm{round}(w_j / s)

    Args:
        weight: [..., inputs].
        to: ``int8``, ``int4`` or ``float8_e4m3``.
        block_size: inputs that share a scale; None: all of an output channel.

    Returns:
        Of the same shape, float32.
    """
    blocks = weight.float().reshape(-1, block_size or weight.shape[-1])
    scale = blocks.abs().amax(dim=-1, keepdim=True) / _LARGEST[to]
    codes = blocks / torch.where(scale == 0, 1.0, scale)
    # A largest weight lies on the largest code but for the last bit of the division, which rounding takes away.
    codes = codes.to(torch.float8_e4m3fn).float() if to == "float8_e4m3" else codes.round()
    return (codes * scale).view_as(weight)


@torch.no_grad()
def quantize(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """Round the weights of a model in place."""
    for name, weight in model.named_parameters():
        if any(part in name for part in _NAMES[config.layers]):
            weight.copy_(rounded(weight, config.weights, config.block_size))


def numerics(recipe: LabRecipe) -> str:
    """Of an engine, for the report: ``bfloat16 with int4 experts in blocks of 32 (2 weight updates behind)``."""
    config, lag = recipe.policy.generation, recipe.grpo.async_grpo.lag
    parts: list[str] = [config.precision]
    if found := config.quantization:
        blocks = f" in blocks of {found.block_size}" if found.block_size else ""
        parts.append(f" with {found.weights} {found.layers}{blocks}")
    if lag:
        parts.append(f" ({lag} weight update{'s' * (lag > 1)} behind)")
    return "".join(parts)
