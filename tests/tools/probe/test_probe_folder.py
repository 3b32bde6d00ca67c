"""The folder of a probe refuses to go on with another recipe, or after a change of what runs it."""

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.probe import probe_folder
from nemo_geomask.tools.probe.probe_folder import describe_probe, prepare_folder

pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (recipes extra)")

RECIPE = """grpo: {max_num_steps: 1}
policy: {precision: bfloat16, generation: {temperature: 1.0, stop_strings: [a]}}
logger: {log_dir: logs, wandb: {name: secret}}
"""


class Checkout:
    """A recipe file and a NeMo-RL checkout of one module."""

    def __init__(self, folder):
        self.root, self.recipe, self.out = folder / "RL", folder / "recipe.yaml", folder / "out"
        self.module = self.root / "nemo_rl/algorithms/grpo.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text("a = 1\n")
        self.recipe.write_text(RECIPE)

    def prepare(self, *overrides, resume=True, sizes=(24, 2, 1)):
        prepare_folder(self.out, describe_probe(self.recipe, overrides, sizes, self.root), resume=resume)

    def edit(self, before, after):
        assert before in RECIPE
        self.recipe.write_text(RECIPE.replace(before, after))


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.prepare(resume=False)
    return checkout


def test_a_probe_goes_on_only_if_asked(checkout):
    with pytest.raises(ConfigError, match="give --resume"):
        checkout.prepare(resume=False)
    checkout.prepare()
    checkout.edit("wandb: {name: secret}", "wandb: {name: other}")  # a probe does not depend on the logger
    checkout.prepare()


def test_a_change_is_named(checkout):
    with pytest.raises(ConfigError, match=r"of other recipe: overrides; settings: policy.precision\."):
        checkout.prepare("policy.precision=float32")
    with pytest.raises(ConfigError, match=r"of other sizes: prompts, ranks\."):
        checkout.prepare(sizes=(20, 2, 2))
    checkout.edit("temperature: 1.0", "top_p: 0.9")
    with pytest.raises(ConfigError, match="settings: policy.generation.temperature, policy.generation.top_p"):
        checkout.prepare()
    checkout.edit("[a]", "[b]")
    with pytest.raises(ConfigError, match="settings: policy.generation.stop_strings"):
        checkout.prepare()


def test_another_version_is_named(checkout, monkeypatch):
    checkout.module.write_text("a = 2\n")
    with pytest.raises(ConfigError, match=r"of other versions: NeMo-RL's source\."):
        checkout.prepare()
    checkout.module.write_text("a = 1\n")
    checkout.prepare()
    monkeypatch.setattr(probe_folder.metadata, "version", lambda package: "0.0")
    with pytest.raises(ConfigError, match="of other versions: .*torch, .* and 3 more"):
        checkout.prepare()


def test_the_folder_holds_no_values(checkout):
    text = (checkout.out / "probe.json").read_text()
    assert "bfloat16" not in text
    assert "secret" not in text


def test_an_older_probe_and_other_files_are_refused(checkout, tmp_path):
    (checkout.out / "probe.json").write_text('{"recipe": "a.yaml", "overrides": [], "sizes": [24, 2, 1]}')
    with pytest.raises(ConfigError, match="recipe: .*; sizes: .*; settings: .*; versions: "):
        checkout.prepare()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no probe"):
        prepare_folder(tmp_path / "mine", {}, resume=False)
