"""Which KL estimators are unbiased, by enumeration of small categorical policies.

With one token of V values every expectation is a sum of V terms, so "unbiased" is a statement to 1e-10 and not a
matter of sampling. The clamps are off: where they act, nothing is unbiased, see the last tests.
``docs/background/kl.md`` tabulates what is found here, and a test holds the table to it.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.functional import kl_penalty
from tests.helpers import batches

KINDS = ("k1", "k2", "k3", "k4")
GRADIENTS = (None, *KINDS)
REGIMES = ("on-policy", "stale", "mismatch")
EXACT, CLEAR = 1e-10, 1e-2


def policies(seed: int) -> dict[str, torch.Tensor]:
    """Logits of four policies over 4 or 5 tokens."""
    random = torch.Generator().manual_seed(seed)
    names = ("curr", "prev", "gen", "ref")
    return {name: torch.randn(4 + seed % 2, generator=random, dtype=torch.float64) for name in names}


def regime(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Log-probs of π, π_old, the sampler μ and π_ref.

    on-policy: μ = π_old = π. stale: μ = π_old, and π has moved on. mismatch: μ differs from π_old, and in every other
    set π differs from it too.
    """
    logits = policies(seed)
    if kind == "on-policy":
        logits |= {"prev": logits["curr"], "gen": logits["curr"]}
    elif kind == "stale":
        logits["gen"] = logits["prev"]
    elif seed % 2:
        logits["prev"] = logits["curr"]
    return logits


def relative_error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    return ((estimate - truth).norm() / truth.norm()).item()


def errors(kind: str, value: str, gradient: str | None, importance: bool, seed: int) -> tuple[float, float]:
    """Relative errors of E_μ[value] and E_μ[gradient], for KL(π‖π_ref) and its gradient in π's logits."""
    logits = regime(kind, seed)
    theta = logits["curr"].clone().requires_grad_()
    log_pi = theta.log_softmax(-1)
    fixed = {name: logits[name].log_softmax(-1) for name in ("prev", "gen", "ref")}
    term = kl_penalty(
        curr=log_pi,
        **fixed,
        value=value,
        gradient=gradient,
        importance_weighted=importance,
        input_clamp=None,
        output_clamp=None,
    )
    # Tokens come from μ, whose probabilities are constants: only the term itself is differentiated.
    expectation = (fixed["gen"].exp() * term).sum()
    (estimated,) = torch.autograd.grad(expectation, theta, retain_graph=True)
    truth = (log_pi.exp() * (log_pi - fixed["ref"])).sum()
    (true_gradient,) = torch.autograd.grad(truth, theta)
    return relative_error(expectation, truth), relative_error(estimated, true_gradient)


def unbiased(kind: str, value: str, gradient: str | None, importance: bool) -> tuple[bool, bool]:
    """Verdicts on value and gradient; every set of policies must say the same, and clearly."""
    found = [errors(kind, value, gradient, importance, seed) for seed in range(6)]
    verdicts = []
    for which in zip(*found, strict=True):
        assert all(error < EXACT for error in which) or all(error > CLEAR for error in which), which
        verdicts.append(which[0] < EXACT)
    return verdicts[0], verdicts[1]


# What theory says. Value: k1 and k3 average to the KL under π itself, k4 carries π/π_old; weighting by π/μ makes any of
# these right whatever π_old is. k2 is no estimate of the KL.
VALUES = {
    ("k1", False): {"on-policy"},
    ("k2", False): set(),
    ("k3", False): {"on-policy"},
    ("k4", False): {"on-policy", "stale"},
    ("k1", True): set(REGIMES),
    ("k2", True): set(),
    ("k3", True): set(REGIMES),
    ("k4", True): set(REGIMES),
}
# Gradient. None differentiates weight times value, so it is right where the value is. On its own k1's derivative has
# mean 0, k3's is that of the forward KL; k2's is that of the KL under π, and k4's where r is the ratio to the sampler.
TRAINED = {
    **{(None, value, importance): regimes for (value, importance), regimes in VALUES.items()},
    **{(kind, value, importance): set() for kind in ("k1", "k3") for value, importance in VALUES},
    **{("k2", value, importance): set(REGIMES) if importance else {"on-policy"} for value, importance in VALUES},
    **{("k4", value, importance): VALUES["k4", importance] for value, importance in VALUES},
}


@pytest.mark.parametrize("kind", REGIMES)
@pytest.mark.parametrize("importance", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("value", KINDS)
def test_value_and_gradient_are_unbiased_where_theory_says_so(value, gradient, importance, kind):
    by_value, by_gradient = unbiased(kind, value, gradient, importance)
    assert by_value == (kind in VALUES[value, importance])
    assert by_gradient == (kind in TRAINED[gradient, value, importance])


def test_plain_k1_gradient_is_zero_and_plain_k3_is_the_forward_kls():
    logits = policies(0)
    for kind in ("k1", "k3"):
        theta = logits["curr"].clone().requires_grad_()
        log_pi, log_ref = theta.log_softmax(-1), logits["ref"].log_softmax(-1)
        on_policy = {"prev": log_pi.detach(), "gen": log_pi.detach()}
        options = {"importance_weighted": False, "input_clamp": None, "output_clamp": None}
        term = kl_penalty(curr=log_pi, ref=log_ref, **on_policy, value="k1", gradient=kind, **options)
        (estimated,) = torch.autograd.grad((log_pi.detach().exp() * term).sum(), theta, retain_graph=True)
        forward = (log_ref.exp() * (log_ref - log_pi)).sum() if kind == "k3" else 0 * theta.sum()
        torch.testing.assert_close(estimated, *torch.autograd.grad(forward, theta), rtol=0, atol=1e-12)


@pytest.mark.parametrize("importance", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize(("value", "gradient"), [*itertools.product(KINDS, GRADIENTS)])
def test_the_loss_uses_this_very_term(value, gradient, importance):
    # One row a token of the vocabulary; without advantages the loss is the KL term alone.
    logits = regime("mismatch", 3)
    log_probs = {name: x.log_softmax(-1).float() for name, x in logits.items()}
    rows = [
        batches.one_row(**{name: x[token : token + 1] for name, x in log_probs.items()}, advantage=0.0)
        for token in range(len(log_probs["curr"]))
    ]
    batch = batches.stack(*rows)
    config = {
        "reference_policy_kl_penalty": 0.7,
        "reference_policy_kl_type": value,
        "reference_policy_kl_gradient": gradient,
        "use_on_policy_kl_approximation": importance,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
    }
    curr = log_probs["curr"].double().requires_grad_()
    others = {name: log_probs[name].double() for name in ("prev", "gen", "ref")}
    term = kl_penalty(
        curr=curr,
        **others,
        value=value,
        gradient=gradient,
        importance_weighted=importance,
        input_clamp=None,
        output_clamp=None,
    )
    (grad,) = torch.autograd.grad(0.7 * term.mean(), curr)
    result = batches.evaluate(config, batch)
    assert result.metrics["kl_penalty"] == pytest.approx(term.mean().item(), rel=1e-5)
    assert result.loss.item() == pytest.approx(0.7 * term.mean().item(), rel=1e-5)
    torch.testing.assert_close(result.grad.squeeze(1).double(), grad, rtol=1e-4, atol=1e-6)


def penalty(x: list[float], **changes) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and derivative of the term at log-ratios x, everything on-policy."""
    curr = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(curr).detach()
    options = {"value": "k3", "gradient": None, "importance_weighted": False, "input_clamp": 20.0, "output_clamp": 10.0}
    term = kl_penalty(curr=curr, ref=zero, prev=curr.detach(), gen=curr.detach(), **{**options, **changes})
    (grad,) = torch.autograd.grad(term.sum(), curr)
    return term.detach(), grad


def test_input_clamp_bounds_the_value_and_stops_the_gradient():
    # k1 at 0.5, at the bound, beyond it; the score term counts up to the bound and nothing does beyond.
    value, grad = penalty([0.5, 2.0, 2.5, -2.5], value="k1", input_clamp=2.0, output_clamp=None)
    assert value.tolist() == pytest.approx([0.5, 2.0, 2.0, -2.0], rel=2e-7)  # an ulp
    assert grad.tolist() == [1.5, 3.0, 0.0, 0.0]  # 1 + x


def test_output_clamp_bounds_the_value_and_stops_the_gradient():
    # k3 at -3: e³ − 4 = 16.1, above NeMo-RL's 10; at 1: e⁻¹ = 0.368 with derivative (1 − e⁻¹) + e⁻¹ = 1.
    value, grad = penalty([-3.0, 1.0])
    assert value.tolist() == pytest.approx([10.0, 0.36787944])
    assert grad.tolist() == pytest.approx([0.0, 1.0])
    # k1 may be negative, and is bounded on that side as well.
    value, grad = penalty([-12.0, 12.0], value="k1")
    assert value.tolist() == pytest.approx([-10.0, 10.0], rel=2e-7)
    assert grad.tolist() == [0.0, 0.0]


def test_separate_gradient_keeps_the_value():
    value, grad = penalty([0.5, -1.0, 2.0], value="k3", gradient="k2")
    assert value.tolist() == pytest.approx(penalty([0.5, -1.0, 2.0])[0].tolist())
    assert grad.tolist() == pytest.approx([0.5, -1.0, 2.0])


def test_nemo_rls_clamps_bias_the_estimate():
    # A token that the reference finds 30 times as likely: its k3 term is 10 in place of e^3.4 − 4.4 = 25.6.
    pi, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.03, 0.97], [0.9, 0.1]))
    exact = (pi * (pi / ref).log()).sum()
    options = {"prev": pi.log(), "gen": pi.log(), "value": "k3", "gradient": None, "importance_weighted": False}
    for clamps, right in (((None, None), True), ((20.0, 10.0), False)):
        term = kl_penalty(curr=pi.log(), ref=ref.log(), input_clamp=clamps[0], output_clamp=clamps[1], **options)
        error = ((pi * term).sum() - exact).abs().item()
        assert error < 1e-12 if right else error > 0.3


def test_default_term_is_nemo_rls():
    config = build_loss({}).config
    assert (config.reference_policy_kl_type, config.reference_policy_kl_gradient) == ("k3", None)
    assert (config.kl_input_clamp_value, config.kl_output_clamp_value) == (20.0, 10.0)


# ------------------------------------------------------------------------------------------------ the document

DOC = Path(__file__).parents[2] / "docs" / "background" / "kl.md"


def tables() -> list[list[dict[str, str]]]:
    """Markdown tables of the document as rows of header to cell, without markup."""
    found, rows = [], []
    for line in [*DOC.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("`", "").replace("*", "") for cell in line.strip("|").split("|")])
        elif rows:
            header, _, *body = rows
            found.append([dict(zip(header, row, strict=True)) for row in body])
            rows = []
    return found


def verdict_table(column: str) -> list[dict[str, str]]:
    (table,) = [table for table in tables() if column in table[0] and REGIMES[0] in table[0]]
    return table


def test_document_tabulates_the_values():
    table = verdict_table("value")
    assert [(row["value"], row["use_on_policy_kl_approximation"]) for row in table] == [
        (value, str(importance).lower()) for value in KINDS for importance in (False, True)
    ]
    for row in table:
        for kind in REGIMES:
            expected = unbiased(kind, row["value"], None, row["use_on_policy_kl_approximation"] == "true")[0]
            assert row[kind] == ("yes" if expected else "no"), (row, kind)


def test_document_tabulates_the_gradients():
    table = verdict_table("gradient")
    rows = []
    for row in table:
        match = re.fullmatch(r"null, value (k\d)|(k\d)", row["gradient"])
        assert match, row
        gradient, importance = match[2], row["use_on_policy_kl_approximation"] == "true"
        rows.append((gradient, match[1], importance))
        for kind in REGIMES:
            # The value plays no part where a gradient is chosen.
            verdicts = {unbiased(kind, value, gradient, importance)[1] for value in ([match[1]] if match[1] else KINDS)}
            assert verdicts == {row[kind] == "yes"}, (row, kind)
            assert row[kind] in ("yes", "no")
    null = [(None, value, importance) for value in KINDS for importance in (False, True)]
    chosen = [(gradient, None, importance) for gradient in KINDS for importance in (False, True)]
    assert rows == null + chosen
