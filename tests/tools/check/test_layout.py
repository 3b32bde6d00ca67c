from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_geomask.tools.check.parallel_layout import Layout

sizes = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.parametrize(
    ("full", "ranks", "kept"),
    [
        (Layout(tp=4, cp=2, ep=4, pp=2, dp=4), 1, Layout()),
        # Tensor parallelism has the first word, data parallelism gets what is left.
        (Layout(tp=4, cp=2, ep=4, pp=2, dp=4), 2, Layout(tp=2, ep=2)),
        (Layout(tp=4, cp=2, ep=4, pp=2, dp=4), 8, Layout(tp=4, cp=2, ep=4)),
        (Layout(tp=1, cp=2, pp=2, dp=8), 4, Layout(cp=2, pp=2)),
        (Layout(tp=2, dp=8), 6, Layout(tp=2, dp=3)),
        # A size that does not fit gives way to its largest divisor that does.
        (Layout(tp=6), 4, Layout(tp=3)),
        # Experts are spread over the ranks of a stage: they need copies of its tensors.
        (Layout(tp=1, ep=4, dp=8), 4, Layout(ep=4, dp=4)),
        (Layout(tp=2, ep=8, pp=4, dp=8), 4, Layout(tp=2, ep=4, dp=2)),
    ],
)
def test_what_is_kept(full, ranks, kept):
    assert full.fit_to(ranks) == kept


def test_without_context_parallelism_others_get_its_ranks():
    assert Layout(tp=2, cp=2, pp=2).fit_to(4, cp=False) == Layout(tp=2, pp=2)


@given(st.builds(Layout, tp=sizes, cp=sizes, ep=sizes, pp=sizes, dp=sizes), st.integers(1, 64), st.booleans())
def test_it_fits_and_divides(full, ranks, cp):
    kept = full.fit_to(ranks, cp=cp)
    assert 1 <= kept.ranks <= ranks
    for name in ("tp", "cp", "ep", "pp"):
        assert getattr(full, name) % getattr(kept, name) == 0
    # Megatron's condition on experts: whole groups of them in a pipeline stage.
    assert kept.tp * kept.cp * kept.dp % kept.ep == 0


@given(st.builds(Layout, tp=sizes, cp=sizes, pp=sizes, dp=sizes))
def test_where_there_is_room_nothing_is_left_out(full):
    assert full.fit_to(math.prod((full.tp, full.cp, full.pp, full.dp))) == full
