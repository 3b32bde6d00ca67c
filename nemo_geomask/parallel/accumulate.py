"""Steps of a given number of documents, whatever microbatches they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from nemo_geomask.errors import ArgumentError

__all__ = ["DocumentStep", "collect_documents"]

M = TypeVar("M")


@dataclass(frozen=True)
class DocumentStep(Generic[M]):
    """Microbatches of one optimiser step on this rank.

    Attributes:
        microbatches: this rank's, in order; equally many on all ranks. None where this rank had run dry: run a fully
            masked microbatch there if the model's own collectives need every rank.
        documents: in the step, over all ranks: the loss's ``global_valid_seqs``, the same for every microbatch.
        tokens: likewise, its ``global_valid_toks``.
        complete: whether the target was reached; False when all ranks ran dry first.
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

    Each round every rank draws one microbatch and one all-reduce of three integers adds up the documents, the tokens
    and the ranks that still had one; so all ranks stop after the same round, with the same denominators. Documents
    beyond the target in the last round belong to the step: nothing is drawn and thrown away.

    Args:
        source: an iterator over this rank's microbatches (``iter(loader)``); called again with the same one, it
            continues where the last step ended.
        docs_per_step: target, over all ranks of ``group``.
        count: (documents, trained tokens) of a microbatch.
        group: data-parallel group; None is one rank. Ranks that hold shares of the same documents (tensor- and
            context-parallel ones) must not be in it.
        device: where the counts are reduced; the group's own device.

    Returns: the step, or None once every rank has run dry with nothing drawn; on all ranks alike.
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
        round_ = torch.tensor([*counts, microbatch is not None], dtype=torch.int64, device=device)
        if group is not None:
            dist.all_reduce(round_, group=group)
        more_documents, more_tokens, alive = round_.tolist()
        if not alive:
            break
        drawn.append(microbatch)
        documents += more_documents
        tokens += more_tokens
    if not drawn:
        return None
    return DocumentStep(drawn, documents, tokens, documents >= docs_per_step)
