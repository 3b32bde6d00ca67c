"""The sign-flip test and Holm's correction, against scipy and against examples by hand."""

from __future__ import annotations

import pytest

from nemo_geomask.errors import ArgumentError
from nemo_geomask.tools.probe.paired_tests import holm, sign_flip_p


def test_all_differences_of_one_sign_have_the_smallest_p():
    assert sign_flip_p([0.1, 0.2, 0.3]) == 2 / 8
    assert sign_flip_p([-0.1] * 10) == 2 / 1024
    assert sign_flip_p([0.0, 0.0]) == 1.0


@pytest.mark.parametrize("values", [[0.3, -0.1, 0.2, 0.05], [1e6, -2e6, 5e5], [0.1, 0.1, -0.1, 0.2, 0.7, -0.3]])
def test_the_sign_flip_test_is_scipys(values):
    scipy = pytest.importorskip("scipy.stats")
    result = scipy.permutation_test(
        (values,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=10_000, vectorized=True
    )
    assert sign_flip_p(values) == pytest.approx(result.pvalue, abs=1e-12)


def test_more_pairs_than_can_be_enumerated_are_refused():
    for values in ([], [0.1] * 17):
        with pytest.raises(ArgumentError, match="1 to 16 differences"):
            sign_flip_p(values)


def test_holms_correction_equals_that_by_hand():
    assert holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert holm([0.04, 0.001, 0.03, 0.5]) == pytest.approx([0.09, 0.004, 0.09, 0.5])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
    assert holm([]) == []
