"""Expert routes (the experts of each token): reading them from one engine, and replaying them in another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["hook_routers", "routes_differ"]


@contextlib.contextmanager
def hook_routers(model: PreTrainedModel, replayed_routes: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Read the routes of forward passes within the block, or replace them.

    Args:
        model: a model with a router, ``mlp.gate``, in every layer.
        replayed_routes: [N, L, K] experts of N tokens in each layer, which replace the router's choice; -1 keeps it.
            They are weighted by the router's probabilities, so that the router still gets gradients.

    Yields:
        A list to which each layer appends the router's choice, [N, K].
    """
    chosen: list[Tensor] = []

    def read_or_replace(
        router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, router_choice = output
        chosen.append(router_choice)
        if replayed_routes is None:
            return None
        layer_routes = replayed_routes[:, (len(chosen) - 1) % replayed_routes.shape[1]].to(router_choice.dtype)
        route = torch.where(layer_routes < 0, router_choice, layer_routes)
        route_weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, route)
        if router.norm_topk_prob:
            route_weights = route_weights / route_weights.sum(dim=-1, keepdim=True)
        return logits, route_weights.to(weights.dtype), route

    layers: Any = model.model.layers
    handles = [layer.mlp.gate.register_forward_hook(read_or_replace) for layer in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def routes_differ(routes: Tensor, other_routes: Tensor) -> Tensor:
    """Compare routes [..., L, K]; return [...] bool, True if the sets of experts differ in at least one layer."""
    return (routes.sort(dim=-1).values != other_routes.sort(dim=-1).values).flatten(-2).any(dim=-1)
