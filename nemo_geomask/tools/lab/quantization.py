"""Weight quantisation of the generation engine, simulated by rounding the weights and scaling them back.

An engine that stores quantised weights and computes in a wider format has the same arithmetic. Activations are not
quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_config import QuantizationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["describe_engine", "quantize", "round_to_format"]

# The largest code of each format; a block's largest weight is scaled to it. Integer formats are symmetric.
_LARGEST_CODE = {"int8": 127.0, "int4": 7.0, "float8_e4m3": 448.0}
_QUANTIZED_NAMES = {"experts": (".experts.",), "linears": (".experts.", "_proj.")}


def round_to_format(weight: Tensor, number_format: str, block_size: int | None) -> Tensor:
    r"""Round a weight to a format with fewer bits.

    .. math:: s = \max_{j \in block} |w_j| / c_{max}, \qquad \hat w_j = s \cdot \mathrm{round}(w_j / s)

    Args:
        weight: [..., inputs].
        number_format: ``int8``, ``int4`` or ``float8_e4m3``.
        block_size: number of inputs that share a scale; None: all inputs of an output channel.

    Returns:
        The rounded weight in the same shape, float32.
    """
    blocks = weight.float().reshape(-1, block_size or weight.shape[-1])
    scale = blocks.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE[number_format]
    codes = blocks / torch.where(scale == 0, 1.0, scale)
    # The division may miss the largest code by one bit; the rounding corrects that.
    codes = codes.to(torch.float8_e4m3fn).float() if number_format == "float8_e4m3" else codes.round()
    return (codes * scale).view_as(weight)


@torch.no_grad()
def quantize(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """Round the weights of a model in place."""
    for name, weight in model.named_parameters():
        if any(part in name for part in _QUANTIZED_NAMES[config.layers]):
            weight.copy_(round_to_format(weight, config.weights, config.block_size))


def describe_engine(recipe: LabRecipe) -> str:
    """Describe the generation engine: ``bfloat16 with int4 experts in blocks of 32 (2 weight updates behind)``."""
    config, lag = recipe.policy.generation, recipe.grpo.async_grpo.lag
    parts: list[str] = [config.precision]
    if quantization := config.quantization:
        blocks = f" in blocks of {quantization.block_size}" if quantization.block_size else ""
        parts.append(f" with {quantization.weights} {quantization.layers}{blocks}")
    if lag:
        parts.append(f" ({lag} weight update{'s' * (lag > 1)} behind)")
    return "".join(parts)
