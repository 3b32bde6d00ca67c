"""From vocabulary-sharded logits to the gradient of each rank's shard: objective × level of the weight × mask × layout
of the tokens, on TP × CP processes, against one float64 oracle of the whole.

A cross of them in which any two settings of objective, level and mask meet runs by default; ``make matrix`` runs them
all, on every TP × CP up to 4 × 4, and says how long it took and how large the errors were.
"""

import itertools
import math
import os
import pickle
import time

import numpy as np
import pytest
import torch

from nemo_geomask import PrestepPass, build_loss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PackedSegments
from tests.helpers import oracle
from tests.helpers.batches import BUDGETS, MASKS, VARIANTS
from tests.helpers.from_logits import PADDED, TEMPERATURE, VOCAB, WIDTH, problem, shift, softmax_derivative

EVERYTHING = "GEOMASK_MATRIX" in os.environ
WORLDS = list(itertools.product((1, 2, 4), repeat=2)) if EVERYTHING else [(4, 1), (2, 2), (1, 4)]
REPRESENTATIVE = (2, 2)  # has every layout

NAMED = ("gspo", "gspo_token", "gmpo", "cispo", "sapo", "dppo", "ipo", "vespo", "topr", "dro", "reinforce")
OBJECTIVES = {"clipped_pg": {}, **{name: VARIANTS[name] for name in NAMED}}
LEVELS = {
    "uncorrected": {},
    **{
        level: {"use_importance_sampling_correction": True, "is_correction_level": level}
        for level in ("token", "turn", "sequence", "sequence_mean")
    },
    "normalized": {
        "use_importance_sampling_correction": True,
        "is_correction_level": "sequence",
        "is_correction_batch_normalize": True,
    },
    "anchored": {"ratio_anchor": "gen"},
    "interpolated": {"use_importance_sampling_correction": True, "proximal_policy": "interpolated"},
}
IMPOSSIBLE = ("interpolated", "budget")  # a budget reads prev_logprobs before the step
RULES = {
    "unmasked": [],
    **{name: [MASKS[name]] for name in ("geometric", "opsm", "icepop", "veto")},
    "trust_region": [MASKS["k3_mean"]],
    "dppo": [MASKS["dppo_kl"], MASKS["dppo_tv"]],
    "kpop": [MASKS["kpop"]],
    "budget": [BUDGETS["m2po"], BUDGETS["worst_sequences"]],
    "cppo": [MASKS["cppo"]],
    "vaco": [MASKS["vaco"], MASKS["vaco_kl"], MASKS["vaco_ratio"]],
    "turn": [MASKS["turn"], MASKS["turn_mean"], MASKS["ratio_abs"]],
    "prefix": [MASKS[name] for name in MASKS if name.startswith("prefix")],
}


def _configs():
    configs = {}
    for (o, objective), (r, rule) in itertools.product(enumerate(OBJECTIVES), enumerate(RULES)):
        levels = [level for level in LEVELS if (level, rule) != IMPOSSIBLE]
        for level in levels if EVERYTHING else [levels[(o + r) % len(levels)]]:
            settings = {**OBJECTIVES[objective], **LEVELS[level], "masks": RULES[rule]}
            configs[f"{objective}-{level}-{rule}"] = settings
    return configs


CONFIGS = _configs()


def test_any_two_settings_meet():
    names = [name.split("-") for name in CONFIGS]
    for one, other in itertools.combinations(range(3), 2):
        kinds = (OBJECTIVES, LEVELS, RULES)
        expected = {*itertools.product(kinds[one], kinds[other])} - {IMPOSSIBLE}
        assert {(name[one], name[other]) for name in names} == expected


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A file with what the oracle says of every configuration, computed once for all worlds."""
    batch, logits, targets = problem()
    answers = {}
    for name, config in CONFIGS.items():
        loss_fn = build_loss(config)
        answer = oracle.evaluate(
            loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
        )
        assert answer.margin > 1e-5, f"{name}: a decision lies within float32 rounding of its bound"
        outer = np.zeros((len(logits), PADDED))
        outer[:, :WIDTH] = answer.grad
        assert np.abs(outer).max() > 1e-4
        answers[name] = (answer.loss, answer.metrics, outer)
    path = tmp_path_factory.mktemp("matrix") / "truth.pickle"
    path.write_bytes(pickle.dumps((answers, softmax_derivative(logits, targets))))
    return path


def _layouts(rank, tp, cp):
    """Per layout: (where in [B, PADDED] this rank's positions lie, its segments or None for padded rows, whether the
    vocabulary is sharded)."""
    import torch.distributed as dist

    # Ranks of a tensor-parallel group are neighbours, as Megatron places them.
    cp_groups = [dist.new_group(list(range(t, tp * cp, tp))) for t in range(tp)]
    shares = {"cp_rank": rank // tp, "cp_size": cp}
    across = (cp_groups[rank % tp],) if cp > 1 else ()
    batch, *_ = problem()
    rows = len(batch.curr)
    # Packed: a row as long as what trains of it needs, in multiples that divide into every share; padded: all alike.
    lengths = [16 * math.ceil(int(mask.nonzero().max() if mask.any() else 0) / 16) for mask in batch.data["token_mask"]]
    places = {
        "packed": [i * PADDED + t for i, length in enumerate(lengths) for t in range(length)],
        "padded": list(range(rows * PADDED)),
    }
    offsets = {"packed": [0, *itertools.accumulate(lengths)], "padded": list(range(0, rows * PADDED + 1, PADDED))}
    found = {}
    for layout in ("packed", "padded"):
        segments = PackedSegments(offsets[layout], **shares, groups=across)
        where = torch.tensor(places[layout])[segments.token_index]
        # Without context parallelism, padded rows are NeMo-RL's own.
        found[layout] = (where, segments if layout == "packed" or cp > 1 else None, True)
    if tp > 1:
        segments = PackedSegments(
            offsets["packed"], **shares, sp_rank=rank % tp, sp_size=tp, groups=(dist.group.WORLD,)
        )
        found["sequence-parallel"] = (torch.tensor(places["packed"])[segments.token_index], segments, False)
    return found


def _on_rank(rank, world, tp, cp, path):
    """Which positions and columns the rank holds, by layout, and its errors, by configuration and layout."""
    import torch.distributed as dist

    with open(path, "rb") as file:
        answers, derivative = pickle.load(file)
    derivative = derivative.reshape(-1, VOCAB)
    tp_group = [dist.new_group(list(range(c * tp, c * tp + tp))) for c in range(cp)][rank // tp]
    sizes = [VOCAB // tp + (r < VOCAB % tp) for r in range(tp)]
    start = sum(sizes[: rank % tp])
    layouts = _layouts(rank, tp, cp)
    batch, logits, targets = problem()
    flat = {key: value.reshape(-1) for key, value in shift(batch).items()}
    rows = {key: batch.data[key] for key in ("sample_mask", "rewards", "training_weight_version")}
    logits, targets = logits.view(-1, VOCAB), targets.view(-1)
    covered, errors = {}, {}
    for layout, (where, _, sharded) in layouts.items():
        columns = (start, start + sizes[rank % tp]) if sharded else (0, VOCAB)
        covered[layout] = (where.numpy(), columns)
    for name, config in CONFIGS.items():
        loss_fn = build_loss(config)
        told = PrestepPass(loss_fn.config)(batch.data).changes
        true_loss, true_metrics, outer = answers[name]
        for layout, (where, segments, sharded) in layouts.items():
            begin, end = covered[layout][1]
            shard = logits[where, begin:end].clone().requires_grad_()
            options = {"group": tp_group, "shard_sizes": sizes} if sharded and tp > 1 else {}
            logprobs = vocab_parallel_logprobs(shard, targets[where], temperature=TEMPERATURE, **options)
            if segments is None:
                logprobs = logprobs.view(len(batch.curr), PADDED)[:, :WIDTH]
                loss, metrics = loss_fn(logprobs, {**batch.data, **told}, batch.seqs, batch.toks)
            else:
                share = {key: value[where] for key, value in flat.items()}
                loss, metrics = loss_fn.packed(logprobs, {**share, **rows, **told}, segments, batch.seqs, batch.toks)
            loss.backward()
            true_grad = outer.reshape(-1, 1)[where] * derivative[where, begin:end]
            errors[name, layout] = _errors(loss.item(), metrics, shard.grad.numpy(), true_loss, true_metrics, true_grad)
    return covered, errors


def _errors(loss, metrics, grad, true_loss, true_metrics, true_grad):
    """Distances in units of what is allowed, and the gradient's as it is."""
    assert set(metrics) == set(true_metrics)
    infinite = [name for name, value in true_metrics.items() if math.isinf(value)]
    assert all(metrics[name] == true_metrics[name] for name in infinite)

    def far(found, true, rel, floor):
        return float(np.max(np.abs(np.subtract(found, true)) / (floor + rel * np.abs(true)), initial=0.0))

    finite = [name for name in true_metrics if name not in infinite]
    return {
        "loss": far(loss, true_loss, 1e-5, 1e-7),
        "metrics": far([metrics[name] for name in finite], [true_metrics[name] for name in finite], 1e-5, 2e-7),
        "gradient": far(grad, true_grad, 2e-5, 2e-8),
        "absolute": float(np.abs(grad - true_grad).max(initial=0.0)),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800 if EVERYTHING else 600)
@pytest.mark.parametrize(
    ("tp", "cp"),
    [pytest.param(*world, marks=() if world == REPRESENTATIVE else pytest.mark.long) for world in WORLDS],
    ids=[f"tp{tp}-cp{cp}" for tp, cp in WORLDS],
)
def test_shards_equal_the_oracle(tp, cp, truth):
    begun = time.monotonic()
    results = run_ranks(tp * cp, _on_rank, tp, cp, truth, timeout=1700 if EVERYTHING else 600)
    layouts = ["packed", "padded", *(["sequence-parallel"] if tp > 1 else [])]
    for layout in layouts:
        # Each position's each column of logits is on one rank.
        counts = np.zeros((len(problem()[0].curr) * PADDED, VOCAB), dtype=int)
        for covered, _ in results:
            where, (begin, end) = covered[layout]
            counts[where, begin:end] += 1
        assert counts.max() == 1
        assert layout != "padded" or counts.min() == 1
    worst = dict.fromkeys(("loss", "metrics", "gradient", "absolute"), (0.0, ""))
    for rank, (_, errors) in enumerate(results):
        assert set(errors) == set(itertools.product(CONFIGS, layouts))
        for (name, layout), found in errors.items():
            for kind, value in found.items():
                worst[kind] = max(worst[kind], (value, f"{name}, {layout}, rank {rank}"))
    print(f"tp {tp} cp {cp}: {len(errors)} cases on {tp * cp} ranks in {time.monotonic() - begun:.0f} s")
    for kind in ("loss", "metrics", "gradient"):
        print(f"  {kind}: {worst[kind][0]:.2g} of what is allowed ({worst[kind][1]})")
        assert worst[kind][0] <= 1, (kind, *worst[kind])
    print(f"  gradient: at most {worst['absolute'][0]:.1e} off ({worst['absolute'][1]})")
