"""The folder of a probe refuses to go on with other settings, or after a change of what runs it."""

from importlib import metadata

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.probe.probe_folder import describe_probe, dotted_settings, prepare_folder

RECIPE = {
    "grpo": {"max_num_steps": 100, "async_grpo": {"enabled": False}},
    "policy": {"model_name": "a", "generation": {"temperature": 1.0, "stop_strings": ["x"]}},
    "logger": {"log_dir": "logs", "wandb": {"name": "secret"}},
}
IN_FORCE = {"policy.model_name": "job/model", "grpo.max_num_steps": 1}  # what a job replaces


class Probe:
    """A NeMo-RL checkout of one module, and a folder."""

    def __init__(self, folder):
        self.root, self.out = folder / "RL", folder / "out"
        self.module = self.root / "nemo_rl/algorithms/grpo.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text("a = 1\n")

    def prepare(self, resume=True, sizes=(24, 2, 1), machine=("H100",), **sections):
        own = dotted_settings({**RECIPE, **sections})
        in_force = {**own, **IN_FORCE}
        prepare_folder(self.out, describe_probe(own, in_force, sizes, self.root, machine), resume=resume)


@pytest.fixture
def probe(tmp_path):
    probe = Probe(tmp_path)
    probe.prepare(resume=False)
    return probe


def test_a_probe_goes_on_only_if_asked(probe):
    with pytest.raises(ConfigError, match="give --resume"):
        probe.prepare(resume=False)
    probe.prepare()


def test_what_no_score_depends_on_may_change(probe):
    probe.prepare(logger={"log_dir": "job 2"}, checkpointing={"enabled": True}, data={}, env={})
    probe.prepare(grpo={**RECIPE["grpo"], "max_num_steps": 7})  # a job replaces it
    (probe.root / "nemo_rl/.#grpo.py").symlink_to("nowhere")
    probe.prepare()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": (20, 2, 2)}, r"differs in sizes \(prompts, ranks\)\."),
        ({"machine": ("H200",)}, r"machine \(device 0\)"),
        ({"machine": ("H100", "H100")}, r"machine \(device 1\)"),
        ({"policy": {**RECIPE["policy"], "model_name": "b"}}, r"settings \(policy.model_name\)"),
        ({"policy": {"model_name": "a", "generation": {"stop_strings": ["y"]}}}, "stop_strings, .*temperature"),
        ({"grpo": {"async_grpo": {"enabled": True}}}, r"settings \(grpo.async_grpo.enabled, grpo.max_num_steps\)"),
        ({"loss_fn": {str(index): index for index in range(7)}}, "loss_fn.4 and 2 more"),
    ],
)
def test_a_change_is_named(probe, change, named):
    with pytest.raises(ConfigError, match=named):
        probe.prepare(**change)


def test_another_version_is_named(probe, monkeypatch):
    probe.module.write_text("a = 2\n")
    with pytest.raises(ConfigError, match=r"versions \(NeMo-RL's source\)"):
        probe.prepare()
    probe.module.write_text("a = 1\n")
    probe.prepare()
    monkeypatch.setattr(metadata, "version", lambda package: "0.0")
    with pytest.raises(ConfigError, match=r"versions \(flash-attn, .* more\)"):
        probe.prepare()


def test_the_folder_holds_no_values(probe):
    text = (probe.out / "probe.json").read_text()
    assert "policy.model_name" in text
    assert "secret" not in text
    assert "100," not in text


def test_an_older_probe_and_other_files_are_refused(probe, tmp_path):
    (probe.out / "probe.json").write_text('{"recipe": "a.yaml", "overrides": [], "sizes": [24, 2, 1]}')
    with pytest.raises(ConfigError, match="made by an earlier version"):
        probe.prepare()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no probe"):
        prepare_folder(tmp_path / "mine", {}, resume=False)
