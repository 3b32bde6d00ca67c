"""The stand-in for attention over packed rows and shares of them, against torch's own, sequence by sequence."""

from __future__ import annotations

import itertools

import pytest
import torch

from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.tools.rehearse.cpu_shims.attention_shim import packed_attention, token_positions
from tests.helpers.shares import shares

OFFSETS = [0, 8, 20, 24]
HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6


class Alone:
    """A group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


def row(requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))
    made = [torch.randn(OFFSETS[-1], 1, *shape, generator=generator) for shape in shapes]
    return [part.requires_grad_(requires_grad) for part in made]


def one_by_one(query, key, value, scale):
    found = []
    for start, end in itertools.pairwise(OFFSETS):
        parts = (part[start:end, 0].transpose(0, 1) for part in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        found.append(attend(*parts, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(found).unsqueeze(1)


def test_a_packed_row_is_its_sequences_one_by_one():
    ours, theirs = row(), row()
    found, wanted = packed_attention(*ours, OFFSETS, Alone(), scale=0.3), one_by_one(*theirs, 0.3)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_window_and_a_sink():
    query, key, value = row(requires_grad=False)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = packed_attention(query, key, value, OFFSETS, Alone(), scale=0.3, window=(2, 0), sink=sink)
    for token, head in ((3, 0), (8, 1), (19, 3)):
        start = max(before for before in OFFSETS if before <= token)
        seen = range(max(start, token - 2), token + 1)
        scores = [0.3 * query[token, 0, head] @ key[at, 0, head // 2] for at in seen]
        shared = torch.stack([*scores, sink[head]]).softmax(0)
        wanted = sum(share * value[at, 0, head // 2] for share, at in zip(shared, seen, strict=False))
        torch.testing.assert_close(found[token, 0, head], wanted)


@pytest.mark.parametrize("size", [1, 2])
def test_places_are_megatrons(size):
    for rank in range(size):
        assert token_positions(OFFSETS, rank, size).tolist() == [place for place, _ in shares(OFFSETS, rank, size)]


def share(rank, world):
    """Output and gradients of one rank's share, with the places of its tokens."""
    held = torch.tensor([place for place, _ in shares(OFFSETS, rank, world)])
    parts = [part.detach()[held].requires_grad_() for part in row()]
    found = packed_attention(*parts, OFFSETS, torch.distributed.group.WORLD, scale=0.3)
    (found * found).sum().backward()
    return held.tolist(), found.tolist(), [part.grad.tolist() for part in parts]


@pytest.mark.slow
def test_shares_are_the_whole_row():
    whole = row()
    wanted = packed_attention(*whole, OFFSETS, Alone(), scale=0.3)
    (wanted * wanted).sum().backward()
    for held, found, gradients in run_ranks(2, share, timeout=120):
        torch.testing.assert_close(torch.tensor(found), wanted.detach()[held])
        for mine, part in zip(gradients, whole, strict=True):
            torch.testing.assert_close(torch.tensor(mine), part.grad[held])
