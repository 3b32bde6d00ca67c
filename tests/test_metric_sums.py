"""Reduction of a microbatch's metrics to one vector, on one rank and over ranks, against plain sums."""

from __future__ import annotations

import functools

import pytest
import torch

from nemo_geomask.metrics import Label, Metric, Metrics, MetricSums, histogram
from nemo_geomask.segments import PaddedSegments

WEIGHT = torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]])
SAMPLE_MASK = torch.tensor([1.0, 0.5])
COUNTS = torch.tensor(2.0), torch.tensor(8.0)
TOKENS, SEQUENCES = torch.tensor([[1.0, 9.0, 3.0], [4.0, 6.0, 9.0]]), torch.tensor([3.0, 8.0])
SIZE = torch.tensor([[2.0**-20, 9.0, 9.0], [1.0, 1.01, 5.0]])


def number(value):
    return torch.tensor(value, dtype=torch.float32)


def reports():
    """Made anew for each test; a function made at import would escape mutation testing."""
    return (
        Metric(("geomask/a", "a"), "tokens", lambda: TOKENS),
        Metric(("geomask/b",), "token_sum", lambda: number(4.0), unit=-1.0),
        Metric(("c",), "local_sum", lambda: number(3.0), "sequences", 2.0),
        Metric(("d_min",), "min", lambda: number(-7.0)),
        Metric(("e_max",), "max", lambda: number(5.0)),
        Metric(("f_max",), "max", lambda: number(6.0)),
        Metric(("g",), "sequences", lambda: SEQUENCES),
        Metric(("h",), "shared_count", lambda: number(11.0)),
        histogram("geomask/size", SIZE),
    )


# Without the bins, in the order of the vector; divided by the counts only when they are read.
NUMBERS = [15.0, 4.0, 3.0, -7.0, 5.0, 6.0, 7.0, 11.0]
# Bin 0 ends at 2^-13, each other one is a factor of √2 wide, and the last begins at 2^3.
BINS = {0: 1.0, 27: 1.5, 33: 2.0}


class TwoRanks(PaddedSegments):
    """Segments that add to this rank's numbers those of another rank: ten times as large, with a loss of 100."""

    groups = ("a group",)

    def reduce_over_ranks(self, loss, statistics, *, num_sums, num_minima):
        assert statistics.dtype == torch.float64
        sums, minima, maxima = statistics.tensor_split((num_sums, num_sums + num_minima))
        reduced = [11 * sums, torch.minimum(minima, 10 * minima), torch.maximum(maxima, 10 * maxima)]
        return loss + 100, torch.cat(reduced)


def reduced(segments, *, is_full=True, always=False):
    sums = MetricSums(WEIGHT, SAMPLE_MASK, segments, is_full=is_full)
    sums.add(reports(), always=always)
    return sums.labels, *sums.reduce_over_ranks(torch.tensor(1.0), *COUNTS)


def test_each_reduction_is_a_plain_sum_in_the_vectors_order():
    labels, loss, values = reduced(PaddedSegments())
    assert loss == 1.0
    assert values.dtype == torch.float32
    assert values.tolist()[34:] == [*NUMBERS, 2.0, 8.0]
    assert {index: value for index, value in enumerate(values.tolist()[:34]) if value} == BINS
    assert labels[0] == Label(("geomask/size_bin_00",), "tokens", "tokens")
    assert labels[33] == Label(("geomask/size_bin_33",), "tokens", "tokens")
    assert labels[34:] == (
        Label(("geomask/a", "a"), "tokens", "tokens"),
        Label(("geomask/b",), "tokens", "tokens", -1.0),
        Label(("c",), "local_sum", "sequences", 2.0),
        Label(("d_min",), "min", "none"),
        Label(("e_max",), "max", "none"),
        Label(("f_max",), "max", "none"),
        Label(("g",), "sequences", "sequences"),
        Label(("h",), "shared_count", "none"),
    )
    read = Metrics(labels, values)
    assert read["a"] == read["geomask/a"] == 15.0 / 8.0
    assert (read["geomask/b"], read["c"], read["g"], read["h"]) == (-0.5, 6.0, 3.5, 11.0)
    assert read["geomask/size_bin_33"] == 0.25


def test_ranks_are_added_up_except_what_they_share():
    labels, loss, values = reduced(TwoRanks())
    assert loss == 101.0
    assert len(labels) + 2 == len(values)
    assert values.dtype == torch.float64
    assert {index: value for index, value in enumerate(values.tolist()[:34]) if value} == {
        index: 11 * value for index, value in BINS.items()
    }
    assert values.tolist()[34:] == [165.0, 44.0, 33.0, -70.0, 50.0, 60.0, 7.0, 11.0, 2.0, 8.0]


@pytest.mark.parametrize(("is_full", "always"), [(False, False), (False, True), (True, False)])
def test_metrics_of_this_package_alone_are_left_out_on_request(is_full, always):
    labels, _, values = reduced(PaddedSegments(), is_full=is_full, always=always)
    names = [name for label in labels for name in label.names]
    if is_full or always:
        assert len(names) == 34 + 9
    else:
        assert names == ["a", "c", "d_min", "e_max", "f_max", "g", "h"]
        assert values.tolist() == [15.0, *NUMBERS[2:], 2.0, 8.0]


def test_a_metric_that_is_left_out_is_not_computed():
    def fail():
        raise AssertionError

    sums = MetricSums(WEIGHT, SAMPLE_MASK, PaddedSegments(), is_full=False)
    sums.add([Metric(("geomask/costly",), "tokens", fail)])
    assert sums.labels == ()


def test_metrics_have_no_gradient():
    sums = MetricSums(WEIGHT, SAMPLE_MASK, PaddedSegments(), is_full=True)
    sums.add([Metric(("a",), "tokens", lambda: WEIGHT.clone().requires_grad_())])
    assert not sums.reduce_over_ranks(torch.tensor(1.0), *COUNTS)[1].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_code_makes_the_same_vector(monkeypatch, dtype, default_dtype):
    default_dtype(dtype)
    expected = reduced(PaddedSegments())[2]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = reduced(PaddedSegments())[2]
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU, where bins are summed in another way."""

    is_cuda = True


def bin_sums(bins, weight):
    sums = MetricSums(weight, SAMPLE_MASK, PaddedSegments(), is_full=True)
    sums.add([Metric(("geomask/size",), "histogram", lambda: bins)])
    return sums.reduce_over_ranks(weight.sum(), *COUNTS)[1].tolist()[:-2]


@pytest.mark.parametrize("shape", [(3, 700), (500,)])
def test_the_sums_for_a_gpu_are_those_for_a_cpu(shape):
    draw = torch.Generator().manual_seed(2)
    bins = torch.randint(0, 34, shape, generator=draw, dtype=torch.int32)
    weight = torch.randint(0, 5, shape, generator=draw).float()  # whole numbers, whose sums are exact
    expected = [float(weight[bins == index].sum()) for index in range(34)]
    assert bin_sums(bins, weight) == expected
    assert bin_sums(bins.as_subclass(OnGpu), weight) == expected
    with torch.device("meta"):
        assert bin_sums(bins.as_subclass(OnGpu), weight) == expected


@pytest.mark.parametrize("is_compiling", [False, True])
def test_the_default_device_plays_no_part(monkeypatch, is_compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    expected = reduced(PaddedSegments())[2]
    given = [report._replace(value=functools.partial(torch.clone, report.value())) for report in reports()]
    sums = MetricSums(WEIGHT, SAMPLE_MASK, PaddedSegments(), is_full=True)
    with torch.device("meta"):
        sums.add(given)
        found = sums.reduce_over_ranks(COUNTS[0], *COUNTS)[1]
    assert torch.equal(found, expected)


def test_numbers_and_labels_must_match():
    with pytest.raises(ValueError, match="zip"):
        dict(Metrics([Label(("a",), "tokens", "tokens")], torch.ones(4)))
