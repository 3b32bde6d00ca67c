"""Every loss on packed tokens and on context-parallel shares of them, against the float64 oracle of the whole batch."""

import itertools
import os
import signal
import time

import batches
import numpy as np
import oracle
import pytest
import torch
from batches import MASKS, VARIANTS
from gloo import run

from nemo_geomask import build_loss
from nemo_geomask.errors import NonFiniteError, ShapeError
from nemo_geomask.segments import PackedSegments

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


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_oracle(name):
    batch = batches.rollouts(seed=3, width=23)
    check([evaluate(CONFIGS[name], batch)], CONFIGS[name], batch)


def _all_configs(rank, world):
    import torch.distributed as dist

    batch = batches.rollouts(seed=4, width=23)
    found = {name: evaluate(config, batch, rank, world, (dist.group.WORLD,)) for name, config in CONFIGS.items()}
    # A bad value on one rank makes all of them raise.
    bad = batch.with_data(generation_logprobs=batch.data["generation_logprobs"].clone())
    bad.data["generation_logprobs"][0, 3] = torch.nan
    try:
        evaluate({"nonfinite": "raise"}, bad, rank, world, (dist.group.WORLD,))
    except NonFiniteError as error:
        return found, str(error), evaluate({}, bad, rank, world, (dist.group.WORLD,))
    return found, "no error", None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
def test_context_parallel_equals_oracle(world):
    results = run(world, _all_configs, timeout=240)
    batch = batches.rollouts(seed=4, width=23)
    for name, config in CONFIGS.items():
        check([found[name] for found, *_ in results], config, batch)
    assert all("1 in data['generation_logprobs']" in message for _, message, _ in results)
    bad = batch.with_data(generation_logprobs=batch.data["generation_logprobs"].clone())
    bad.data["generation_logprobs"][0, 3] = torch.nan
    check([dropped for *_, dropped in results], {}, bad)


def test_misfits_are_named():
    batch = batches.rollouts()
    curr, data, offsets, _ = packed(batch)
    segments = PackedSegments(offsets)
    with pytest.raises(ShapeError, match=r"logprobs must be a floating-point tensor \[\d+\]"):
        build_loss({}).packed(curr[1:], data, segments, 1, 1)
    with pytest.raises(ShapeError, match=r"data\['advantages'\] must be a tensor"):
        build_loss({}).packed(curr, {**data, "advantages": data["advantages"][1:]}, segments, 1, 1)


def _lose_a_rank(rank, world):
    """Rank 1 is killed; the other reports how its call ended, and after how long."""
    import torch.distributed as dist

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    batch = batches.rollouts(seed=4, width=23)
    start = time.monotonic()
    try:
        evaluate(VARIANTS["gspo"], batch, rank, world, (dist.group.WORLD,))
    except Exception as error:
        return type(error).__name__, time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.timeout(120)
def test_killed_rank_ends_in_an_error_on_the_other():
    ((error, seconds),) = run(2, _lose_a_rank, timeout=60, patience=8, awaited=[0])
    assert error != "no error"
    assert seconds < 20
