"""Variants through the entry-point group: found, refused, and a distribution of somebody else's."""

import math
import pickle
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from pydantic import Field

from nemo_geomask import build_loss
from nemo_geomask import functional as F
from nemo_geomask.config import MaskPreset, MaskRule, StrictModel, plugins
from nemo_geomask.errors import ConfigError, PluginError
from nemo_geomask.losses import PrestepPass, Variant, available
from nemo_geomask.objectives import registry
from tests.helpers import plugin_corrections
from tests.helpers.batches import evaluate, rollouts
from tests.helpers.plugin_corrections import CORRECTION, GAPS, SOFTLY
from tests.helpers.plugin_example import install_example, run_python

HERE = plugin_corrections.__name__

ROOT = Path(__file__).parents[2]


def mean_loss(inputs, means):
    return F.Surrogate(-inputs.advantages * inputs.curr, inputs.curr, inputs.curr)


MINE = Variant(surrogate=mean_loss)
BROKEN = Variant(surrogate=lambda inputs, means: 1 / 0)
NOT_A_VARIANT = mean_loss


class Half(MaskPreset):
    """Keep sequences whose geometric-mean mismatch ratio is within a factor."""

    factor: float = Field(gt=1)

    def rule(self):
        bound = math.log(self.factor)
        return MaskRule(self.label or "half", "mismatch", "sequence_mean", "ratio", -bound, bound, "always")


class Named(MaskPreset):
    """Called in metrics as its preset is."""

    def rule(self):
        return MaskRule("half_max", "mismatch", "token", "ratio", -1.0, 1.0, "always")


class Ruleless(MaskPreset):
    """Says what it takes, and not what it does."""

    factor: float = Field(gt=1)


@pytest.fixture
def register(monkeypatch):
    """Pretend that distributions registered entry points beside the installed ones."""

    def install(*points, group=registry.GROUP):
        entries = tuple(plugins.Entry(name, value, owner) for owner, name, value in points)
        monkeypatch.setattr(plugins, "registered_entries", lambda other, path: entries if other == group else ())

    return install


def test_built_in_table_is_the_entry_points_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == registry.BUILT_IN


def test_built_ins_are_found_without_metadata(register):
    register()
    assert list(available()) == sorted(registry.BUILT_IN)
    assert build_loss({"name": "gspo"}).variant is registry.load("gspo")


def test_only_the_selected_name_is_imported(register):
    register(("somebody", "theirs", "a_module_that_does_not_exist:LOSS"))
    build_loss({"name": "gspo"})
    assert "theirs" in available()


@pytest.mark.parametrize(
    ("name", "points", "message"),
    [
        *(
            (name, (), f"no loss named '{name}'.*did you mean '{guess}'")
            for name, guess in {
                "gsop": "gspo",
                "GSPO": "gspo",
                "gspo-token": "gspo_token",
                "GRPO": "clipped_pg",
                "ppo": "clipped_pg",
            }.items()
        ),
        ("mine", [("first-dist", "mine", "one:A"), ("b", "mine", "two:B")], r"first-dist \(one:A\) and b \(two:B\)"),
        ("gspo", [("somebody", "gspo", "theirs:GSPO")], "nemo-geomask .* and somebody"),
        ("theirs", [("somebody", "theirs", "no_such_module:LOSS")], "somebody.*ModuleNotFoundError"),
        (f"{__name__}:NOT_A_VARIANT", (), "is a builtins.function; it must be a nemo_geomask.losses.Variant"),
        (f"{__name__}:NOWHERE", (), "AttributeError"),
        (f"{__name__}:BROKEN", (), "ZeroDivisionError"),
        (f"{__name__}:ODD", (), "no_such"),
    ],
)
def test_a_name_that_leads_to_no_variant_says_why(name, points, message, register, monkeypatch):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=mean_loss, defaults={"no_such": 1}))
    register(*points)
    with pytest.raises(PluginError, match=message):
        build_loss({"name": name})


def test_import_that_fails_in_several_lines_is_one_problem_about_the_name(tmp_path, monkeypatch):
    (tmp_path / "noisy_loss.py").write_text(
        "raise ImportError('first\\nloss_fn.ratio_clip_min: greater than 0\\nlast')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as error:
        build_loss({"name": "noisy_loss:LOSS"})
    assert [problem.keys for problem in error.value.problems] == [("loss_fn.name",)]
    # Whatever else is wrong is said beside it.
    with pytest.raises(ConfigError) as error:
        build_loss({"name": "noisy_loss:LOSS", "nonfinite": "drop"})
    assert [problem.keys for problem in error.value.problems] == [("loss_fn.nonfinite",), ("loss_fn.name",)]
    assert str(error.value).count("\n") == 1


def fickle_loss(inputs, means):
    found = mean_loss(inputs, means)
    return found._replace(dual_clipped=found.loss > 0) if found.loss.numel() > 1 else found


@pytest.mark.parametrize("metrics", ["full", "nemo_rl"])
def test_what_a_variant_reports_depends_on_settings_alone(monkeypatch, metrics):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=fickle_loss))
    loss_fn = build_loss({"name": f"{__name__}:ODD", "metrics": metrics, "compile": False})
    if metrics == "full":
        with pytest.raises(
            PluginError, match="^loss_fn.name: .*ODD' reports .* numbers on this batch, but .* on a batch of one token"
        ):
            evaluate(loss_fn, rollouts(1))
    else:
        assert math.isfinite(evaluate(loss_fn, rollouts(1)).loss)


@pytest.mark.parametrize("where", ["defaults", "forces"])
def test_variant_with_a_wrong_setting_of_its_own_is_not_the_recipes_fault(where, monkeypatch):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=mean_loss, **{where: {"ratio_clip_min": True}}))
    with pytest.raises(PluginError, match=r"^loss_fn.name: the variant .* sets ratio_clip_min: must be a number"):
        build_loss({"name": f"{__name__}:ODD"})


class Bounded(StrictModel):
    """Options of a variant."""

    bound: float = 2.0


def no_masks(options):
    return [{"preset": "geometric", "max": options.no_such}]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"pooled_by": "summ"}, "has pooled_by 'summ', which must be 'mean' or 'sum'"),
        ({"options": dict}, "has options <class 'dict'>, which must be a pydantic model class"),
        ({"options": Bounded, "masks": no_masks}, "can't make its masks: AttributeError: .*no_such"),
        (
            {"masks": lambda options: [{"preset": "geometrc"}]},
            r"has invalid masks: masks\[0\].preset: unknown preset.*'geometric'",
        ),
    ],
)
def test_a_variant_that_is_wrong_by_itself_is_not_the_recipes_fault(own, message, monkeypatch):
    monkeypatch.setitem(globals(), "ODD", Variant(surrogate=mean_loss, **own))
    with pytest.raises(PluginError, match=rf"^loss_fn.name: the variant .*ODD' {message}"):
        build_loss({"name": f"{__name__}:ODD"})


def test_an_option_that_makes_a_wrong_mask_is_the_recipes(monkeypatch):
    odd = Variant(surrogate=mean_loss, options=Bounded, masks=lambda own: [{"preset": "geometric", "max": own.bound}])
    monkeypatch.setitem(globals(), "ODD", odd)
    build_loss({"name": f"{__name__}:ODD"})
    with pytest.raises(ConfigError, match=r"loss_fn\.options\.masks\[0\]\.max"):
        build_loss({"name": f"{__name__}:ODD", "options": {"bound": -1.0}})


PRESET_GROUP = "nemo_geomask.mask_presets"


@pytest.mark.parametrize("name", ["half", f"{__name__}:Half"])
def test_preset_of_another_distribution_is_a_rule_like_any(name, register):
    register(("somebody", "half", f"{__name__}:Half"), group=PRESET_GROUP)
    geometric = {"preset": "geometric", "min": 0.8, "max": 1.25, "label": "half"}
    loss, same = (build_loss({"masks": [mask]}) for mask in ({"preset": name, "factor": 1.25}, geometric))
    rule, other = loss.config.mask_rules[0], same.config.mask_rules[0]
    assert (rule.label, rule.level, rule.high) == (other.label, other.level, other.high)
    assert rule.low == pytest.approx(other.low)
    assert "geomask/mask/half/removed" in loss.metric_normalizations
    again = pickle.loads(pickle.dumps(loss))
    assert again.config.mask_rules == loss.config.mask_rules
    assert build_loss(loss.config).config.mask_rules == loss.config.mask_rules
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "1.25" in repr(loss)


@pytest.mark.parametrize(
    ("points", "mask", "message"),
    [
        (
            [("a-dist", "half", "one:A"), ("b-dist", "half", "two:B")],
            {"preset": "half"},
            r"a-dist \(one:A\) and b-dist",
        ),
        ([("somebody", "half", "no_such_module:A")], {"preset": "half"}, "somebody.*ModuleNotFoundError"),
        ([("somebody", "half", f"{__name__}:MINE")], {"preset": "half"}, "somebody.*must be a class derived from"),
        ([("somebody", "half", f"{__name__}:Ruleless")], {"preset": "half"}, "somebody.*with a rule of its own"),
        ([], {"preset": f"{__name__}:Half", "factor": 0.5}, r"masks\[0\].factor: .*greater than 1"),
        ([], {"preset": f"{__name__}:Half", "factr": 2.0}, r"masks\[0\].factr: unknown key; did you mean 'factor'"),
        ([], {"preset": "half"}, r"masks\[0\].preset: unknown preset"),
        ([("somebody", "half", f"{__name__}:Half")], {"preset": "hal"}, "did you mean 'half'"),
        ([("somebody", "half", f"{__name__}:Half")], {"preset": "zzz"}, "known: .*half"),
        # A name of ours is not for another to take, silently or otherwise.
        ([("a-dist", "veto", f"{__name__}:Half")], {"preset": "veto", "max": 9.0}, "nemo-geomask .* and a-dist"),
        ([("a-dist", "half_max", f"{__name__}:Named")], {"preset": "half_max"}, r"masks\[0\].label: .*'half_max'"),
    ],
)
def test_preset_that_can_not_be_had_says_whose_it_is(points, mask, message, register):
    register(*points, group=PRESET_GROUP)
    with pytest.raises(ConfigError, match=message):
        build_loss({"masks": [mask]})


def test_module_attribute_works_and_travels():
    loss = pickle.loads(pickle.dumps(build_loss({"name": f"{__name__}:MINE", "reference_policy_kl_penalty": 0.0})))
    data = {name: torch.zeros(1, 3) for name in ("prev_logprobs", "generation_logprobs")}
    data |= {"token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1), "advantages": torch.full((1, 3), 2.0)}
    curr = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    value, _ = loss(curr, data, torch.tensor(1.0), torch.tensor(2.0))
    value.backward()
    assert value.item() == pytest.approx(3.0)  # -(2·-1 + 2·-2) / 2
    assert curr.grad.tolist() == [[-1.0, -1.0]]


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    return install_example(tmp_path_factory)


@pytest.mark.slow
def test_third_party_distribution_is_found_by_its_entry_point(third_party):
    code = (
        "from nemo_geomask import build_loss\nfrom nemo_geomask.losses import available\n"
        "print(available()['my_topr'][0].distribution)\n"
        "loss = build_loss({'name': 'my_topr', 'options': {'cap': 2.0}})\n"
        "print(loss.options.cap, loss.reference_policy_kl_penalty)\n"
    )
    done = run_python(third_party, "-c", code)
    assert done.stdout.split() == ["topr-loss", "2.0", "0.0"], done.stderr


@pytest.mark.slow
def test_third_party_options_are_strict(third_party):
    done = run_python(
        third_party,
        "-c",
        "from nemo_geomask import build_loss; build_loss({'name': 'my_topr', 'options': {'cp': 2}})",
    )
    assert "loss_fn.options.cp" in done.stderr
    assert "did you mean 'cap'" in done.stderr


@pytest.mark.parametrize("by", ["attribute", "name"])
def test_corrections_of_another_distribution_are_computed_as_ours_are(by, register):
    settings, mask = dict(SOFTLY), dict(GAPS)
    if by == "name":
        groups = {"GAP": "mask_statistics", "ROOT_LEVEL": "weight_levels", "SOFT": "truncations"}
        entries = {
            f"nemo_geomask.{group}": (plugins.Entry(name.lower(), f"{HERE}:{name}", "somebody"),)
            for name, group in groups.items()
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(plugins, "registered_entries", lambda group, path: entries.get(group, ()))
            settings |= {"is_correction_level": "root_level", "truncated_importance_sampling_type": "soft"}
            loss = build_loss({**settings, "masks": [mask | {"statistic": "gap"}]})
    else:
        loss = build_loss({**settings, "masks": [mask]})
    # No entry point is looked up where it arrives.
    loss = pickle.loads(pickle.dumps(loss))
    batch = rollouts(seed=3)
    data = {key: value.double().tolist() for key, value in batch.data.items()}
    curr, total, gradient, removed = batch.curr.double().tolist(), 0.0, [], 0.0
    for i, row in enumerate(curr):
        steps = [t for t in range(len(row)) if data["token_mask"][i][t + 1] and data["sample_mask"][i]]
        prev, gen, advantage = (
            [data[key][i][t + 1] for t in range(len(row))]
            for key in ("prev_logprobs", "generation_logprobs", "advantages")
        )
        log_weight = sum(prev[t] - gen[t] for t in steps) / math.sqrt(max(len(steps), 1))
        weight = math.exp(log_weight) / (1 + math.exp(log_weight) / 1.5)
        gradient.append([0.0] * len(row))
        for t in steps:
            ratio = math.exp(row[t] - prev[t])
            inside = (ratio < 1.2) if advantage[t] > 0 else (ratio > 0.8)
            loss_t = max(-ratio * advantage[t], -min(max(ratio, 0.8), 1.2) * advantage[t])
            kept = (math.exp(row[t]) - math.exp(gen[t])) ** 2 <= 0.02
            removed += (not kept) / batch.toks
            total += kept * weight * loss_t / batch.toks
            gradient[i][t] = kept * inside * -weight * ratio * advantage[t] / batch.toks
    found = evaluate(loss, batch)
    assert 0.05 < removed < 0.9
    assert found.loss.item() == pytest.approx(total, rel=1e-4)
    torch.testing.assert_close(found.grad.double(), torch.tensor(gradient).double(), rtol=1e-4, atol=1e-6)
    assert found.metrics["geomask/mask/mask/removed"] == pytest.approx(removed, rel=1e-5)


def test_the_weights_mean_is_over_tokens_where_each_has_its_own():
    loss = build_loss({**SOFTLY, "is_correction_batch_normalize": True})
    batch = rollouts(seed=3, more_seqs=0, more_toks=0)
    plain = evaluate(build_loss(SOFTLY), batch).metrics["geomask/weight_mean"]
    change = PrestepPass(loss.config)(batch.data)
    assert change.metrics["geomask/batch_weight_mean"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"masks": [{**GAPS, "statistic": "k4"}]}, r"masks\[0\].statistic", "Input should be 'ratio', .*'k2'"),
        ({"masks": [{**GAPS, "statistic": f"{HERE}:SOFT"}]}, r"masks\[0\].statistic", "must be .*MaskStatistic"),
        ({**SOFTLY, "is_correction_level": f"{HERE}:GAP"}, "is_correction_level", "must be .*WeightLevel"),
        ({**SOFTLY, "is_correction_level": "no_module:X"}, "is_correction_level", "ModuleNotFoundError"),
        ({**SOFTLY, "truncated_importance_sampling_type": "ticepop"}, "sampling_type", "did you mean 'icepop'"),
        ({**SOFTLY, "truncated_importance_sampling_ratio": None}, "sampling_type", "needs .*_ratio"),
        ({"masks": [{**GAPS, "min": -0.1}]}, r"masks\[0\]", "must be at least 0"),
        ({"masks": [{**GAPS, "when": "pushing"}]}, r"masks\[0\]", "needs a direction"),
    ],
)
def test_wrong_corrections_are_errors_at_their_key(settings, key, message):
    with pytest.raises(ConfigError, match=rf"loss_fn\.[^\n]*{key}[^\n]*{message}"):
        build_loss(settings)


def test_a_name_of_ours_that_another_claims_is_an_error(register):
    register(("somebody", "token", f"{HERE}:ROOT_LEVEL"), group="nemo_geomask.weight_levels")
    with pytest.raises(
        ConfigError, match=r"is_correction_level: 'token' is registered .* nemo-geomask .* and somebody"
    ):
        build_loss({**CORRECTION, "is_correction_level": "token"})


def test_a_name_of_another_distributions_is_suggested_and_listed(register):
    register(("somebody", "by_root", f"{HERE}:ROOT_LEVEL"), group="nemo_geomask.weight_levels")
    for wrong, message in (("by_rot", "did you mean 'by_root'"), ("zzz", "or 'by_root', or null")):
        with pytest.raises(ConfigError, match=message):
            build_loss({**CORRECTION, "is_correction_level": wrong})
    with pytest.raises(ConfigError, match=r"No module named 'nope'(?!.*or null)"):
        build_loss({**CORRECTION, "is_correction_level": "nope:X"})
