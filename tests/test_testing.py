"""What holds a loss to the package's promises: our own keep them all, and each promise catches who breaks it."""

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
from nemo_geomask.errors import ConfigError, PluginError
from nemo_geomask.losses import Variant
from nemo_geomask.losses.registry import BUILT_IN
from nemo_geomask.testing import PROMISES, SETTINGS, assert_promises, broken_promises, trials


def block(module):
    """The code of a page's block that begins with the module's name."""
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    return re.search(rf"```python\n# {module}\.py\n(.*?)```", page, re.S)[1]


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """Puts the modules of docs/plugins.md where they can be imported."""
    for module in ("my_corrections", "my_tasks", "my_masks"):
        (tmp_path / f"{module}.py").write_text(block(module), encoding="utf-8")
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
        ("AVERAGED", "microbatches add up to the whole", "reduce over no tokens"),
        ("OVERFLOWING", "finite at log-ratios of ±100", "saturating_exp"),
        ("DOUBLED", "the gradient is that of finite differences", "off finite differences"),
        ("UNPICKLABLE", "travels by pickle", "pickle"),
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
    with pytest.raises(AssertionError, match="microbatches add up to the whole: the sum over three microbatches"):
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
    assert "BROKEN  travels by pickle: " in text
    assert "ok      packed is padded" in text
    assert main(["test-variant", "gsop"]) == 2
    assert "did you mean 'gspo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ratio_anchor:gen"], "'ratio_anchor:gen' is no setting; write key=value"),
        (["=3"], "'=3' is no setting; write key=value"),
        (["masks=[{preset"], "override 'masks=[{preset': it is no key.path=value in Hydra's grammar"),
        (["a=1", "a.x=2"], "'a=1' and 'a.x=2' set the same; leave one of them out"),
        (["a.x=2", "a=1"], "'a=1' and 'a.x=2' set the same; leave one of them out"),
        (["a=1", "a=2"], "'a=1' and 'a=2' set the same; leave one of them out"),
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
    assert promise.name == "microbatches add up to the whole"
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
    with pytest.raises(AssertionError, match="microbatches add up to the whole"):
        assert_promises(name("CROWDED"))


@pytest.mark.slow
def test_the_documented_corrections_keep_every_promise(documented):
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"```yaml\n(loss_fn:\n.*?my_corrections.*?)```", page, re.S)
    loss = yaml.safe_load(settings)["loss_fn"]
    assert build_loss(loss).config.mask_rules[0].label == "gap"
    assert_promises(loss)


@pytest.mark.slow
def test_the_documented_task_is_trained_on_in_the_lab(documented):
    pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
    from nemo_geomask.lab.recipe import LabRecipe
    from nemo_geomask.lab.trainer import Trainer
    from tests.helpers.tiny_recipe import TINY, merged

    env = {"env": {"name": "my_tasks:Echo", "options": {"numbers": 7}, "min_terms": 2, "max_terms": 4}}
    trainer = Trainer(LabRecipe.read(merged(TINY, env), source="test"), build_loss({}))
    metrics, rollout = trainer.step()
    assert trainer.task.vocab_size == 9
    assert 0 <= metrics["reward"] <= 1
    assert int(rollout.data["input_ids"][:, 1:].max()) <= 8
    with pytest.raises(ConfigError, match=r"env\.name: Input should be|env\.name: .*no task named 'ehco'"):
        LabRecipe.read({"env": {"name": "ehco"}}, source="test")
    with pytest.raises(ConfigError, match="options .* are those of a plugin"):
        LabRecipe.read({"env": {"options": {"numbers": 7}}}, source="test")
