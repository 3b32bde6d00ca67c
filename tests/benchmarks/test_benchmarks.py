"""The recorded benchmarks: peers compute the same, counts are as documented, and tables are current."""

import importlib.util
import json
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_geomask.tools.bench import logprobs, timing
from nemo_geomask.tools.bench.logprob_paths import LogprobCase
from nemo_geomask.tools.bench.meters import one_thread
from nemo_geomask.tools.bench.peers import Absent, Setting, close_group
from nemo_geomask.tools.bench.results import measured
from tests.benchmarks import collectives, linear, logits, losses, tables, targets
from tests.benchmarks.logit_paths import OURS, PATHS, LogitCase

SETTING = Setting(torch.device("cpu"))
SMALL = LogitCase(40, 0, 3000)
TEMPERED = SMALL._replace(fraction=0.5, temperature=0.7)
EAGER = list(PATHS)[len(OURS) : len(OURS) + 6]
# Operations that touch only as many elements of their first operand as there are indices, and those that write it
# without reading it, or use only its shape.
SPARSE = ("gather", "index", "scatter", "scatter_add", "index_put", "index_select", "nll_loss_forward")
WRITES = ("copy_", "zero_", "fill_", "zeros_like", "new_zeros", "ones_like", "nll_loss_backward")


@pytest.fixture(autouse=True)
def fast_clock(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 1)
    yield
    close_group()


class OperandBytes(TorchDispatchMode):
    """Add up the bytes that operations read or write: the memory traffic if no operand stays in a cache."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            out = [value for key, value in (kwargs or {}).items() if key.startswith("out")]
            operands, outputs = tensors(args), tensors(out or result)
            if name.strip("_") in SPARSE:  # as many elements as the smallest operand has, read and written
                operands = outputs = [min([*operands, *outputs], key=stored_bytes)]
            elif name in WRITES:
                operands = operands[:1] + operands[2:] if name == "nll_loss_backward" else operands[1:]
            self.bytes += sum(map(stored_bytes, [*operands, *outputs]))
        return result


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def stored_bytes(tensor):
    """Bytes of memory that a tensor occupies; an expanded dimension occupies none."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod(sizes) * tensor.element_size()


def run(name, case, sample):
    try:
        output = PATHS[name].run(sample, case, SETTING)
    except Absent as reason:
        pytest.skip(str(reason))
    return output, output.gradient(sample)


@pytest.mark.parametrize("name", EAGER)
def test_a_peer_is_asked_for_the_same_and_moves_the_bytes_of_its_model(name):
    """What is of [T] adds less than a tenth of a byte a logit."""
    sample = logits.Inputs(SMALL, SETTING.device).take(0)
    run(name, SMALL, sample)  # imports it
    with one_thread(), OperandBytes() as tally:
        output, gradient = run(name, SMALL, sample)
    errors = logits.measure_errors(sample, SMALL, output, gradient)
    # F.cross_entropy returns its loss in the logits' own type.
    assert errors["logprob"] < (0.1 if name == "torch F.cross_entropy" else 1e-4)
    assert errors["gradient"] < 2**-7
    assert tally.bytes / (40 * 3000) == pytest.approx(PATHS[name].bytes_per_element(1.0), abs=0.1)


@pytest.mark.parametrize("name", OURS)
def test_our_paths_are_exact_with_entropy_at_a_temperature(name):
    case = TEMPERED._replace(entropy=True)
    inputs = logits.Inputs(case, SETTING.device)
    output, gradient = run(name, case, inputs.take(0, copy=PATHS[name].overwrites))
    errors = logits.measure_errors(inputs.take(0), case, output, gradient)
    assert max(errors["logprob"], errors["entropy"]) < 1e-5
    assert errors["gradient"] < 2**-8


def test_a_wrong_gradient_is_seen_in_rows_that_train_and_in_others():
    sample = logits.Inputs(TEMPERED, SETTING.device).take(0)
    output, gradient = run("nemo_geomask", TEMPERED, sample)
    assert logits.measure_errors(sample, TEMPERED, output, gradient * 1.1)["gradient"] == pytest.approx(0.1, rel=0.2)
    masked = int((~sample.is_trained[:-1]).nonzero()[0, 0])
    gradient[masked, 5] = 1.0
    assert logits.measure_errors(sample, TEMPERED, output, gradient)["gradient"] == pytest.approx(1.0)
    gradient[masked, 5] = math.nan
    assert math.isnan(logits.measure_errors(sample, TEMPERED, output, gradient)["gradient"])


def test_inputs_are_fresh_in_each_round_and_kept_from_a_path_that_overwrites_them():
    inputs = logits.Inputs(TEMPERED, SETTING.device)
    sample, first = inputs.take(0, copy=True), inputs.take(0).logits.detach().clone()
    with torch.no_grad():
        sample.logits.zero_()
    assert torch.equal(inputs.take(0).logits, first)
    assert int(sample.is_trained.sum()) == 20
    assert torch.equal(sample.is_trained, sample.targets != -100)
    assert not sample.g[~sample.is_trained].any()
    assert not torch.equal(inputs.take(1).logits, first)
    inputs.refresh()
    assert not torch.equal(inputs.take(0).logits, first)


@pytest.mark.slow
def test_paths_from_logits_and_without_are_measured():
    result = logits.measure(SMALL, SETTING, {name: PATHS[name] for name in (*OURS, "flash-attn CE")}, 1, 0)
    json.dumps(result)
    *ours, absent = result["paths"]
    assert (absent["status"], absent["reason"]) == ("absent", "needs a GPU")
    for row in ours:
        assert row["of_copy"] == pytest.approx(1.5 * result["copy_ms"]["median"] / row["ms"]["median"])
        assert row["launches"] > 5
    case = LogprobCase(64, 16, 500, tp=2, fraction=0.2, dtype=torch.float32)
    rows = measured(logprobs.measure(case, SETTING, linear.PATHS, 1, 0)["paths"])
    assert len(rows) >= 4
    assert all(max(row["errors"].values()) < 1e-5 for row in rows)


@pytest.mark.slow
def test_losses_from_logits_and_wrappers_of_packed_rows_are_measured():
    for row in losses.measure_from_logits(SETTING, SMALL, 1, 0):
        assert row["of_logprobs"] == pytest.approx(row["ms"]["median"] / row["logprobs"]["ms"]["median"])
    ways = losses.measure_packing(SETTING, False, 1, 0)["ways"]
    expected = "measured" if importlib.util.find_spec("nemo_rl") else "absent"
    assert {row["status"] for row in ways} == {expected}, ways


@pytest.mark.slow
def test_collectives_of_paths_with_and_without_logits():
    names = linear.TENSOR_PARALLEL[:2]
    counted = collectives.count_path_collectives("linear", names)
    tokens, (without, with_logits) = counted["tokens"], (counted["paths"][name] for name in names)
    # Nine integers by which the ranks compare what they were called with, and four numbers a token.
    assert with_logits["each"] == [["all-gather", 72], ["all-gather", 16 * tokens]]
    assert with_logits["sent_bytes"] == with_logits["payload_bytes"]  # to the one other rank
    # The hidden states' gradient in bfloat16, of which a rank sends 2·(2 - 1)/2 in a ring of two.
    gradient = 2 * counted["hidden"] * tokens
    assert without["each"] == [*with_logits["each"], ["all-reduce", gradient]]
    assert without["sent_bytes"] == with_logits["sent_bytes"] + gradient


@pytest.mark.parametrize(("tokens", "theirs", "passed"), [(256, 81.0, [True]), (256, 79.0, [False]), (255, 79.0, [])])
def test_a_target_is_for_large_cases_of_its_device(tokens, theirs, passed):
    times = {"nemo_geomask": 10.0, "NeMo-RL ChunkedDistributedLogprob(256)": theirs}
    rows = [{"path": name, "status": "measured", "ms": {"median": ms}} for name, ms in times.items()]
    rows.append({"path": "torch F.cross_entropy", "status": "absent", "reason": "gone"})
    case = {"case": LogitCase(tokens, 0, 151_936).describe(), "title": "t", "paths": rows}
    for device, verdicts in (("cpu", passed), ("cuda", [])):
        found = targets.check_logits({"machine": {"device": device}, "cases": [case]})
        assert [verdict["passed"] for verdict in found] == verdicts


def test_recorded_losses_pass_the_targets_of_a_cpu():
    result = json.loads((tables.FOLDER / "loss-amd-epyc-2026-11-23.json").read_text(encoding="utf-8"))
    assert {verdict["passed"] for verdict in targets.check_loss(result)} == {True}


def test_tables_show_what_was_measured():
    for name, text in tables.pages().items():
        assert (tables.FOLDER / name).read_text(encoding="utf-8") == text, "run: make docs"
