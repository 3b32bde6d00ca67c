"""Promises of nemo_geomask.testing: our losses keep them all, and each promise catches a loss that breaks it."""

import re
from pathlib import Path

import pytest
import torch
import yaml

import nemo_geomask.testing
from nemo_geomask import build_loss
from nemo_geomask import functional as F
from nemo_geomask.cli import main
from nemo_geomask.config import MaskStatistic
from nemo_geomask.errors import PluginError
from nemo_geomask.losses import Variant
from nemo_geomask.losses.registry import BUILT_IN
from nemo_geomask.testing import PROMISES, SETTINGS, assert_promises, broken_promises, trials
from tests.helpers.plugins_page import code_block


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """Puts the modules of docs/plugins.md where they can be imported."""
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


def test_gradient_is_compared_with_what_is_detached_held_fixed():
    for promise, text in broken_promises({"name": name("FROZEN")}):
        if promise is PROMISES[-2]:
            break
        assert not text, (promise.name, text)


@pytest.mark.slow
def test_assertion_names_every_broken_promise():
    with pytest.raises(AssertionError, match="microbatches add up to the whole batch: the sum over 3 microbatches"):
        assert_promises({"name": name("AVERAGED")})


@pytest.mark.slow
@pytest.mark.parametrize("variant", BUILT_IN)
def test_our_own_keep_every_promise(variant):
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
    promise, text = next(broken_promises({"masks": [mask]}))
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
def test_a_statistic_by_its_name_is_caught_too():
    with pytest.raises(AssertionError, match="microbatches add up to the whole batch"):
        assert_promises(name("CROWDED"))


@pytest.mark.slow
def test_the_documented_corrections_keep_every_promise(documented):
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(loss_fn:\n.*?my_corrections.*?)```", page, re.S)
    loss = yaml.safe_load(settings)["loss_fn"]
    assert build_loss(loss).config.mask_rules[0].label == "gap"
    assert_promises(loss)
