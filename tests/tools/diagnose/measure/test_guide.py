"""Every reported metric has an entry on the page of metrics, and every entry is of a reported metric."""

import itertools
import re
from pathlib import Path

import pytest

import nemo_geomask
from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses import available
from nemo_geomask.metrics import summarize_step
from nemo_geomask.tools.diagnose.explain.causes import CAUSES
from nemo_geomask.tools.diagnose.measure.dimensions import DIMENSIONS_BY_NAME
from nemo_geomask.tools.diagnose.measure.thresholds import HEALTH_LIMITS
from tests.pages.metric_guide import alerts, metric_families, read_entry

ROOT = Path(nemo_geomask.__file__).parent
ENTRIES = [entry for family in metric_families() for entry in family.entries]
NAMES = [name for entry in ENTRIES for name in entry.names]
SETTINGS = (
    {},
    {"ratio_clip_c": 3.0},
    {"use_importance_sampling_correction": True},
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"},
    {"ratio_anchor": "gen"},
    {"ratio_anchor": "gen", "audit_fraction": 0.1},
    {"reference_policy_kl_penalty": 0.1},
    {"masks": [{"preset": "veto", "max": 9.0}, {"preset": "icepop"}]},
    {"positive_example_nll_weight": 0.1},
    {"proximal_policy": "interpolated"},
)
BOUNDS = {"truncated_importance_sampling_ratio": 5.0, "truncated_importance_sampling_ratio_min": 0.5}


def reported_metrics():
    """Return the names of the metrics that the package's objectives report, under every setting that they accept."""
    metrics = set()
    own = [name for name, entries in available().items() if entries[0].distribution == "nemo-geomask"]
    for name, settings in itertools.product(own, SETTINGS):
        more = BOUNDS if "truncated_importance_sampling_type" in settings else {}
        try:
            names = build_loss({"name": name, **settings, **more}).metric_normalizations
        except ConfigError:
            continue
        metrics |= {*names, *summarize_step(dict.fromkeys(names, 1.0))}
    return {re.sub(r"_bin_\d\d$", "_bin_<n>", re.sub(r"/mask/[^/]+/", "/mask/<label>/", name)) for name in metrics}


def prestep_metrics():
    """Return the metrics of the pre-step pass, by their names in its code."""
    return set(re.findall(r"geomask/(?:batch|stale)_\w+", (ROOT / "losses" / "prestep.py").read_text(encoding="utf-8")))


def environment_metrics():
    """Return the metrics of environments, by their names in the code, with ``<name>`` for an environment's."""
    code = (ROOT / "hosts" / "nemo_rl" / "loop_values.py").read_text(encoding="utf-8")
    return {name.replace("{name}", "<name>") for name in re.findall(r'f"(geomask/[^"]+)"', code)}


def test_every_metric_has_an_entry_and_every_entry_a_metric():
    reported = reported_metrics() | prestep_metrics() | environment_metrics()
    assert not reported - set(NAMES), "describe these metrics in tests/pages/metrics.toml"
    assert not set(NAMES) - reported, "these metrics of tests/pages/metrics.toml are not reported"


def test_every_name_in_the_code_of_the_losses_has_an_entry():
    """This also covers metrics that no setting above makes the losses report."""
    for path in sorted((ROOT / "losses").glob("*.py")):
        for name in re.findall(r"Metric\(\(f?\"([\w/{}.]+)\"", path.read_text(encoding="utf-8")):
            pattern = re.sub(r"\{[^}]*\}", ".+", name)
            assert any(re.fullmatch(pattern, known) for known in NAMES), f"{path.name}: {name}"


def test_limits_are_those_of_the_diagnosis():
    limits = {name: (entry.above, entry.below, entry.broken) for entry in ENTRIES for name in entry.alerts}
    levels = {level.name: level for level in HEALTH_LIMITS}
    assert limits["token_mult_prob_error"] == (1.05, None, levels["token_mult_prob_error"].broken)
    assert limits["gen_kl_error"] == limits["geomask/mismatch_k3"] == (0.01, None, 0.1)
    assert limits["geomask/weight_ess"] == (None, 0.7, 0.3)
    assert limits["geomask/weight_raw_sq"] == (1.3, None, 2.0)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.names[0])
def test_an_entry_is_complete(entry):
    assert all((entry.averaging, entry.formula, entry.unit, entry.peers, entry.healthy, entry.action))
    assert set(entry.alerts) <= set(entry.names)
    assert bool(entry.alerts) == bool(entry.limit_source) == (entry.above is not None or entry.below is not None)
    assert not any(text.endswith(".") for text in (entry.formula, entry.peers, entry.healthy, entry.limit_source))


def test_alerts_name_the_recipes_masks_as_nemo_rl_logs_them():
    alerts_by_name = {alert.metric: alert for alert in alerts(["geometric", "opsm"])}
    assert alerts_by_name["train/geomask/mask/opsm/removed"].above == 0.3
    assert alerts_by_name["train/sampling_importance_ratio"][1:3] == (2.0, 0.5)
    assert len(alerts_by_name) == len(alerts()) + 2
    assert not any("<label>" in alert.metric for alert in alerts())
    assert {alert.metric for alert in alerts(prefix="")} < set(NAMES)


SYMPTOMS = (ROOT.parent / "docs" / "reference" / "symptoms.md").read_text(encoding="utf-8")


def test_symptoms_name_every_cause_and_no_unknown_metric():
    words = set(re.findall(r"`([^`\s]+)`", SYMPTOMS))
    assert {cause.id for cause in CAUSES} <= words
    ours = {word for word in words if word.startswith("geomask/") and not word.endswith("…")}
    assert ours <= set(NAMES)
    assert set(re.findall(r"--by ([\w,]+)", SYMPTOMS)) <= {*DIMENSIONS_BY_NAME, "step", "turn,probability"}


def test_symptoms_link_to_every_section_and_to_no_other():
    sections = {
        re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in re.findall(r"^## (.+)$", SYMPTOMS, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", SYMPTOMS)) == sections


def test_symptoms_have_the_limits_of_the_code():
    limits = {name: entry for entry in ENTRIES for name in entry.alerts}
    matches = re.findall(r"`([\w/<>]+)` ([<>]) ([\d.]+)", SYMPTOMS)
    assert len(matches) >= 4
    for name, sign, number in matches:
        entry = limits[name]
        # A negative k1 is a symptom by its sign; it has no limit.
        assert (name, sign, number) == ("geomask/mismatch_k1", "<", "0") or float(number) in {
            *(entry.above, entry.below, entry.broken)
        }, name


def test_an_entry_without_a_field_is_one_sentence():
    table = {"names": ["x", "y"], "averaging": "tokens", "formula": "f", "unit": "u", "healthy": "1", "action": "a"}
    with pytest.raises(ConfigError, match=r"^metrics.toml: the entry of x, y: missing 1 required field: 'peers'$"):
        read_entry(table)
    with pytest.raises(ConfigError, match="the entry of x, y: got an unexpected keyword argument 'peer'"):
        read_entry({**table, "peers": "p", "peer": "p"})
