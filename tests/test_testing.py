"""What holds a loss to the package's promises: our own keep them all, and each promise catches who breaks it."""

import pytest
import torch

from nemo_geomask import functional as F
from nemo_geomask.cli import main
from nemo_geomask.losses import Variant
from nemo_geomask.losses.registry import BUILT_IN
from nemo_geomask.testing import PROMISES, SETTINGS, assert_promises, broken_promises


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
