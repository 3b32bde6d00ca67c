"""Which experts each token goes through: read from one engine, and replayed in another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["differs", "routing"]


@contextlib.contextmanager
def routing(model: PreTrainedModel, replayed: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Read, or set, the routes of the passes within the block.

    Args:
        model: whose every layer has a router, ``mlp.gate``.
        replayed: [N, L, K] experts of each of N tokens in each layer. They take the place of the router's own choice,
            weighted by the router's own probabilities, through which it is still trained. -1: its own choice.

    Yields:
        A list that gets the router's own choice, [N, K], of each layer in turn.
    """
    chosen: list[Tensor] = []

    def watch(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, own = output
        chosen.append(own)
        if replayed is None:
            return None
        given = replayed[:, (len(chosen) - 1) % replayed.shape[1]].to(own.dtype)
        route = torch.where(given < 0, own, given)
        picked = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, route)
        if router.norm_topk_prob:
            picked = picked / picked.sum(dim=-1, keepdim=True)
        return logits, picked.to(weights.dtype), route

    layers: Any = model.model.layers
    handles = [layer.mlp.gate.register_forward_hook(watch) for layer in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def differs(routes: Tensor, others: Tensor) -> Tensor:
    """[...] bool of [..., L, K]: whether a token goes through another set of experts in at least one layer."""
    return (routes.sort(dim=-1).values != others.sort(dim=-1).values).flatten(-2).any(dim=-1)
