"""Attention over packed rows and context-parallel ranks, for which no library has a CPU kernel."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed.nn.functional

from nemo_geomask.hosts.nemo_rl.patch import Patch, attribute


def megatron(module: Any) -> Iterator[Patch]:
    """Give Megatron's own attention context parallelism, packed rows, and two head sizes.

    dot_product_attention.py:60 refuses the first and :145 the second, and multi_latent_attention.py:210 needs the
    third: on GPUs, transformer-engine has them. Here each rank's queries attend to the keys of all ranks.
    """
    groups = importlib.import_module("megatron.core.parallel_state")

    def init(original: Any) -> Any:
        def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            without_cp = copy.copy(config)
            without_cp.context_parallel_size = 1
            sizes = [kwargs.pop(name, None) for name in ("k_channels", "v_channels")]
            original(self, without_cp, *args, **kwargs)
            self.has_two_head_sizes = sizes[0] != sizes[1]

        return make

    def forward(original: Any) -> Any:
        def attend(
            self: Any,
            query: Any,
            key: Any,
            value: Any,
            mask: Any,
            *args: Any,
            packed_seq_params: Any = None,
            **more: Any,
        ) -> Any:
            group = groups.get_context_parallel_group()
            if packed_seq_params is None and group.size() == 1 and not self.has_two_head_sizes:
                return original(self, query, key, value, mask, *args, **more)
            if packed_seq_params is None:
                offsets = [0, query.shape[0] * group.size()]
            else:
                offsets = packed_seq_params.cu_seqlens_q_padded.tolist()
                query, key, value = (part.unsqueeze(1) for part in (query, key, value))  # [T, heads, width]
            output = packed_attention(
                *(query, key, value),
                offsets,
                group,
                scale=self.softmax_scale,
                window=self.scale_mask_softmax.window_size,
                sink=self.softmax_offset,
            )
            return output.flatten(2) if packed_seq_params is None else output.flatten(1)

        return attend

    yield attribute(module.DotProductAttention, "__init__", init)
    yield attribute(module.DotProductAttention, "forward", forward)


def token_positions(offsets: Sequence[int], rank: int, size: int) -> Any:
    """Return the positions of a rank's tokens in the packed row.

    A sequence is cut into ``2 * size`` equal parts, of which a rank has ``rank`` and ``2 * size - 1 - rank``, as in
    Megatron and transformer-engine.
    """
    if size == 1:
        return torch.arange(offsets[-1])
    positions = []
    for start, end in itertools.pairwise(offsets):
        part = (end - start) // (2 * size)
        positions += [torch.arange(start + at * part, start + (at + 1) * part) for at in (rank, 2 * size - 1 - rank)]
    return torch.cat(positions)


def packed_attention(
    query: Any,
    key: Any,
    value: Any,
    offsets: Sequence[int],
    group: Any,
    *,
    scale: float,
    window: tuple[int, int] | None = None,
    sink: Any = None,
) -> Any:
    """Compute causal attention within each sequence of a packed row, of which each rank holds a shard.

    Args:
        query: [T, B, heads, width], this rank's shard.
        key: [T, B, groups, width]; heads / groups neighbouring heads share one group.
        value: [T, B, groups, value width].
        offsets: positions in the whole row at which the sequences begin, and the end of the row.
        group: context-parallel process group.
        scale: factor of the scores.
        window: how many tokens before its own a query sees at most, -1 for all; the second number is ignored.
        sink: [heads], the score of an attention sink, which has no value; or None.

    Returns:
        [T, B, heads, value width].
    """
    positions = [token_positions(offsets, rank, group.size()) for rank in range(group.size())]
    query_positions, key_positions = positions[group.rank()], torch.cat(positions)
    starts = torch.tensor(offsets[1:-1])
    query_sequence, key_sequence = (
        torch.bucketize(part, starts, right=True) for part in (query_positions, key_positions)
    )
    behind = query_positions[:, None] - key_positions[None, :]
    visible = (query_sequence[:, None] == key_sequence[None, :]) & (behind >= 0)
    if window is not None and window[0] >= 0:
        visible &= behind <= window[0]
    if group.size() > 1:
        gather: Any = torch.distributed.nn.functional.all_gather  # differentiable
        key, value = (torch.cat(gather(part.contiguous(), group=group)) for part in (key, value))
    keys, values = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query.float(), keys.float()) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : len(key_positions)]
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, values.float()).to(query.dtype)
