"""Several processes against one: the gradients of every parameter, and the course of training step by step."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")

from nemo_geomask import build_loss
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.packed_rows import pack_sequences
from nemo_geomask.tools.lab.policy_model import token_logprobs
from nemo_geomask.tools.lab.ranks import Axis, Ranks, start_ranks
from nemo_geomask.tools.lab.trainer import Trainer, accumulate_gradients
from nemo_geomask.tools.lab.training_engine import TrainingEngine
from tests.tools.lab.tiny_recipe import TINY, merged

pytestmark = pytest.mark.slow

TIMINGS = {"generation_seconds", "step_seconds"}
# (tp, cp, dp), and the courses of training to compare there.
LAYOUTS = {
    2: {(2, 1, 1): ["quantized"], (1, 2, 1): ["first", "replayed"], (1, 1, 2): ["documents"]},
    4: {
        (2, 2, 1): ["quantized", "first", "replayed"],
        (4, 1, 1): [],
        (1, 4, 1): [],
        (2, 1, 2): [],
        (1, 2, 2): ["documents"],
    },
}
LOSSES = {
    "clipped_pg": {"name": "clipped_pg", "reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.1},
    "gspo": {
        "name": "gspo",
        "reference_policy_kl_penalty": 0,
        "use_importance_sampling_correction": True,
        "is_correction_level": "sequence_mean",
        "masks": [{"preset": "geometric", "min": 0.9, "max": 1.1}, {"preset": "veto", "min": 0.2, "max": 5.0}],
    },
}
# Sampled in float32, a token hangs on a last bit so rarely that the courses stay together; int4 weights make the
# mismatch.
QUANTIZED = {"precision": "float32", "quantization": {"weights": "int4"}}
COURSES = {
    "quantized": {"grpo": {"max_num_steps": 3}, "policy": {"generation": QUANTIZED}, "loss_fn": LOSSES["gspo"]},
    "replayed": {
        "grpo": {"max_num_steps": 2},
        "policy": {"generation": {**QUANTIZED, "temperature": 0.9}, "router_replay": {"enabled": True}},
    },
    # bfloat16 sampling, from weights that are still the same bits.
    "first": {"grpo": {"max_num_steps": 1}, "loss_fn": LOSSES["clipped_pg"]},
    # Two steps of 12 and 4 responses; with two data-parallel ranks, one of them runs dry in the second.
    "documents": {
        "grpo": {"max_num_steps": 2},
        "policy": {
            "train_global_batch_size": None,
            "docs_per_step": 12,
            "train_micro_batch_size": 6,
            "generation": QUANTIZED,
        },
    },
}


def recipe(change):
    return LabRecipe.read(merged(TINY, change), source="tiny")


def course(settings, loss_fn, ranks=None):
    trainer = Trainer(settings, build_loss(loss_fn), ranks)
    return [{key: metrics[key] for key in metrics.keys() - TIMINGS} for metrics, _ in trainer.steps()]


def stale(policy):
    """The policy a little later: log-probs of the batch are no longer those of the rollout."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.02)
    return policy


class Padded(TrainingEngine):
    """Whole padded rows through transformers' own attention and its plain loop over experts."""

    def evaluate(self, model, loss, batch, documents, tokens):
        logprobs = token_logprobs(model, batch["input_ids"])
        return loss(next_token_logprobs=logprobs, data=batch, global_valid_seqs=documents, global_valid_toks=tokens)


def gradients(settings, name, data, engine):
    """Gradients by parameter, and the metrics, of one step on ``data`` in microbatches of 4 rows."""
    trainer = Trainer(settings, build_loss(LOSSES[name]), engine.ranks)
    policy, dp = stale(trainer.policy), engine.ranks.dp
    if isinstance(engine, Padded):
        policy.set_attn_implementation("sdpa")
        policy.set_experts_implementation("eager")
    documents, tokens = len(data["rewards"]), int(data["token_mask"][:, 1:].sum())
    batches = [
        {key: value[rows] for key, value in data.items()}
        for rows in torch.split(torch.arange(documents), 4)[dp.rank :: dp.size]
    ]
    metrics = accumulate_gradients(engine, policy, trainer.loss, batches, documents, tokens)
    return {key: weight.grad for key, weight in policy.named_parameters()}, metrics


def equal(found, expected, what):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6), what


def check(layouts, truth, ranks):
    """On each rank of a company, for each layout of as many processes."""
    data, found = truth
    for (tp, cp, dp), courses in layouts.items():
        ranks = Ranks.of(tp=tp, cp=cp, dp=dp)
        for name in LOSSES:
            ours, metrics = gradients(recipe({}), name, data[name], TrainingEngine(ranks))
            expected, whole = found[name]
            assert ours.keys() == expected.keys()
            for key, gradient in ours.items():
                where = f"{key} of {name} at tp {tp}, cp {cp}, dp {dp}"
                torch.testing.assert_close(
                    gradient, expected[key], rtol=2e-4, atol=2e-6, msg=lambda text, where=where: f"{where}: {text}"
                )
            equal([metrics], [whole], (name, tp, cp, dp))
        for name in courses:
            settings = recipe(merged(COURSES[name], {"lab": {"tp": tp, "cp": cp, "dp": dp}}))
            equal(course(settings, settings.loss_fn, ranks), found[f"course {name}"], (name, tp, cp, dp))


@pytest.fixture(scope="module")
def truth():
    """Batches, and what one process makes of them."""
    threads = torch.get_num_threads()
    data, found = {}, {}
    for name in LOSSES:
        _, rollout = Trainer(recipe({}), build_loss(LOSSES[name])).step()
        data[name] = rollout.data
        found[name] = gradients(recipe({}), name, rollout.data, Padded())
        # Nothing below is a comparison of zeros.
        assert all(gradient.abs().max() > 1e-5 for gradient in found[name][0].values())
        assert found[name][1]["probs_ratio_max"] > 1.01
    for name, change in COURSES.items():
        settings = recipe(change)
        found[f"course {name}"] = course(settings, settings.loss_fn)
    torch.set_num_threads(threads)
    return data, found


def test_the_engine_alone_equals_padded_rows(truth):
    data, found = truth
    for name in LOSSES:
        ours, metrics = gradients(recipe({}), name, data[name], TrainingEngine())
        for key, gradient in ours.items():
            torch.testing.assert_close(gradient, found[name][0][key], rtol=2e-4, atol=2e-6)
        equal([metrics], [found[name][1]], name)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_and_courses_equal_those_of_one_process(truth, world):
    threads = torch.get_num_threads()
    work = functools.partial(check, LAYOUTS[world], truth)
    with start_ranks(work, tp=1, cp=1, dp=world) as ranks:
        work(ranks)
    torch.set_num_threads(threads)


def test_the_quantized_course_is_no_comparison_of_trifles(truth):
    steps = truth[1]["course quantized"]
    assert len({step["reward"] for step in steps}) == 3
    assert all(step["geomask/mismatch_abs"] > 0.02 and step["grad_norm"] > 0.01 for step in steps)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_shares_cover_every_token_once_and_see_what_comes_before(cp):
    lengths = torch.tensor([5, 16, 1, 9])
    packings = [pack_sequences(lengths, Axis(rank, cp)) for rank in range(cp)]
    total = int(packings[0].segments.cu_seqlens[-1])
    # What each slot of the shares, one after another, holds: (sequence, place).
    held = [(int(r), int(p)) for packing in packings for r, p in zip(packing.row, packing.position, strict=True)]
    padded = packings[0].segments.cu_seqlens.diff().tolist()
    assert sorted(held) == [(row, place) for row in range(len(lengths)) for place in range(padded[row])]
    multiple = 2 * cp if cp > 1 else 1
    assert all(length % multiple == 0 and length >= need for length, need in zip(padded, lengths.tolist(), strict=True))
    for packing in packings:
        assert len(packing.row) == total // cp
        for token, (row, place) in enumerate(zip(packing.row.tolist(), packing.position.tolist(), strict=True)):
            s, q = divmod(int(packing.query_slot[token]), packing.query_index.shape[1])
            assert (s, int(packing.query_index[s, q])) == (row, token)
            seen = [held[int(key)] for key in packing.key_index[s][packing.visible[s, 0, q]]]
            assert seen == [(row, before) for before in range(place + 1)]
