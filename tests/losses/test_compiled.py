"""One graph: traced whole for every objective and layout, collectives included, with the eager numbers."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
from typing import Any

import pytest
import torch
from torch._inductor import metrics as inductor
from torch._inductor.utils import run_and_get_code

from nemo_geomask import build_loss
from nemo_geomask.losses import compiled
from nemo_geomask.losses.compiled import CompiledPass, attach_gradient, loss_and_gradient
from nemo_geomask.losses.evaluate import evaluate, metric_labels
from nemo_geomask.losses.raw_batch import RawBatch, requested_tensors, take_packed, take_padded
from nemo_geomask.metrics import Metrics
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.segments import PaddedSegments
from tests.helpers import batches
from tests.helpers.batches import MASKS, VARIANTS, packed_rows

CORRECTED = {
    "name": "gspo",
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [MASKS["geometric"]],
    "reference_policy_kl_penalty": 0.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "corrected": CORRECTED,
    "all masks": {"masks": list(MASKS.values())},
    "kl by k4": {"reference_policy_kl_type": "k4", "use_on_policy_kl_approximation": True},
    "nll": {"positive_example_nll_weight": 0.1, "metrics": "nemo_rl"},
    "drop_token": {"name": "gspo", "nonfinite": "drop_token"},
    "anchored": {"name": "gspo", "ratio_anchor": "gen", "masks": [MASKS["opsm"]]},
    "audited": {"ratio_anchor": "gen", "audit_fraction": 0.5},
    "anchored, with prev": {"ratio_anchor": "gen", "masks": [MASKS["icepop"]]},
}


def call(function: Any, config: dict[str, Any], batch: batches.Batch, packed: bool, **place: Any) -> Any:
    """Loss, gradient and metrics by a pass over one batch."""
    loss_fn = build_loss(config)
    names = requested_tensors(loss_fn.config)
    counts = torch.tensor(batch.seqs), torch.tensor(batch.toks)
    if packed:
        curr, data, segments = packed_rows(batch, **place)
        curr = curr.clone().requires_grad_()
        raw = take_packed(curr, data, segments, names)
    else:
        curr, segments = batch.curr.clone().requires_grad_(), PaddedSegments()
        raw = take_padded(curr, batch.data, names)
    loss, values = function(raw, segments, segments.tensors, *counts)
    loss.backward()
    metrics = Metrics(metric_labels(loss_fn.config, loss_fn.variant, loss_fn.options, raw.tensors), values)
    return loss.item(), curr.grad, dict(metrics)


def objective(config: dict[str, Any]) -> Any:
    loss_fn = build_loss(config)
    return functools.partial(evaluate, loss_fn.config, loss_fn.variant, loss_fn.options)


def traced(function: Any) -> Any:
    # Without Inductor, whose C++ takes a minute; what is traced is the same.
    graph = torch.compile(
        functools.partial(loss_and_gradient, function), backend="aot_eager", fullgraph=True, dynamic=True
    )
    return functools.partial(attach_gradient, graph)


def same(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-8)
    assert one[2] == pytest.approx(other[2], rel=1e-4, abs=1e-6)


# What a layout changes are the reductions over segments, so a few losses with all of them are traced packed, too. All
# masks together take as long as five losses, and are traced packed alone.
PACKED = ("corrected", "all masks", "nll", "drop_token", "audited")


# In `make test`: a loss with few metrics over padded rows. test_inductor_sees_what_is_not_finite has a packed one.
REPRESENTATIVES = {("nll", False): pytest.mark.quick}
TRACED = [*((name, False) for name in CONFIGS if name != "all masks"), *((name, True) for name in PACKED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packed"),
    [pytest.param(*case, marks=REPRESENTATIVES.get(case, pytest.mark.long)) for case in TRACED],
)
def test_one_graph_whatever_the_batch(name, packed):
    torch._dynamo.reset()
    function = objective(CONFIGS[name])
    graph = traced(function)
    for seed, width in ((1, 14), (2, 23)):
        batch = batches.rollouts(seed, width=width)
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            same(call(graph, CONFIGS[name], batch, packed), call(function, CONFIGS[name], batch, packed))


@pytest.mark.slow
@pytest.mark.long
def test_both_log_probs_get_their_gradient():
    torch._dynamo.reset()
    function = objective({"ratio_clip_c": 3.0})
    batch = batches.rollouts(2)
    counts = torch.tensor(batch.seqs), torch.tensor(batch.toks)
    found = []
    for one in (traced(function), function):
        curr, unfiltered = (batch.curr - shift for shift in (0.0, 0.1))
        curr.requires_grad_()
        unfiltered.requires_grad_()
        data = {**batch.data, "curr_logprobs_unfiltered": unfiltered}
        raw = take_padded(curr, data, ("advantages", "gen", "prev", "ref", "unfiltered"))
        (3 * one(raw, PaddedSegments(), (), *counts)[0]).backward()
        found.append((curr.grad, unfiltered.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
    assert all(grad.abs().sum() > 0 for grad in found[0])


@pytest.mark.slow
@pytest.mark.long
def test_masked_positions_may_hold_anything():
    torch._dynamo.reset()
    batch = batches.rollouts(1)
    masked = batch.data["token_mask"] == 0
    graph = traced(objective(CORRECTED))
    clean = call(graph, CORRECTED, batch, packed=False)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = {key: torch.where(masked, value, batch.data[key]) for key in batches.TOKEN_KEYS if key != "token_mask"}
        curr = torch.where(masked[:, 1:], value, batch.curr)
        dirty_batch = batches.Batch(curr, {**batch.data, **spoilt}, batch.seqs, batch.toks)
        dirty = call(graph, CORRECTED, dirty_batch, packed=False)
        assert (dirty[0], dirty[2]) == (clean[0], clean[2])
        assert torch.equal(dirty[1], clean[1])


def _over_ranks(rank: int, world: int) -> list[Any]:
    import torch.distributed as dist

    place = {"cp_rank": rank, "cp_size": world, "groups": (dist.group.WORLD,)}
    batch = batches.rollouts(3, width=25)  # 24 tokens a row: two chunks a rank
    function = objective(CORRECTED)
    both = [call(one, CORRECTED, batch, packed=True, **place) for one in (function, traced(function))]
    return [(loss, grad.numpy(), metrics) for loss, grad, metrics in both]


@pytest.mark.slow
@pytest.mark.long
def test_collectives_are_in_the_graph():
    for eager, graph in run_ranks(2, _over_ranks, timeout=400):
        same((graph[0], torch.from_numpy(graph[1]), graph[2]), (eager[0], torch.from_numpy(eager[1]), eager[2]))


@pytest.mark.slow
@pytest.mark.long
def test_inductor_makes_few_kernels():
    torch._dynamo.reset()
    inductor.reset()
    batch = batches.rollouts(1)
    loss_fn = build_loss({**CORRECTED, "compile": True})
    curr, data, segments = packed_rows(batch)
    curr = curr.clone().requires_grad_()

    def step() -> Any:
        loss, metrics = loss_fn.packed(curr, data, segments, batch.seqs, batch.toks)
        loss.backward()
        return loss, metrics

    (loss, metrics), sources = run_and_get_code(step)
    expected = call(objective(CORRECTED), CORRECTED, batch, packed=True)
    same((loss.item(), curr.grad, dict(metrics)), expected)
    # Calls of generated code, forward and backward; the segments' reductions are torch's own.
    calls = [
        line for source in sources for line in source.splitlines() if line.strip().startswith(("cpp_fused", "triton_"))
    ]
    calls = [line for line in calls if "async_compile" not in line and "def " not in line]
    assert 0 < len(calls) <= 8, calls


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True], ids=["padded", "packed"])
def test_inductor_sees_what_is_not_finite(packed):
    # Of aot_eager's passes none knows that a product with 0 is 0.
    torch._dynamo.reset()
    batch = batches.rollouts(1)
    gen, prev = batch.data["generation_logprobs"].clone(), batch.data["prev_logprobs"].clone()
    gen[0, 6], gen[1, 4:] = torch.nan, torch.inf
    prev[2, 5] = -torch.inf
    spoilt = batch.with_data(generation_logprobs=gen, prev_logprobs=prev)
    loss_fn = build_loss({"compile": True})
    curr, data, segments = packed_rows(spoilt) if packed else (spoilt.curr, spoilt.data, None)
    curr = curr.clone().requires_grad_()
    counts = batch.seqs, batch.toks
    loss, metrics = loss_fn.packed(curr, data, segments, *counts) if packed else loss_fn(curr, data, *counts)
    loss.backward()
    expected = call(objective({}), {}, spoilt, packed)
    same((loss.item(), curr.grad, dict(metrics)), expected)
    assert metrics["geomask/nonfinite_gen"] > 1
    assert metrics["geomask/dropped_sequences"] > 1


@pytest.mark.slow
@pytest.mark.long
def test_half_precision_is_scaled_before_it_is_rounded():
    torch._dynamo.reset()
    batch = batches.rollouts(1)
    found = []
    for function in (objective({}), traced(objective({}))):
        curr = batch.curr.half().requires_grad_()
        raw = take_padded(curr, batch.data, ("advantages", "gen", "prev", "ref"))
        loss, *_ = function(raw, PaddedSegments(), (), torch.tensor(batch.seqs), torch.tensor(1e8))
        (loss * 65536).backward()
        found.append(curr.grad)
    assert found[0].dtype == torch.float16
    assert (found[0] != 0).sum() > 10
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=1e-7)


def _one_more(raw):
    return raw.curr + 1


class TestChoice:
    RAW = RawBatch(torch.ones(()), torch.ones(()), torch.ones(()), {})

    def test_auto_leaves_a_cpu_alone_and_says_so_once(self, caplog):
        caplog.set_level(logging.INFO, "nemo_geomask")
        function = CompiledPass(lambda raw: raw.curr + 1, "auto", "gspo")
        for _ in range(5):
            assert function(self.RAW).item() == 2
        assert [record.getMessage() for record in caplog.records] == [
            f"loss_fn.compile, loss 'gspo': {function.choice}"
        ]
        assert function.choice.startswith("not compiled, since on a cpu compiling takes longer than it saves")

    def test_auto_compiles_what_repeats(self, monkeypatch):
        made = []

        def compiler(function, **settings):
            made.append(settings)
            return function

        monkeypatch.setitem(compiled.EAGER_CALLS, "cpu", 2)
        monkeypatch.setattr(torch, "compile", compiler)
        function = CompiledPass(lambda raw: raw.curr + 1, "auto", "gspo")
        counts = []
        for _ in range(4):
            function(self.RAW)
            counts.append(len(made))
        assert counts == [0, 0, 2, 2]  # with gradient, and without
        assert [(options["fullgraph"], options["dynamic"]) for options in made] == [(True, True)] * 2
        assert function.choice == "compiled as one graph"

    def test_auto_goes_on_without_a_compiler(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "nemo_geomask")
        monkeypatch.setitem(compiled.EAGER_CALLS, "cpu", 0)

        def breaks(raw):
            torch._dynamo.graph_break()
            return raw.curr + 1

        function = CompiledPass(breaks, "auto", "gspo")
        for _ in range(3):
            assert function(self.RAW).item() == 2
        assert len(caplog.records) == 1
        assert "not compiled, Unsupported" in function.choice

    def test_a_later_failure_is_said_too_and_a_copy_tries_again(self, monkeypatch):
        monkeypatch.setitem(compiled.EAGER_CALLS, "cpu", 0)
        fails = []

        def compiler(function, **settings):
            def graph(raw):
                if fails:
                    raise torch._dynamo.exc.Unsupported("no more")
                return function(raw)

            return graph

        monkeypatch.setattr(torch, "compile", compiler)
        function = CompiledPass(_one_more, "auto", "gspo")
        assert function(self.RAW).item() == 2
        assert function.choice == "compiled as one graph"
        fails.append(True)
        assert function(self.RAW).item() == 2
        assert function.choice.startswith("not compiled, Unsupported: no more")
        fails.clear()
        copy = pickle.loads(pickle.dumps(function))
        assert copy(self.RAW).item() == 2
        assert copy.choice == "compiled as one graph"

    def test_one_kind_of_batch_too_many_runs_as_it_is_and_says_so(self, monkeypatch, caplog):
        def compiler(function, **settings):
            def graph(raw):
                raise torch._dynamo.exc.FailOnRecompileLimitHit("8")

            return graph

        monkeypatch.setattr(torch, "compile", compiler)
        function = CompiledPass(_one_more, True, "gspo")
        with caplog.at_level(logging.WARNING, logger="nemo_geomask"):
            assert [function(self.RAW).item() for _ in range(3)] == [2, 2, 2]
        (record,) = caplog.records
        assert (
            "loss 'gspo': a batch of this kind needs one more graph than the 8 that torch keeps" in record.getMessage()
        )

    @pytest.mark.skipif(
        "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
        reason="this torch can't isolate losses",
    )
    @pytest.mark.long
    def test_many_losses_in_a_process_are_all_compiled(self, monkeypatch, caplog):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        batch = batches.rollouts(1)
        with caplog.at_level(logging.WARNING, logger="nemo_geomask"):
            for count in range(torch._dynamo.config.recompile_limit + 2):
                batches.evaluate(build_loss({"compile": True, "ratio_clip_max": 0.2 + 0.01 * count}), batch)
        assert not [record for record in caplog.records if record.name == "nemo_geomask"]

    def test_true_does_not_hide_a_failure(self):
        def breaks(raw):
            torch._dynamo.graph_break()
            return raw.curr + 1

        with pytest.raises(torch._dynamo.exc.Unsupported):
            CompiledPass(breaks, True, "gspo")(self.RAW)

    def test_the_functions_own_errors_are_its_own(self, monkeypatch):
        monkeypatch.setitem(compiled.EAGER_CALLS, "cpu", 0)
        function = CompiledPass(lambda raw: raw.no_such_attribute, "auto", "gspo")
        with pytest.raises(AttributeError, match="no_such_attribute"):
            function(self.RAW)

    def test_false_never_compiles(self, monkeypatch):
        monkeypatch.setattr(torch, "compile", None)
        assert CompiledPass(lambda raw: raw.curr + 1, False, "gspo")(self.RAW).item() == 2

    def test_a_pickled_loss_chooses_anew(self):
        loss_fn = build_loss({"compile": "auto"})
        batch = batches.rollouts(1)
        loss_fn(batch.curr, batch.data, batch.seqs, batch.toks)
        copy = pickle.loads(pickle.dumps(loss_fn))
        one, other = batches.evaluate(loss_fn, batch), batches.evaluate(copy, batch)
        assert torch.equal(one.loss, other.loss)
