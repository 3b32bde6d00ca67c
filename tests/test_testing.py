"""Promises of nemo_geomask.testing: our losses keep them all, and each promise catches a loss that breaks it."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

import nemo_geomask.testing
from nemo_geomask import build_loss
from nemo_geomask import functional as F
from nemo_geomask.cli import main
from nemo_geomask.config import MaskPreset, MaskRule, MaskStatistic, Truncation, WeightLevel
from nemo_geomask.errors import ConfigError, PluginError
from nemo_geomask.losses import Variant
from nemo_geomask.objectives.registry import BUILT_IN
from nemo_geomask.testing import PROMISES, SETTINGS, assert_promises, broken_promises, trials
from tests.helpers.plugins_page import code_block


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """Puts the modules of docs/how_to/plugins.md where they can be imported."""
    for module in ("my_corrections", "my_tasks", "my_masks"):
        (tmp_path / f"{module}.py").write_text(code_block(module), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def surrogate(loss, inputs):
    ratio = F.saturating_exp(inputs.log_ratio)
    return F.Surrogate(loss, ratio, ratio)


def averaged(inputs, means):
    return surrogate((-inputs.advantages * F.saturating_exp(inputs.log_ratio)).mean(), inputs)


def overflowing(inputs, means):
    return surrogate(-inputs.advantages * inputs.log_ratio.exp(), inputs)


def branching(inputs, means):
    scale = 2.0 if inputs.log_ratio.detach().sum() > 0 else 1.0
    return surrogate(-inputs.advantages * inputs.curr * scale, inputs)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def doubled(inputs, means):
    return surrogate(-inputs.advantages * Wrong.apply(inputs.curr), inputs)


def frozen(inputs, means):
    """Straight through: what is detached, and what is computed without gradient, counts as constant."""
    with torch.no_grad():
        weight = F.saturating_exp(inputs.log_ratio).clamp(max=2.0)
    again = F.saturating_exp(inputs.curr - inputs.curr.detach())
    return surrogate(-weight * again * inputs.advantages, inputs)


def rooted(inputs, means):
    return surrogate(-inputs.advantages * inputs.log_ratio.sqrt(), inputs)


def rooted_at_zero(inputs, means):
    branch = torch.where(inputs.log_ratio > 0, inputs.log_ratio, (inputs.log_ratio * 0).sqrt())
    return surrogate(-inputs.advantages * branch, inputs)


def divided(inputs, means):
    """Infinite where no token trains, and then 0 · infinity: made by the sum of the loss, not by this function."""
    return surrogate(-inputs.advantages * inputs.curr / (inputs.curr * 0 + inputs.curr.detach().abs().amax()), inputs)


def nan_metric(inputs, means):
    loss = surrogate(-inputs.advantages * inputs.curr, inputs)
    return loss._replace(ratio=loss.ratio * float("nan"))


def nan_difference(inputs, means):
    """Finite, with a finite gradient, but NaN a small step below the batch."""
    step = inputs.curr - inputs.curr.detach()
    return surrogate(-inputs.advantages * inputs.curr + torch.log1p(2e6 * step), inputs)


def rooted_level(token, total, count):
    return total.sqrt()


def rooted_truncation(log_weight, *, min, max):
    return F.Weight(log_weight.sqrt(), outside=log_weight > 0)


def rooted_statistic(log_p, log_q):
    return (log_p - log_q).sqrt()


def never_finite(log_p, log_q):
    return (log_p - log_q) * float("nan")


def difference(log_p, log_q):
    return log_p.exp() - log_q.exp()


class Unbounded(MaskPreset):
    """A preset whose bounds are NaN."""

    def rule(self) -> MaskRule:
        return MaskRule("unbounded", "mismatch", "token", "ratio", math.nan, math.inf, "always")


ROOTED = Variant(surrogate=rooted)
ROOTED_AT_ZERO = Variant(surrogate=rooted_at_zero)
DIVIDED = Variant(surrogate=divided)
NAN_METRIC = Variant(surrogate=nan_metric)
NAN_DIFFERENCE = Variant(surrogate=nan_difference)
ROOTED_LEVEL = WeightLevel(rooted_level)
ROOTED_TRUNCATION = Truncation(rooted_truncation)
ROOTED_STATISTIC = MaskStatistic(rooted_statistic)
NEVER_FINITE = MaskStatistic(never_finite)
SIGNED = MaskStatistic(difference, signed=True)
AVERAGED = Variant(surrogate=averaged)
OVERFLOWING = Variant(surrogate=overflowing)
BRANCHING = Variant(surrogate=branching)
DOUBLED = Variant(surrogate=doubled)
FROZEN = Variant(surrogate=frozen)
UNPICKLABLE = Variant(surrogate=lambda inputs, means: frozen(inputs, means))


def name(variant):
    return f"{__name__}:{variant}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "promise", "message"),
    [
        ("AVERAGED", "microbatches add up to the whole batch", "must not sum or average over tokens"),
        ("OVERFLOWING", "finite at log-ratios of ±100", "saturating_exp"),
        ("DOUBLED", "the gradient equals finite differences", "differs from finite differences"),
        ("UNPICKLABLE", "survives pickling", "pickle"),
        ("BRANCHING", "one graph under torch.compile", "data-dependent"),
    ],
)
def test_each_promise_catches_who_breaks_it(variant, promise, message):
    tried = broken_promises({"name": name(variant)})
    text = next(text for kept, text in tried if kept.name == promise)
    assert message.casefold() in text.casefold()


@pytest.mark.parametrize(
    ("plugin", "problem", "origin"),
    [
        ("ROOTED", "the loss is NaN; the first NaN comes from `", "in rooted)"),
        (
            "ROOTED_AT_ZERO",
            "the gradient is NaN at 40 tokens; the first NaN is the gradient of `",
            "in rooted_at_zero)",
        ),
        ("DIVIDED", "the loss is NaN on row 4 alone; the first NaN comes from `", "in divided)"),
        ("NAN_METRIC", "probs_ratio is NaN", "in nan_metric)"),
        ("ROOTED_LEVEL", "the loss is NaN; the first NaN comes from `return total.sqrt()`", "in rooted_level)"),
        ("ROOTED_TRUNCATION", "the loss is NaN; the first NaN comes from `", "in rooted_truncation)"),
        ("ROOTED_STATISTIC", "is NaN at 28 of 40 trained tokens", "rooted_statistic"),
        ("NEVER_FINITE", "is NaN at 40 of 40 trained tokens", "never_finite"),
    ],
)
def test_nan_in_a_plugin_is_named_with_where_it_comes_from(plugin, problem, origin):
    for settings in trials(name(plugin)).values():
        results = list(broken_promises(settings))
        assert [promise for promise, _ in results] == [PROMISES[0]]
        text = results[0][1]
        assert problem in text
        assert "(test_testing.py, line " in text or "see test_testing.py, line " in text
        assert origin in text
        assert "sum or average" not in text


def test_gradient_check_is_not_passed_by_nan():
    results = {promise.name: text for promise, text in _until_gradient(name("NAN_DIFFERENCE"))}
    assert not results["finite on an ordinary batch"]
    assert "differs from finite differences" in results["the gradient equals finite differences"]


def _until_gradient(variant):
    for promise, text in broken_promises({"name": variant}):
        yield promise, text
        if promise.name == "the gradient equals finite differences":
            return


def test_a_signed_statistic_is_tried_at_no_level_where_signs_cancel():
    settings = trials(name("SIGNED"))
    assert list(settings) == ["at level token", "at level sequence_max", "at level prefix_max"]
    for trial in settings.values():
        build_loss(trial)


def test_bounds_of_nan_are_refused():
    with pytest.raises(
        ConfigError, match=r"loss_fn.masks\[0\]: rule\(\) of this preset returns the bounds nan and inf"
    ):
        build_loss({"masks": [{"preset": name("Unbounded")}]})


def test_gradient_is_compared_with_what_is_detached_held_fixed():
    for promise, text in itertools.islice(broken_promises({"name": name("FROZEN")}), len(PROMISES) - 2):
        assert not text, (promise.name, text)


@pytest.fixture
def untraced(monkeypatch):
    """Leaves out the promise of one graph, whose tracing takes far longer than all others."""
    kept = [promise for promise in PROMISES if promise.name != "one graph under torch.compile"]
    assert len(kept) == len(PROMISES) - 1
    monkeypatch.setattr(nemo_geomask.testing, "PROMISES", kept)


@pytest.mark.slow
def test_assertion_names_every_broken_promise(untraced):
    with pytest.raises(AssertionError, match="microbatches add up to the whole batch: the sum over 3 microbatches"):
        assert_promises({"name": name("AVERAGED")})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["clipped_pg", "gspo"])
def test_our_own_keep_every_promise(variant):
    assert_promises(variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in BUILT_IN if name not in ("clipped_pg", "gspo")])
def test_our_own_keep_every_other_promise(variant, untraced):
    """``tests/losses/test_compiled.py`` traces each of them, with its gradient."""
    assert_promises(variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"ratio_anchor": "gen", "ratio_clip_c": 3.0},
        {"force_on_policy_ratio": True, **SETTINGS[1]},
        {"reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.1, "loss_normalization": "documents",
         "positive_example_nll_normalization": "loss"},
        {"masks": [{"preset": "geometric", "max": 1.05}], "denominator": "kept"},
    ],
)  # fmt: skip
def test_other_settings_keep_every_promise(settings):
    assert_promises({"name": "clipped_pg", **settings})


@pytest.mark.slow
def test_command_says_what_is_broken(capsys):
    assert main(["test-variant", name("UNPICKLABLE"), "ratio_clip_max=0.3"]) == 1
    text = capsys.readouterr().out
    assert "BROKEN  survives pickling: " in text
    assert "ok      packed rows equal padded rows" in text
    assert main(["test-variant", "gsop"]) == 2
    assert "did you mean 'gspo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ratio_anchor:gen"], "'ratio_anchor:gen' is not a setting; write key=value"),
        (["=3"], "'=3' is not a setting; write key=value"),
        (["masks=[{preset"], "override 'masks=[{preset': it is not key.path=value in Hydra's grammar"),
        (["a=1", "a.x=2"], "'a=1' and 'a.x=2' set the same key; remove one of them"),
        (["a.x=2", "a=1"], "'a=1' and 'a.x=2' set the same key; remove one of them"),
        (["a=1", "a=2"], "'a=1' and 'a=2' set the same key; remove one of them"),
        (["ratio_anchr=gen"], "did you mean 'ratio_anchor'"),
    ],
)
def test_command_reads_every_word(words, message, capsys):
    pytest.importorskip("hydra", reason="overrides are Hydra's")
    assert main(["test-variant", "gspo", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "ok " not in printed.out


def test_command_says_how_a_presets_fields_are_given(documented, capsys, monkeypatch):
    pytest.importorskip("hydra", reason="overrides are Hydra's")
    assert main(["test-variant", "my_masks:Within"]) == 2
    fix = "nemo-geomask test-variant my_masks:Within 'masks=[{preset: my_masks:Within, factor: …}]'"
    assert fix in capsys.readouterr().err
    monkeypatch.setattr(nemo_geomask.testing, "broken_promises", lambda settings: asked.append(settings) or [])
    asked = []
    assert main(["test-variant", "my_masks:Within", "masks=[{preset: my_masks:Within, factor: 1.02}]"]) == 0
    assert asked == [{"masks": [{"preset": "my_masks:Within", "factor": 1.02}]}]
    build_loss(asked[0])


def crowded(log_p, log_q):
    return (log_p - log_q).abs() / (log_p - log_q).abs().mean()


CROWDED = MaskStatistic(crowded)


def test_a_correction_that_reduces_over_tokens_is_caught():
    mask = {"log_ratio": "mismatch", "level": "token", "statistic": name("CROWDED"), "max": 1.5}
    (_, finite), (promise, text), *_ = itertools.islice(broken_promises({"masks": [mask]}), 2)
    assert not finite
    assert promise.name == "microbatches add up to the whole batch"
    assert text


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("my_corrections:GAP", ["at level token", "at level sequence_mean", "at level prefix_max"]),
        ("my_corrections:ROOT", ["as the weight"]),
        ("my_corrections:BENT", ["at level token", "at level sequence_mean"]),
        ("gspo", ["alone", "with a weight and masks"]),
    ],
)
def test_a_correction_is_tried_by_its_name(subject, words, documented):
    found = trials(subject)
    assert list(found) == words
    for settings in found.values():
        build_loss(settings)


def test_a_name_that_is_no_plugins_is_an_error():
    with pytest.raises(PluginError, match="did you mean 'gspo'"):
        trials("gsop")


@pytest.mark.slow
def test_a_statistic_by_its_name_is_caught_too(untraced):
    with pytest.raises(AssertionError, match="microbatches add up to the whole batch"):
        assert_promises(name("CROWDED"))


@pytest.mark.slow
def test_the_documented_corrections_keep_every_promise(documented):
    page = (Path(__file__).parents[1] / "docs" / "how_to" / "plugin_corrections.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(loss_fn:\n.*?my_corrections.*?)```", page, re.S)
    loss = yaml.safe_load(settings)["loss_fn"]
    assert build_loss(loss).config.mask_rules[0].label == "gap"
    assert_promises(loss)
