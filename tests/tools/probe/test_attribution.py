"""Attribution of planted causes, on made-up log-probs: which are named, in how many starts, and what is kept."""

import dataclasses
import json

import numpy
import pytest

from nemo_geomask.errors import DataError, EngineError
from nemo_geomask.tools.probe.arm_runner import ArmRunner
from nemo_geomask.tools.probe.attribution import attribute_mismatch
from nemo_geomask.tools.probe.start_store import StartStore
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch
from tests.tools.probe.synthetic_stack import SyntheticStack


def switch(name, side="engine", group="one", cost=None, field=""):
    cost = cost or side
    return MismatchSwitch(name, f"policy.{name}", "off", name, side, cost, group, "", "", field=field)


SWITCHES = [
    switch("cache", group="precision"),
    switch("head", group="precision"),
    switch("graphs", group="kernels"),
    switch("scheduling", group="kernels"),
    switch("fusion", side="trainer", group="fusions"),
    switch("router", side="trainer", group="precision"),
]
SIDE = {each.id: each.side for each in SWITCHES}


def stack(*causes, **others):
    planted = {f"policy.{name}": (SIDE[name], size) for name, size in causes}
    return SyntheticStack(planted, dict.fromkeys(planted, "off"), **others)


def ledger_of(folder, made, switches=SWITCHES, budget=1e9, replaces_engines=False):
    folder.mkdir(exist_ok=True)
    store = StartStore(folder, made, prompts=24, generations=2)
    runner = ArmRunner(store, switches, {}, settings={}, budget=budget, replaces_engines=replaces_engines)
    return attribute_mismatch(runner, switches, {each.key: "on" for each in switches})


def test_what_has_to_change_with_a_value_changes_with_it(tmp_path):
    also = {"policy.chunks": None, "policy.stages": 2, "policy.depth": 1}
    companion = dataclasses.replace(SWITCHES[0], also=also)
    made = stack(("cache", 0.2))
    store = StartStore(tmp_path, made, prompts=24, generations=2)
    values = {"policy.cache": "on", "policy.chunks": 512, "policy.stages": 2}  # the recipe has no depth
    runner = ArmRunner(store, [companion], values, settings={}, budget=1e9)
    ledger = attribute_mismatch(runner, [companion], values)
    assert {"policy.cache": "off", "policy.chunks": None} in made.starts
    assert all(settings in ({}, {"policy.cache": "off", "policy.chunks": None}) for settings in made.starts)
    assert [(row.verdict, row.also) for row in ledger.rows] == [("explains", {"policy.chunks": None})]


def test_what_recipes_interpolate_from_a_key_keeps_its_value(tmp_path):
    keeping = dataclasses.replace(SWITCHES[4], keeps=("policy.router", "policy.depth"))
    made = stack(("fusion", 0.2))
    store = StartStore(tmp_path, made, prompts=24, generations=2)
    values = {"policy.fusion": "on", "policy.router": "bf16"}
    switches = [SWITCHES[5], keeping]
    runner = ArmRunner(store, switches, values, settings={}, budget=1e9)
    ledger = attribute_mismatch(runner, switches, values)
    alone = {"policy.fusion": "off", "policy.router": "bf16"}
    assert alone in made.starts
    # A switch of that key decides over its value.
    both = {"policy.fusion": "off", "policy.router": "off"}
    assert all(settings in ({}, alone, both, {"policy.router": "off"}) for settings in made.starts)
    assert both in made.starts
    assert ledger.rows[0].also == {"policy.router": "bf16"}


def test_what_is_taken_out_comes_before_what_is_set_below_it(tmp_path):
    overrides = dataclasses.replace(SWITCHES[1], id="rope", key="policy.overrides", value={})
    head = dataclasses.replace(SWITCHES[0], id="head", key="policy.overrides.dtype")
    made = stack()
    store = StartStore(tmp_path, made, prompts=24, generations=2)
    runner = ArmRunner(store, [head, overrides], {}, settings={}, budget=1e9)
    runner.run_repeated()
    every = next(settings for settings in made.starts if len(settings) == 2)
    assert list(every.items()) == [("policy.overrides", {}), ("policy.overrides.dtype", "off")]


def test_a_row_says_with_which_value_the_probe_ran(tmp_path):
    made = stack(("cache", 0.2))
    store = StartStore(tmp_path, made, prompts=24, generations=2)
    values, replaced = {"policy.cache": 2}, {"policy.cache": 8}
    runner = ArmRunner(store, SWITCHES[:1], values, settings={}, budget=1e9)
    (row,) = attribute_mismatch(runner, SWITCHES[:1], values, (), replaced).rows
    assert (row.was, row.ran, row.verdict) == (8, 2, "explains")


@pytest.mark.parametrize("temperature", [0.5, 0.8])
@pytest.mark.parametrize("has_temperature", [(), ("engine",), ("trainer",), ("engine", "trainer")], ids=str)
def test_a_temperature_is_blamed_for_what_it_adds_alone(tmp_path, temperature, has_temperature):
    """Differences of logits grow with 1/T, which is no reason to set T to 1."""
    key = "policy.generation.temperature"
    switch = MismatchSwitch("temperature", key, 1.0, "", "both", "request", "one", "", "", field="temperature")

    class Stack(SyntheticStack):
        """Log-probs that a temperature divides, and noise of the engine's logits."""

        def _scores(self, side, frozen, settings, options):
            scale = 1.0 if "temperature" in options or side not in has_temperature else temperature
            made = super()._scores("trainer", frozen, settings, {})
            for index, values in enumerate(made["logprobs"]):
                draws = numpy.random.default_rng(index).standard_normal((2, len(values)))
                of_temperature = 0.3 * (1 / scale - 1) * draws[0]
                noise = 0.1 * draws[1] / scale if side == "engine" else 0.0
                made["logprobs"][index] = (numpy.array(values) + of_temperature + noise).tolist()
            return made

    store = StartStore(tmp_path, Stack(), prompts=24, generations=2)
    values = {key: temperature}
    runner = ArmRunner(store, [switch], values, settings={}, budget=1e9)
    (row,) = attribute_mismatch(runner, [switch], values).rows
    if len(has_temperature) == 1:
        assert row.verdict in ("explains", "contributes")
        assert row.is_confirmed
    else:
        assert row.verdict in ("no effect", "undecided")
        assert abs(row.share) < 0.05


def test_noise_of_the_size_of_the_mismatch_is_no_agreement(tmp_path):
    noisy = ledger_of(tmp_path / "noisy", stack(restart_noise=0.1))
    assert noisy.has_mismatch
    assert noisy.is_within_noise
    # Each side has noise of 0.1 in each pass: k3 is about half the variance of the difference.
    assert noisy.noise == pytest.approx(0.01, rel=0.3)
    assert noisy.baseline.k3 == pytest.approx(0.01, rel=0.3)
    caused = ledger_of(tmp_path / "caused", stack(("cache", 0.3), restart_noise=0.05))
    assert not caused.is_within_noise
    assert [row.switch.id for row in caused.culprits] == ["cache"]
    assert ledger_of(tmp_path / "exact", stack(("cache", 0.2))).noise == 0.0


def verdicts(ledger):
    return {row.switch.id: row.verdict for row in ledger.rows}


@pytest.mark.parametrize("name", ["cache", "graphs", "fusion"])
def test_a_single_cause_is_named_first_and_explains_it(tmp_path, name):
    made = stack((name, 0.2), base_noise=0.01)
    ledger = ledger_of(tmp_path, made)
    first = ledger.rows[0]
    assert (first.switch.id, first.verdict, first.is_confirmed) == (name, "explains", True)
    assert first.share > 0.95
    assert {row.verdict for row in ledger.rows[1:]} == {"no effect"}
    assert ledger.has_mismatch


def test_two_causes_on_both_sides_are_both_found_and_add_up(tmp_path):
    ledger = ledger_of(tmp_path, stack(("cache", 0.2), ("fusion", 0.12)))
    assert [row.switch.id for row in ledger.culprits] == ["cache", "fusion"]
    cache, fusion = ledger.culprits
    assert (cache.verdict, fusion.verdict) == ("explains", "contributes")
    # Alone it brings 0.12² of 0.2² + 0.12².
    assert fusion.share == pytest.approx(0.12**2 / (0.2**2 + 0.12**2), rel=0.25)
    assert cache.last_share == pytest.approx(cache.share, rel=0.25)


def test_the_gap_is_shown_by_who_sampled_the_tokens(tmp_path):
    triangle = ledger_of(tmp_path, stack(("cache", 0.2))).triangle
    by_engine, by_trainer = (triangle[f"decode and trainer, sampled by the {side}"] for side in ("engine", "trainer"))
    both = triangle["decode and trainer"]
    assert by_engine.tokens + by_trainer.tokens == both.tokens
    total = by_engine.tokens * by_engine.k3 + by_trainer.tokens * by_trainer.k3
    assert total == pytest.approx(both.tokens * both.k3)


def test_two_causes_in_one_group_are_told_apart(tmp_path):
    ledger = ledger_of(tmp_path, stack(("cache", 0.2), ("head", 0.2)))
    assert {row.switch.id for row in ledger.culprits} == {"cache", "head"}
    assert all(0.3 < row.share < 0.7 for row in ledger.culprits)


def test_nothing_is_found_where_nothing_is_planted(tmp_path):
    ledger = ledger_of(tmp_path, stack(base_noise=0.05))
    assert set(verdicts(ledger).values()) == {"no effect"}
    assert ledger.has_mismatch
    # The sides are not split: the baseline, and the conservative values of each side.
    assert ledger.starts == 3


def test_no_mismatch_is_none(tmp_path):
    ledger = ledger_of(tmp_path, stack(base_noise=1e-5, restart_noise=1e-5))
    assert not ledger.has_mismatch
    assert not ledger.culprits


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_noise_of_every_start_is_not_taken_for_an_effect(tmp_path, seed):
    """Ten clean probes: what differs from start to start is the floor, and no switch explains it."""
    made = stack(base_noise=0.05, restart_noise=0.05)
    made.starts = [{}] * 100 * seed  # another noise
    assert not ledger_of(tmp_path, made).culprits


def test_a_key_that_nobody_reads_is_not_effective(tmp_path):
    ledger = ledger_of(tmp_path, stack(("graphs", 0.2), ("scheduling", 0.2), ignored=frozenset({"policy.scheduling"})))
    assert verdicts(ledger)["scheduling"] == "not effective"
    assert verdicts(ledger)["graphs"] in ("explains", "contributes")


def test_a_key_that_nobody_reads_has_not_no_effect_where_its_group_changes_nothing(tmp_path):
    ledger = ledger_of(tmp_path, stack(("graphs", 0.2), ignored=frozenset({"policy.cache"})))
    assert verdicts(ledger)["head"] == "no effect"
    assert verdicts(ledger)["cache"] == "not tried"


def test_a_key_with_which_nothing_starts_is_not_testable_and_others_are_still_found(tmp_path):
    ledger = ledger_of(tmp_path, stack(("cache", 0.2), failing=frozenset({"policy.graphs"})))
    row = next(row for row in ledger.rows if row.switch.id == "graphs")
    assert row.verdict == "not testable here"
    assert "ValueError: policy.graphs is wrong" in row.note
    assert ledger.rows[0].switch.id == "cache"


def test_a_switch_that_raises_the_mismatch_is_worse(tmp_path):
    made = stack(base_noise=0.05)
    made.causes["policy.cache"] = ("engine", 0.2)
    made.conservative["policy.cache"] = None  # the noise is there unless the key is absent
    assert verdicts(ledger_of(tmp_path, made)) | {"cache": "worse"} == verdicts(ledger_of(tmp_path, made))


def test_a_request_costs_no_start(tmp_path):
    requests = [switch("temperature", cost="request", field="temperature")]
    made = SyntheticStack(requests={"temperature": ("engine", 0.3)}, base_noise=0.01)
    ledger = ledger_of(tmp_path, made, requests)
    assert (ledger.rows[0].verdict, ledger.rows[0].is_confirmed) == ("explains", True)
    assert len(made.starts) == ledger.starts == 2  # the baseline and its repetition


def test_no_start_is_run_twice_and_a_stored_one_is_read(tmp_path):
    made = stack(("cache", 0.2), ("fusion", 0.12))
    first = ledger_of(tmp_path, made)
    assert len(made.starts) == len({json.dumps(start, sort_keys=True) for start in made.starts}) == first.starts
    again = stack(("cache", 0.2), ("fusion", 0.12))
    assert ledger_of(tmp_path, again) == first
    assert again.starts == []


def test_a_killed_probe_goes_on_where_it_was(tmp_path):
    class Killed(SyntheticStack):
        def __call__(self, job, **arguments):
            if len(self.starts) == 3:
                raise KeyboardInterrupt
            return super().__call__(job, **arguments)

    planted = stack(("cache", 0.2))
    killed = Killed(planted.causes, planted.conservative)
    with pytest.raises(KeyboardInterrupt):
        ledger_of(tmp_path, killed)
    ledger = ledger_of(tmp_path, planted)
    assert ledger.rows[0].switch.id == "cache"
    assert len(planted.starts) == ledger.starts - 3


def test_a_start_that_reached_the_time_limit_is_run_again_by_the_next_probe(tmp_path):
    # The third start, with all of the engine's conservative values.
    first = ledger_of(tmp_path, stack(("cache", 0.2), timeout_of_start=3))
    again = stack(("cache", 0.2))
    ledger = ledger_of(tmp_path, again)
    assert again.starts == [{f"policy.{name}": "off" for name in ("cache", "head", "graphs", "scheduling")}]
    assert first.rows[0].switch.id == ledger.rows[0].switch.id == "cache"


def test_a_budget_that_ends_leaves_rows_untried_and_says_so(tmp_path):
    ledger = ledger_of(tmp_path, stack(("cache", 0.2)), budget=-1.0)
    assert not ledger.is_complete
    assert set(verdicts(ledger).values()) == {"not tried"}


ENGINE = [
    MismatchSwitch(name, f"policy.generation.{name}", "off", name, "engine", "engine", group, "", "")
    for name, group in (("cache", "precision"), ("head", "precision"), ("graphs", "kernels"))
]
FUSION = [switch("fusion", side="trainer", group="fusions")]


class TestReplacedEngines:
    """Engines that are replaced in their process: their arms share a start of the workers."""

    def stack(self, *causes, **others):
        side = {each.key: each.side for each in (*ENGINE, *FUSION)}
        return SyntheticStack(
            {key: (side[key], size) for key, size in causes}, {key: "off" for key, _ in causes}, **others
        )

    def ledger(self, folder, made):
        return ledger_of(folder, made, [*ENGINE, *FUSION], replaces_engines=True)

    def test_causes_on_both_sides_are_found_as_with_fresh_workers(self, tmp_path):
        causes = (("policy.generation.cache", 0.2), ("policy.fusion", 0.12))
        made = self.stack(*causes, base_noise=0.01)
        ledger = self.ledger(tmp_path / "replaced", made)
        assert [row.switch.id for row in ledger.culprits] == ["cache", "fusion"]
        other = ledger_of(tmp_path / "fresh", self.stack(*causes, base_noise=0.01), [*ENGINE, *FUSION])
        assert [row.share for row in ledger.culprits] == pytest.approx([row.share for row in other.culprits], rel=1e-6)
        assert verdicts(ledger) == verdicts(other)

    def test_only_arms_of_the_trainer_and_the_repetition_start_workers(self, tmp_path):
        made = self.stack(("policy.generation.cache", 0.2), base_noise=0.01)
        ledger = self.ledger(tmp_path, made)
        # The baseline, all of the trainer (a single switch), and the baseline again.
        assert made.fresh == 3
        assert len(made.starts) > 6
        assert "engine, replaced in its process" in ledger.repetitions
        assert "trainer, restarted" in ledger.repetitions

    def test_a_key_that_nobody_reads_is_tried_alone_and_is_not_effective(self, tmp_path):
        made = self.stack(("policy.generation.cache", 0.2), ignored=frozenset({"policy.generation.graphs"}))
        assert verdicts(self.ledger(tmp_path, made))["graphs"] == "not effective"


@pytest.mark.parametrize(
    ("replaces_engines", "fails_together"), [(True, False), (False, False), (True, True), (False, True)]
)
def test_weights_that_a_refit_rounds_need_both_sides_together(tmp_path, replaces_engines, fails_together):
    """Both in bfloat16: alone, the trainer's dtype helps little, because the engine still rounds the weights.

    That other weights are sent is also seen where the trainer's values can't be started all at once.
    """
    precision = ("policy.generation.precision", "policy.precision")
    switches = [
        MismatchSwitch("engine_dtype", precision[0], "off", "engine", "engine", "engine", "one", "", ""),
        MismatchSwitch("trainer_dtype", precision[1], "off", "trainer", "trainer", "trainer", "one", "", ""),
    ]
    made = SyntheticStack(
        {precision[0]: ("engine", 0.2), precision[1]: ("trainer", 0.03)},
        dict.fromkeys(precision, "off"),
        rounding=(*precision, 0.15),
    )
    if fails_together:
        switches.append(switch("broken", side="trainer", group="two"))
        made.failing = frozenset({"policy.broken"})
    ledger = ledger_of(tmp_path, made, switches, replaces_engines=replaces_engines)
    rows = {row.switch.id: row for row in ledger.rows}
    assert "engine, restarted" in ledger.repetitions
    if fails_together:
        # What the trainer's dtype does alone is measured with the engine that got its weights.
        assert rows["trainer_dtype"].share < 0.1
        return
    assert ledger.all_conservative.k3 < 1e-9
    assert (rows["engine_dtype"].verdict, rows["engine_dtype"].is_confirmed) == ("explains", True)
    trainer = rows["trainer_dtype"]
    assert (trainer.verdict, trainer.is_confirmed) == ("contributes", True)
    # What comes back is the rounding and the trainer's own noise.
    assert trainer.last_share == pytest.approx((0.15**2 + 0.03**2) / (0.2**2 + 0.15**2 + 0.03**2), rel=0.25)
    assert trainer.share < 0.1


def test_a_start_of_both_sides_that_sends_other_weights_is_not_taken_for_either_side_alone(tmp_path):
    """The trainer's values can't be started all at once, so that its dtype first runs beside an arm of the engine."""
    precision = ("policy.generation.precision", "policy.precision")
    switches = [
        MismatchSwitch("engine_dtype", precision[0], "off", "engine", "engine", "engine", "one", "", ""),
        switch("cache", group="two"),
        MismatchSwitch("trainer_dtype", precision[1], "off", "trainer", "trainer", "trainer", "one", "", ""),
        switch("broken", side="trainer", group="two"),
    ]
    made = SyntheticStack(
        {precision[0]: ("engine", 0.2), precision[1]: ("trainer", 0.03)},
        dict.fromkeys(precision, "off"),
        rounding=(*precision, 0.15),
        failing=frozenset({"policy.broken"}),
    )
    rows = {row.switch.id: row for row in ledger_of(tmp_path, made, switches).rows}
    assert any(set(precision) <= start.keys() for start in made.starts)
    assert rows["trainer_dtype"].share < 0.1
    assert rows["engine_dtype"].verdict == "explains"
    # 0.2² of 0.2² + 0.15² + 0.03²: alone, the engine still has rounded weights.
    assert rows["engine_dtype"].share == pytest.approx(0.2**2 / (0.2**2 + 0.15**2 + 0.03**2), rel=0.25)


def test_a_value_that_is_the_baselines_where_it_is_resolved_is_not_effective(tmp_path):
    """The engine reports the key, with the same value, and something else differs."""

    class Resolving(SyntheticStack):
        def resolved(self, side, settings):
            others = {"engine.scheduler.graphs": "False", "engine.other": str(settings.get("policy.graphs"))}
            return {**super().resolved(side, settings), **(others if side == "engine" else {})}

    made = stack(("cache", 0.2))
    ledger = ledger_of(tmp_path, Resolving(made.causes, made.conservative, ignored=frozenset({"policy.graphs"})))
    assert verdicts(ledger)["graphs"] == "not effective"


@pytest.mark.parametrize(
    "damage",
    [lambda text: text.replace('"error": ""', '"error": "x"'), lambda text: text[:100]],
    ids=["changed", "cut"],
)
def test_a_damaged_file_of_scores_is_refused_by_its_name(tmp_path, damage):
    ledger_of(tmp_path, stack(("cache", 0.2)))
    file = next((tmp_path / "starts").glob("baseline-*.json"))
    file.write_text(damage(file.read_text()))
    with pytest.raises(DataError, match=r"baseline-.*does not have its own hash"):
        ledger_of(tmp_path, stack(("cache", 0.2)))


def test_names_of_many_switches_fit_into_a_file_name(tmp_path):
    long = [switch(f"{letter * 60}", group="one") for letter in "abcde"] + [switch("fusion", side="trainer")]
    ledger = ledger_of(tmp_path, SyntheticStack({long[0].key: ("engine", 0.2)}, {long[0].key: "off"}), long)
    assert ledger.rows[0].switch.id == "a" * 60
    assert max(len(path.name) for path in tmp_path.rglob("*")) < 110


def test_scores_of_other_sequences_are_refused(tmp_path):
    ledger_of(tmp_path, stack(("cache", 0.2)))
    frozen = json.loads((tmp_path / "frozen.json").read_text())
    frozen["sequences"][0][-1] += 1
    (tmp_path / "frozen.json").write_text(json.dumps(frozen))
    with pytest.raises(DataError, match="scored on other sequences"):
        ledger_of(tmp_path, stack(("cache", 0.2)))


def test_a_baseline_that_does_not_start_is_an_error(tmp_path):
    made = stack(failing=frozenset({"policy.all"}))
    store = StartStore(tmp_path, made, prompts=4, generations=1)
    with pytest.raises(EngineError, match=r"can't be scored with its own settings: ValueError: policy\.all is wrong"):
        ArmRunner(store, [], {}, settings={"policy.all": 1}, budget=1.0)
    # It is not kept: what failed may have been the environment.
    made.failing = frozenset()
    store = StartStore(tmp_path, made, prompts=4, generations=1)
    assert ArmRunner(store, [], {}, settings={"policy.all": 1}, budget=1.0).base.error == ""
