"""Optimiser steps with a target number of documents, for microbatches that hold varying numbers of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from nemo_geomask.errors import ArgumentError

M = TypeVar("M")


@dataclass(frozen=True)
class DocumentStep(Generic[M]):
    """Microbatches of one optimiser step on this rank.

    Attributes:
        microbatches: this rank's microbatches, in order; the list is equally long on all ranks. An entry is None if
            this rank's source was exhausted: run a fully masked microbatch there if the model's collectives need every
            rank.
        documents: number of documents in the step over all ranks; pass it to the loss as ``global_valid_seqs`` for
            every microbatch.
        tokens: number of trained tokens in the step over all ranks; pass it as ``global_valid_toks``.
        complete: False if the sources of all ranks were exhausted before the step had enough documents.
    """

    microbatches: list[M | None]
    documents: int
    tokens: int
    complete: bool


def collect_documents(
    source: Iterator[M],
    *,
    docs_per_step: int,
    count: Callable[[M], tuple[int, int]],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> DocumentStep[M] | None:
    """Draw microbatches until the ranks together hold ``docs_per_step`` documents.

    In each round every rank draws one microbatch, and one all-reduce of three integers adds up the documents, the
    tokens and the ranks that had a microbatch. All ranks therefore stop after the same round, with the same
    denominators. Documents of the last round beyond the target belong to the step: nothing drawn is thrown away.

    Args:
        source: iterator over this rank's microbatches (``iter(loader)``). The next call with the same iterator
            continues where this step ended.
        docs_per_step: target number of documents, over all ranks of ``group``.
        count: returns (documents, trained tokens) of a microbatch.
        group: data-parallel group; None for a single rank. Ranks that hold shards of the same documents (tensor- and
            context-parallel ones) must not be in it.
        device: device on which the counts are reduced; the one that the group's backend needs.

    Returns: the step; None, on all ranks, if no rank drew a microbatch.

    Raises: ArgumentError: ``docs_per_step`` is not a positive integer.

    Source: Fast-LLM PR 502, ``docs_per_step``.
    """
    if docs_per_step < 1:
        raise ArgumentError(f"docs_per_step must be at least 1, but it is {docs_per_step}")
    drawn: list[M | None] = []
    documents = tokens = 0
    while documents < docs_per_step:
        microbatch = next(source, None)
        counts = (0, 0) if microbatch is None else count(microbatch)
        totals = torch.tensor([*counts, microbatch is not None], dtype=torch.int64, device=device)
        if group is not None:
            dist.all_reduce(totals, group=group)
        round_documents, round_tokens, drawing_ranks = totals.tolist()
        if not drawing_ranks:
            break
        drawn.append(microbatch)
        documents += round_documents
        tokens += round_tokens
    if not drawn:
        return None
    return DocumentStep(drawn, documents, tokens, documents >= docs_per_step)
