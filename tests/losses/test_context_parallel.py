"""Every loss on packed tokens and on context-parallel shares of them, against the float64 oracle of the whole batch."""

import itertools
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_geomask import build_loss
from nemo_geomask.errors import LostRankError, NonFiniteError, ShapeError
from nemo_geomask.parallel.local_processes import RankError, lead_ranks, run_ranks
from nemo_geomask.segments import PackedSegments
from tests.helpers import batches, oracle
from tests.helpers.batches import MASKS, VARIANTS

LEVELS = {
    "none": {},
    **{
        level: {"use_importance_sampling_correction": True, "is_correction_level": level}
        for level in ("token", "sequence", "sequence_mean")
    },
}
NORMALIZATIONS = {
    "sequences": {},
    "documents": {"loss_normalization": "documents"},
    "constant": {"loss_normalization": "constant", "loss_normalization_constant": 9.0},
}
MULTIPLE = 8  # divides into 2·CP chunks for every CP here


def configs():
    """Each variant with each level and mask, normalisations and further settings in turn."""
    masks = {"none": [], **{name: [mask] for name, mask in MASKS.items()}, "all": list(MASKS.values())}
    turns = itertools.cycle([{}, {"positive_example_nll_weight": 0.2}, *NORMALIZATIONS.values()])
    made = {}
    for (v, variant), (i, level), (m, mask) in itertools.product(*map(enumerate, (VARIANTS, LEVELS, masks))):
        if mask not in ("none", "all") and (v + i + m) % len(LEVELS):
            continue  # every pair still occurs
        config = {**VARIANTS[variant], **LEVELS[level], "masks": masks[mask]}
        further = next(turns)
        if "loss_normalization" in further:
            if config.get("use_cispo"):
                further = {}
            config.pop("token_level_loss", None)
        made[f"{variant}-{level}-{mask}-{len(made)}"] = {**config, **further}
    return made


CONFIGS = configs()


def test_every_pair_of_settings_occurs():
    seen = {tuple(name.split("-")[:3]) for name in CONFIGS}
    assert {(v, level) for v, level, _ in seen} == set(itertools.product(VARIANTS, LEVELS))
    assert {(level, m) for _, level, m in seen} == set(itertools.product(LEVELS, [*MASKS, "none", "all"]))
    assert {(v, m) for v, _, m in seen} == set(itertools.product(VARIANTS, [*MASKS, "none", "all"]))


def packed(batch):
    """Rows cut to uneven lengths and put one after another, with garbage in the padding; and where each token went."""
    token_mask = batch.data["token_mask"][:, 1:]
    offsets, rows, columns = [0], [], []
    for row in range(token_mask.shape[0]):
        trained = token_mask[row].nonzero()
        length = int(trained.max()) + 1 if len(trained) else 0
        padded = -(-length // MULTIPLE) * MULTIPLE
        offsets.append(offsets[-1] + padded)
        rows += [row] * padded
        columns += list(range(padded))
    rows, columns = torch.tensor(rows), torch.tensor(columns)
    inside = columns < token_mask.shape[1]
    columns = columns.clamp(max=token_mask.shape[1] - 1)

    def take(values, fill):
        return torch.where(inside, values[rows, columns], fill)

    data = {key: take(batch.data[key][:, 1:], 0.0 if key == "token_mask" else torch.nan) for key in batches.TOKEN_KEYS}
    data |= {key: batch.data[key] for key in ("sample_mask", "rewards")}
    return take(batch.curr, torch.nan), data, offsets, (rows, columns, inside)


def evaluate(config, batch, rank=0, world=1, groups=()):
    curr, data, offsets, _ = packed(batch)
    segments = PackedSegments(offsets, cp_rank=rank, cp_size=world, groups=groups)
    index = segments.token_index
    mine = curr[index].requires_grad_()
    share = {key: value[index] if key in batches.TOKEN_KEYS else value for key, value in data.items()}
    loss, metrics = build_loss(config).packed(mine, share, segments, batch.seqs, batch.toks)
    loss.backward()
    return loss.item(), metrics, index.numpy(), mine.grad.numpy()


def check(found, config, batch):
    """Every rank's loss and metrics are the whole's, and the gradients put together are the whole's."""
    loss_fn = build_loss(config)
    truth = oracle.evaluate(
        loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
    )
    *_, (rows, columns, inside) = packed(batch)
    gradient = np.zeros(len(rows))
    for loss, metrics, index, grad in found:
        assert loss == pytest.approx(truth.loss, rel=1e-4, abs=1e-6)
        assert set(metrics) == set(truth.metrics)
        for name, value in truth.metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        gradient[index] = grad
    whole = np.zeros(batch.curr.shape)
    np.add.at(whole, (rows[inside], columns[inside]), gradient[inside])
    np.testing.assert_allclose(whole, truth.grad, rtol=1e-4, atol=1e-7)
    assert not gradient[~inside].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if index % 3 == 0 else pytest.mark.long) for index, name in enumerate(CONFIGS)]
)
def test_packed_equals_oracle(name):
    batch = batches.rollouts(seed=3, width=23)
    check([evaluate(CONFIGS[name], batch)], CONFIGS[name], batch)


def spoilt():
    """Batches with a bad value in a sequence's first token, which lies on another rank than the rest of it, of the
    engine's, of the model's, and both."""
    batch = batches.rollouts(seed=4, width=23)
    gen, curr = batch.data["generation_logprobs"].clone(), batch.curr.clone()
    gen[0, 3], curr[0, 9] = torch.nan, torch.nan
    return {
        "gen": batch.with_data(generation_logprobs=gen),
        "both": replace(batch.with_data(generation_logprobs=gen), curr=curr),
        "curr": replace(batch, curr=curr),
    }


SPOILT = {
    "default": {},
    "pooled": {**VARIANTS["gmpo"], **LEVELS["sequence"], "masks": [MASKS["veto"], MASKS["opsm"], MASKS["k3_mean"]]},
}


def configs_of(world, step):
    """One in ``step`` of the configurations, others on four ranks than on two; they have every setting.

    All of them, in which every pair of settings occurs, run on one rank.
    """
    chosen = dict(itertools.islice(CONFIGS.items(), 0 if world == 4 else 1, None, step))
    settings = [set(part) for part in zip(*(name.split("-")[:3] for name in chosen), strict=True)]
    assert settings == [set(VARIANTS), set(LEVELS), {*MASKS, "none", "all"}]
    return chosen


def _all_configs(rank, world, step):
    import torch.distributed as dist

    groups = (dist.group.WORLD,)
    batch = batches.rollouts(seed=4, width=23)
    found = {name: evaluate(config, batch, rank, world, groups) for name, config in configs_of(world, step).items()}
    for name, config in SPOILT.items():
        for kind, bad in spoilt().items():
            for nonfinite in ("drop_sequence", "drop_token"):
                found[name, kind, nonfinite] = evaluate({**config, "nonfinite": nonfinite}, bad, rank, world, groups)
    # A bad value on one rank makes all of them raise.
    try:
        evaluate({"nonfinite": "raise"}, spoilt()["gen"], rank, world, groups)
    except NonFiniteError as error:
        return found, str(error)
    return found, "no error"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "step"), [(2, 9), *(pytest.param(n, 3, marks=pytest.mark.long) for n in (2, 4))])
def test_context_parallel_equals_oracle(world, step):
    results = run_ranks(world, _all_configs, step)
    batch = batches.rollouts(seed=4, width=23)
    for name, config in configs_of(world, step).items():
        check([found[name] for found, _ in results], config, batch)
    assert all("1 in data['generation_logprobs']" in message for _, message in results)
    for name, config in SPOILT.items():
        for nonfinite in ("drop_sequence", "drop_token"):
            for kind, bad in spoilt().items():
                mine = [found[name, kind, nonfinite] for found, _ in results]
                check(mine, {**config, "nonfinite": nonfinite}, bad)


# Rows of the statistics beyond the trained tokens, lengths and non-finite tokens, and rows of their gradient.
ROWS = {
    "ppo": ({}, 0, 0),
    "gspo": (VARIANTS["gspo"], 3, 1),  # its weight is a sequence's, reported even where it isn't applied
    "gspo_token": (VARIANTS["gspo_token"], 2, 0),
    "gmpo": (VARIANTS["gmpo"], 2, 1),
    "veto": ({"masks": [MASKS["veto"]]}, 2, 0),
    # A prefix's sum and count, each of two runs on two ranks.
    "veto, prefix": ({"masks": [MASKS["veto"], MASKS["prefix_mean"]]}, 2 + 2 * 4, 0),
    # The mismatch serves weight and mask, the total log-ratio OPSM, the log-ratio GSPO, the mean advantage both.
    "corrected": (
        {**VARIANTS["gspo"], **LEVELS["sequence_mean"], "masks": [MASKS["geometric"], MASKS["opsm"]]},
        4,
        1,
    ),
    "corrected, drop_token": ({**VARIANTS["gspo"], **LEVELS["sequence"], "nonfinite": "drop_token"}, 3, 1),
    "corrected, raise": ({**VARIANTS["gspo"], **LEVELS["sequence"], "nonfinite": "raise"}, 3, 1),
}


class Watch(TorchDispatchMode):
    """(collective, bytes that this rank gives), in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # An all-gather's second argument is what it gives.
            self.seen.append((func._schema.name.split("::")[1].strip("_"), args[1].nbytes))
        return func(*args, **(kwargs or {}))


def _counted(rank, world):
    """What is communicated by a call and by its backward pass, for each configuration; over one group, and over a group
    each for the two kinds of share."""
    import torch.distributed as dist

    batch = batches.rollouts(seed=4, width=23)
    curr, data, offsets, _ = packed(batch)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    found = {}
    for groups in ((dist.group.WORLD,), (dist.group.WORLD, alone)):
        for name, (config, *_) in ROWS.items():
            loss_fn = build_loss(config)
            segments = PackedSegments(offsets, cp_rank=rank, cp_size=world, groups=groups)
            index = segments.token_index
            share = {key: value[index] if key in batches.TOKEN_KEYS else value for key, value in data.items()}
            with Watch() as forward:
                loss, metrics = loss_fn.packed(curr[index].requires_grad_(), share, segments, batch.seqs, batch.toks)
            with Watch() as backward:
                loss.backward()
            own = (loss_fn.config.normalization == "sequences") + (loss_fn.config.nonfinite == "drop_sequence")
            found[name, len(groups)] = (forward.seen, backward.seen, len(metrics), own)
    return found


@pytest.mark.slow
def test_collectives_are_few_and_small():
    sequences = len(packed(batches.rollouts(seed=4, width=23))[2]) - 1
    for found in run_ranks(2, _counted):
        for (name, groups), (forward, backward, metrics, own) in found.items():
            _, rows, gradients = ROWS[name]
            # The comparison of the ranks: seven integers, and over a second group those of both ranks of the first.
            compared, forward = forward[:groups], forward[groups:]
            assert compared == [("allgather_base", 7 * 8 * 2**group) for group in range(groups)]
            statistics, report = forward[:groups], forward[groups:]
            # The trained tokens; the length, where the loss is divided by it; and the non-finite tokens.
            rows += 1 + own
            assert statistics == [("allgather_base", 8 * rows * sequences)] * groups
            assert [kind for kind, _ in report] == ["allgather_base"] * groups
            assert all(size <= 8 * metrics for _, size in report)
            gradient = [("allgather_base", 8 * gradients * sequences)] if gradients else []
            assert backward == gradient * groups, name


PREFIXES = {"masks": [MASKS[name] for name in MASKS if name.startswith("prefix")]}
ALLOWANCE = {"masks": [MASKS["cppo"]]}


def _sent(rank, world):
    """Bytes that this rank gives for the prefixes of few and of many tokens, without and with quantiles."""
    import torch.distributed as dist

    sent = []
    for width, config in itertools.product((33, 1025), (PREFIXES, ALLOWANCE)):
        batch = batches.rollouts(seed=4, width=width)
        curr, data, segments = batches.packed_rows(batch, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
        with Watch() as watch:
            loss, _ = build_loss(config).packed(curr.requires_grad_(), data, segments, batch.seqs, batch.toks)
            loss.backward()
        sent.append(watch.seen)
    return sent


@pytest.mark.slow
def test_prefixes_of_any_length_cost_the_same():
    for short, short_excess, long, long_excess in run_ranks(4, _sent):
        assert short == long
        assert len(short) == 3  # the comparison of the ranks, the statistics' stage and the report
        assert short_excess == long_excess
        assert len(short_excess) == 3 + 1 + 12 + 1  # the length, its quantile, the prefixes


@pytest.mark.slow
def test_arithmetic_reads_nothing_back():
    # A tensor without data raises where its value is asked for. Of the configurations with all masks, every third is
    # enough for each objective and each level.
    chosen = dict([(name, config) for name, config in CONFIGS.items() if name.split("-")[2] == "all"][::3])
    assert {name.split("-")[0] for name in chosen} == set(VARIANTS)
    assert {name.split("-")[1] for name in chosen} == set(LEVELS)
    batch = batches.rollouts(seed=3, width=23)
    curr, data, offsets, _ = packed(batch)
    data = {key: value.to("meta") for key, value in data.items()}
    count = torch.ones((), device="meta")
    for config in chosen.values():
        loss_fn = build_loss(config)
        segments = PackedSegments(offsets, device="meta")
        loss, metrics = loss_fn.packed(curr.to("meta").requires_grad_(), data, segments, count, count)
        loss.backward()
        with pytest.raises(RuntimeError, match="meta"):
            metrics["loss"]  # the one copy


def test_tensors_of_another_length_than_the_row_are_refused():
    batch = batches.rollouts()
    curr, data, offsets, _ = packed(batch)
    segments = PackedSegments(offsets)
    with pytest.raises(ShapeError, match=r"logprobs must be a floating-point tensor \[\d+\]"):
        build_loss({}).packed(curr[1:], data, segments, 1, 1)
    with pytest.raises(ShapeError, match=r"data\['advantages'\] must be a tensor"):
        build_loss({}).packed(curr, {**data, "advantages": data["advantages"][1:]}, segments, 1, 1)


def _die(rank, world, connected):
    while not connected.exists():  # the first rank would else fail while it connects
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_rank_ends_in_an_error_on_the_other(tmp_path):
    import torch.distributed as dist

    batch = batches.rollouts(seed=4, width=23)
    errors = []

    def attempt():
        (tmp_path / "connected").touch()
        try:
            evaluate(VARIANTS["gspo"], batch, 0, 2, (dist.group.WORLD,))
        except LostRankError as error:
            errors.append(error)

    with pytest.raises(RankError, match="rank 1 was ended"), lead_ranks(2, _die, tmp_path / "connected"):
        attempt()
    # Far sooner than a collective gives up.
    assert len(errors) == 1
