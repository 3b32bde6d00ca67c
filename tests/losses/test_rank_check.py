"""Ranks that share sequences and disagree, or lose one of them, in real processes over gloo."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from nemo_geomask import PackedSegments, build_loss
from nemo_geomask.errors import GeomaskError, LostRankError, RanksDisagreeError
from nemo_geomask.parallel.local_processes import RankError, run_ranks
from nemo_geomask.segments.rank_comparison import as_lost_rank_error
from tests.helpers import batches

pytestmark = pytest.mark.slow
TIMEOUT = 240.0  # of all ranks together; a collective gives up after half of it


def call(config, batch, rank, world, offsets=None, data=None):
    """One rank's call and backward pass; the error instead, if there is one."""
    loss_fn = build_loss(config) if isinstance(config, dict) else config
    curr, shard, segments = batches.packed_rows(batch, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    if offsets is not None:
        segments = PackedSegments(offsets, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    try:
        loss, metrics = loss_fn.packed(curr.requires_grad_(), {**shard, **(data or {})}, segments, 8, 70)
        loss.backward()
    except GeomaskError as error:
        return error
    return loss.item(), len(metrics)


WIDTH = 17  # 16 tokens a row divide into 2·CP chunks for CP 2 and 4
ROWS = (0.3, -0.3, 0.1)
CLIPS = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
# What the last rank does differently, and what all of them are told.
DISAGREEMENTS = {
    "clip bounds": ({"ratio_clip_max": 0.2}, {}, r"loss_fn\.ratio_clip_max is \[0\.28, .*0\.2\]"),
    "objective": ({"name": "gspo"}, {}, r"loss_fn\.name is \['clipped_pg', .*'gspo'\]"),
    "metrics": ({"metrics": "nemo_rl"}, {}, r"loss_fn\.metrics is \['full', .*'nemo_rl'\]"),
    "masks": ({"masks": [batches.MASKS["geometric"]]}, {}, r"loss_fn\.masks is \[\[\], .*'geometric'"),
    "rows": ({}, {"rows": 2}, r"the number of sequences is \[5, .*4\], the number of tokens is \[80, .*64\]"),
    "lengths": ({}, {"offsets": [0, 8, 32, 48, 64, 80]}, r"the lengths of the sequences on ranks \[\d\] are not"),
    "a tensor": (
        {},
        {"data": {"reference_policy_logprobs": None}},
        r"data\['reference_policy_logprobs'\] is \['present', .*'missing'\]",
    ),
}


def _disagree(rank, world):
    """What this rank is told of each disagreement, at the first call and after calls that agreed."""
    told = {}
    for name, (settings, layout, _) in DISAGREEMENTS.items():
        is_other = rank == world - 1
        offsets = ROWS[: layout["rows"]] if is_other and "rows" in layout else ROWS
        batch = batches.rollouts(width=WIDTH, offsets=offsets)
        change = {key: value for key, value in layout.items() if key != "rows" and is_other}
        loss_fn = build_loss({**CLIPS, "reference_policy_kl_penalty": 0.0, **(settings if is_other else {})})
        told[name, "first"] = call(loss_fn, batch, rank, world, **change)
        if not settings:
            agreed = build_loss({**CLIPS, "reference_policy_kl_penalty": 0.0})
            whole = batches.rollouts(width=WIDTH, offsets=ROWS)
            assert not isinstance(call(agreed, whole, rank, world), GeomaskError)
            told[name, "later"] = call(agreed, batch, rank, world, **change)
            # The ranks are in step afterwards.
            assert not isinstance(call(agreed, whole, rank, world), GeomaskError)
    return told


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_disagree_are_all_told(world):
    for told in run_ranks(world, _disagree, timeout=TIMEOUT):
        for (name, when), error in told.items():
            assert isinstance(error, RanksDisagreeError), (name, when, error)
            assert re.search(DISAGREEMENTS[name][2], str(error)), (name, when, str(error))
        assert len(told) == len(DISAGREEMENTS) + 3


def _default_device(rank, world):
    """Loss and number of metrics without and with another default device, at the first and at a later call."""
    batch = batches.rollouts(width=WIDTH, offsets=ROWS)
    loss_fn, other = (build_loss({"name": "gspo"}) for _ in range(2))
    expected = [call(loss_fn, batch, rank, world) for _ in range(2)]
    curr, shard, segments = batches.packed_rows(batch, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    with torch.device("meta"):
        found = [other.packed(curr, shard, segments, 8, 70) for _ in range(2)]
    return expected, [(loss.item(), len(metrics)) for loss, metrics in found]


def test_the_default_device_plays_no_part():
    for expected, found in run_ranks(2, _default_device, timeout=TIMEOUT):
        assert found == expected


def _off(rank, world):
    """The loss of each rank where the last one has other clip bounds and nothing is compared."""
    batch = batches.rollouts(width=WIDTH, offsets=ROWS)
    settings = {**CLIPS, "compare_ranks": False, **({"ratio_clip_max": 0.2} if rank else {})}
    return call(settings, batch, rank, world)


def test_nothing_is_compared_if_the_option_is_off():
    first, last = run_ranks(2, _off, timeout=TIMEOUT)
    assert first == last


def _lose(rank, world, folder, moment, settings):
    """Rank 1 ends or sleeps at a moment of the second call; rank 0 writes down how its own call ends."""
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to rank 0 as soon as rank 1 has ended
    batch = batches.rollouts(width=WIDTH, offsets=ROWS)
    loss_fn = build_loss(settings)
    assert not isinstance(call(loss_fn, batch, rank, world), GeomaskError)
    curr, data, segments = batches.packed_rows(batch, cp_rank=rank, cp_size=world, groups=(dist.group.WORLD,))
    if rank and moment != "backward":
        time.sleep(3600) if moment == "hang" else os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss, _ = loss_fn.packed(curr.requires_grad_(), data, segments, 8, 70)
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
    except Exception as error:
        path = folder / "partial"
        path.write_text(f"{type(error).__name__}\n{error}", encoding="utf-8")
        path.rename(folder / "error")
        raise


COMPILED = {"compile": True, "compare_ranks": False}


@pytest.mark.parametrize(
    ("moment", "settings", "timeout"),
    [
        ("forward", {}, TIMEOUT),
        pytest.param("forward", COMPILED, 2 * TIMEOUT, marks=pytest.mark.long),
        pytest.param("backward", {"name": "gspo"}, TIMEOUT, marks=pytest.mark.long),
        pytest.param("hang", {}, 24.0, marks=pytest.mark.long),
    ],
    ids=["forward", "compiled", "backward", "hang"],
)
def test_a_lost_rank_ends_the_others_in_a_sentence(tmp_path, moment, settings, timeout):
    # A rank that hangs is ended after the other one has failed, so the other's error comes first.
    with pytest.raises(LostRankError if moment == "hang" else RankError):
        run_ranks(2, _lose, tmp_path, moment, settings, timeout=timeout)
    kind, *message = (tmp_path / "error").read_text(encoding="utf-8").splitlines()
    assert kind == LostRankError.__name__
    assert "gloo" in message[0]
    assert message[-1].startswith("A collective failed. Most often another rank of the group has ended")
    # The connection breaks at once; only a rank that hangs makes the others wait for the group's timeout.
    assert ("timed out" in message[0].lower()) == (moment == "hang")


def test_errors_of_our_own_code_are_not_blamed_on_ranks():
    with pytest.raises(RuntimeError, match="shape") as error, as_lost_rank_error():
        raise RuntimeError("the shape of a tensor is wrong")
    assert not isinstance(error.value, LostRankError)
    with pytest.raises(LostRankError, match="by peer"), as_lost_rank_error():
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
