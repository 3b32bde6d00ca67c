"""The objective in words and as a formula."""

import re

import pytest

from nemo_geomask import build_loss
from nemo_geomask.errors import PluginError
from nemo_geomask.losses import available
from nemo_geomask.objectives.registry import BUILT_IN
from nemo_geomask.tools.check import describe
from tests.helpers.plugin_corrections import GAPS, SOFTLY


def test_every_objective_of_the_package_is_written_out():
    for name, entries in available().items():
        if entries[0].distribution == "nemo-geomask":
            assert build_loss({"name": name}).variant.parts


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_symbol_used_is_defined(name):
    parts = describe(build_loss({"name": name, "masks": [{"preset": "veto", "max": 9.0}]}))
    text = " ".join(part.formula for part in parts)
    used = set(re.findall(r"\b([crswkx]|KL|ℓ)_t\b", parts[0].formula + parts[1].formula)) - {"x"}
    for symbol in used - {"k", "s", "ℓ"}:
        assert f"{symbol}_t =" in text, symbol
    assert "k_veto = 1 where exp(x_t) ≤ 9 at every t, x = prev − gen" in text
    for part in parts:
        assert part.explanation.endswith(".")


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({}, "ℓ_t = max(−r_t·A_t, −clip(r_t, 0.8, 1.2)·A_t)"),
        ({"ratio_clip_c": 3.0}, "at most 3·|A_t| where A_t < 0"),
        ({"name": "gspo"}, "ℓ = max(−s·Ā, −clip(s, 0.9997, 1.0004)·Ā)"),
        ({"name": "cispo"}, "ℓ_t = −sg(clip(r_t, 0, 5))·A_t·curr"),
        ({"use_cispo": True}, "ℓ_t = −sg(clip(r_t, 0.8, 1.2))·A_t·curr"),
        ({"disable_ppo_ratio": True}, "ℓ_t = −A_t·curr"),
        ({"force_on_policy_ratio": True}, "r_t = 1"),
        ({"name": "gmpo"}, "x_t = min(curr − prev, 0.4) where Ā > 0, max(curr − prev, -0.4) where Ā < 0"),
        ({"name": "gmpo", "ratio_clip_min": 1.0}, "max(curr − prev, -inf)"),
        ({"name": "gmpo", "ratio_anchor": "gen"}, "x_t = min(curr − gen, 0.4)"),
        ({"ratio_anchor": "gen"}, "r_t = exp(curr − gen)"),
        ({"ratio_anchor": "gen", "use_importance_sampling_correction": True}, "w_t = 1"),
        ({"name": "gspo", "use_importance_sampling_correction": True}, "w_t = exp(Σ_t x_t), x = prev − gen"),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            },
            "w_t = exp(x_t), x = prev − gen, clamped to [0, 2]",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.002,
                "truncated_importance_sampling_ratio_min": 0.999,
            },
            "0 where exp(mean_t x_t) is outside [0.999, 1.002]",
        ),
        ({"loss_normalization": "constant", "loss_normalization_constant": 4096}, "c_t = 1 / (4096 · N_seq)"),
        ({"token_level_loss": False}, "c_t = 1 / (n_i · N_seq)"),
        ({"reference_policy_kl_type": "k2"}, "KL_t = x²/2, x = curr − ref"),
        ({"use_on_policy_kl_approximation": True}, "KL_t = exp(curr − gen)·(e^(−x) − 1 + x)"),
        ({"positive_example_nll_weight": 0.1}, "+ 0.1 · NLL⁺"),
        (
            {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}]},
            "k_geometric = 1 where 0.99 ≤ exp(mean_t x_t) ≤ 1.01, x = prev − gen",
        ),
        (
            {"batch_veto": {"max": 0.1}},
            "no update where mean_t (exp(x_t) − 1 − x_t) > 0.1, x = prev − gen, t over the batch",
        ),
        (
            {"masks": [{"preset": "opsm", "delta": 0.5}]},
            "k_opsm = 1 where 0.606531 ≤ exp(mean_t x_t), x = curr − gen, or A ≥ 0",
        ),
        (
            {"masks": [{"log_ratio": "policy", "level": "token", "statistic": "k2", "max": 0.02}]},
            "k_mask = 1 where x_t²/2 ≤ 0.02, x = curr − prev",
        ),
        (
            {"masks": [{"preset": "dppo_tv", "delta": 0.2}]},
            "k_dppo_tv = 1 where -0.2 ≤ (p_t − q_t) ≤ 0.2, p = exp(curr), q = exp(gen), "
            "or A does not push it further out",
        ),
        (
            {"masks": [{"preset": "vaco", "statistic": "ratio_diff", "delta": 0.2}]},
            "k_vaco = 1 where mean_s |exp(x_s) − 1| ≤ 0.2, x = prev − gen, or A does not push it further out",
        ),
        (
            {"masks": [{"preset": "kpop", "max": 0.1}]},
            "k_kpop = 1 where -0.1 ≤ ±max(KL_b(q_t ‖ p_t), KL_b(p_t ‖ q_t)) ≤ 0.1, p = exp(prev), q = exp(gen)",
        ),
    ],
)
def test_formula(settings, formula):
    text = "\n".join(part.formula for part in describe(build_loss(settings)))
    assert formula in text


def test_what_stays_in_the_counts_is_said():
    masks = [{"preset": "geometric", "max": 1.01}, {"preset": "opsm", "delta": 0.5}]
    words = " ".join(part.explanation for part in describe(build_loss({"masks": masks})))
    assert "Tokens and sequences that `geometric`, `opsm` drops are still counted." in words
    words = " ".join(part.explanation for part in describe(build_loss({"masks": masks, "denominator": "kept"})))
    assert "Tokens and sequences that `geometric` drops are removed before the step" in words
    assert "Tokens and sequences that `opsm` drops are still counted." in words


def test_without_kl_or_weight_neither_is_in_it():
    parts = describe(build_loss({"reference_policy_kl_penalty": 0}))
    assert parts[0].formula == "L = Σ_t c_t · ℓ_t"
    assert not any("KL_t" in part.formula for part in parts)
    assert any("Nothing corrects" in part.explanation for part in parts)


def test_an_objective_from_elsewhere_says_what_it_is_or_is_named_by_its_source(tmp_path, monkeypatch):
    (tmp_path / "their_loss.py").write_text(
        "from nemo_geomask.losses import Part, Variant\nfrom nemo_geomask.objectives.clipped_pg import CLIPPED_PG\n"
        "THEIRS = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, source='their paper, eq. 1')\n"
        "SAID = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool,\n"
        "    parts=(Part('ℓ_t = {ratio_clip_min}', 'Theirs.'),))\n"
        "ODD = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, parts=(Part('{no_such}', ''),))\n"
        "DEEP = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, parts=(Part('{low.x}', ''),))\n"
        "BARE = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, parts=Part('a', 'b'))\n"
        "from nemo_geomask.config import StrictModel\n"
        "class Own(StrictModel):\n    low: float = 0.25\n    dual_clip: float = 4.0\n"
        "OWN = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, options=Own,\n"
        "    parts=(Part('{low} {dual_clip} {high}', 'Own.'),))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = describe(build_loss({"name": "their_loss:SAID", "ratio_clip_min": 0.125}))
    assert (said[1].formula, said[1].explanation) == ("ℓ_t = 0.125", "Theirs.")
    parts = describe(build_loss({"name": "their_loss:THEIRS"}))
    assert parts[1].explanation == "their paper, eq. 1"
    assert describe(build_loss({"name": "their_loss:OWN"}))[1].formula == "0.25 4 1.2"
    for name in ("ODD", "DEEP", "BARE"):
        with pytest.raises(PluginError, match=rf"^loss_fn.name: the parts of the variant 'their_loss:{name}' can't"):
            describe(build_loss({"name": f"their_loss:{name}"}))


def test_corrections_are_described_and_scheduled():
    shown = "\n".join(
        f"{part.formula} {part.explanation}" for part in describe(build_loss({**SOFTLY, "masks": [GAPS]}))
    )
    assert "ROOT_LEVEL(x_t, Σ_t x_t, n)" in shown
    assert "the sequence's product to the power of 1/√n, bent, [0, 1.5]" in shown
    assert "squared difference is above 0.02" in shown
