"""Steps by document count: uneven ranks, ranks that run dry, a target never reached."""

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.errors import ArgumentError
from nemo_geomask.parallel import collect_documents
from nemo_geomask.parallel.local_processes import run_ranks

# Documents of each microbatch, by rank.
SOURCES = {
    "even": [[2, 2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2]],
    "uneven": [[1, 1, 1, 1, 1], [4, 4, 4, 4, 4], [2, 2, 2, 2, 2], [0, 5, 0, 5, 0]],
    "one_runs_dry": [[1, 1, 1, 1], [1], [1, 1, 1, 1], [1, 1, 1, 1]],
    "never_reached": [[1, 1], [], [1], [2, 0]],
    "nothing": [[], [], [], []],
    "empty_microbatches": [[0, 0, 0, 9], [0], [0, 0], []],
}


def expected(sources, target):
    """(rounds, documents) of each step, by a loop over rounds."""
    steps, position = [], 0
    while True:
        rounds = documents = 0
        while documents < target and any(position < len(source) for source in sources):
            documents += sum(source[position] for source in sources if position < len(source))
            position += 1
            rounds += 1
        if not rounds:
            return steps
        steps.append((rounds, documents))


def _steps(rank, world):
    import torch.distributed as dist

    found = {}
    for name, sources in SOURCES.items():
        source, steps = iter(sources[rank]), []
        while (
            step := collect_documents(source, docs_per_step=7, count=lambda n: (n, 10 * n), group=dist.group.WORLD)
        ) is not None:
            steps.append((step.microbatches, step.documents, step.tokens, step.complete))
        found[name] = steps
    return found


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_round_with_the_same_denominator():
    results = run_ranks(4, _steps)
    for name, sources in SOURCES.items():
        truth = expected(sources, 7)
        for rank in range(4):
            steps = results[rank][name]
            assert [(len(drawn), documents) for drawn, documents, *_ in steps] == truth
            assert [tokens for *_, tokens, _ in steps] == [10 * documents for _, documents in truth]
            assert [complete for *_, complete in steps] == [documents >= 7 for _, documents in truth]
            # Nothing is lost and nothing drawn twice.
            assert [n for drawn, *_ in steps for n in drawn if n is not None] == sources[rank]


def _loss(rank, world):
    """A step's loss and gradient, with microbatches of uneven documents."""
    import torch.distributed as dist

    rows = _rows()
    mine = iter([rows[i] for i in range(rank, len(rows), world)])
    step = collect_documents(
        mine, docs_per_step=len(rows), count=lambda row: (1, int(row["token_mask"].sum()) - 1), group=dist.group.WORLD
    )
    loss_fn, total = build_loss(CONFIG), torch.zeros(())
    for row in step.microbatches:
        if row is not None:
            loss, _ = loss_fn(row["curr"], row, step.documents, step.tokens)
            total = total + loss.detach()
    dist.all_reduce(total)
    return total.item(), step.documents, step.tokens


CONFIG = {"loss_normalization": "documents", "reference_policy_kl_penalty": 0.0}


def _rows():
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in (5, 9, 3, 7, 6):
        prev = -torch.rand(1, length, generator=draw)
        rows.append(
            {
                "curr": (prev + 0.1 * torch.randn(1, length, generator=draw))[:, 1:],
                "prev_logprobs": prev,
                "generation_logprobs": prev,
                "advantages": torch.randn(1, length, generator=draw),
                "token_mask": torch.ones(1, length),
                "sample_mask": torch.ones(1),
            }
        )
    return rows


@pytest.mark.slow
def test_losses_of_the_step_add_up_to_the_mean_over_its_documents():
    rows = _rows()
    toks = sum(row["token_mask"].shape[1] - 1 for row in rows)
    alone = [build_loss(CONFIG)(row["curr"], row, 1.0, 1.0)[0].item() for row in rows]
    for total, documents, tokens in run_ranks(4, _loss):
        assert (documents, tokens) == (5, toks)
        assert total == pytest.approx(sum(alone) / 5, rel=1e-5)


def test_one_rank_needs_no_group():
    step = collect_documents(iter([3, 3, 3]), docs_per_step=5, count=lambda n: (n, n))
    assert (step.microbatches, step.documents, step.complete) == ([3, 3], 6, True)
    step = collect_documents(iter([1, 3]), docs_per_step=1, count=lambda n: (n, n))
    assert (step.microbatches, step.documents, step.complete) == ([1], 1, True)


def _two_groups(rank, world):
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step = collect_documents(iter([rank] * 9), docs_per_step=5, count=lambda n: (n, 10 * n), group=groups[rank // 2])
    return len(step.microbatches), step.documents, step.tokens


@pytest.mark.slow
def test_all_ranks_stop_by_the_documents_of_their_own_group():
    # Ranks 0 and 1 draw one document a round, ranks 2 and 3 five.
    assert run_ranks(4, _two_groups) == [(5, 5, 50)] * 2 + [(1, 5, 50)] * 2


@pytest.mark.parametrize("target", [0, -1])
def test_target_must_be_positive(target):
    with pytest.raises(ArgumentError, match="docs_per_step must be at least 1"):
        collect_documents(iter([]), docs_per_step=target, count=lambda n: (n, n))
