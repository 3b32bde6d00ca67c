"""Overrides: where NeMo-RL is importable, they mean what it makes of them; everywhere, errors and origins are ours."""

import sys

import pytest

from nemo_geomask.errors import ConfigError, InputLimitError, MissingDependencyError
from nemo_geomask.recipe import load_recipe, nemo_rl_root, read_recipe

pytest.importorskip("hydra", reason="overrides are read by Hydra (recipes extra)")

RECIPE = """\
policy:
  train_micro_batch_size: 4
  lr: ???
  generation: {backend: vllm, vllm_cfg: {precision: bfloat16}}
  engine: ${policy.generation}
loss_fn:
  name: gspo
  ratio_clip_c: null
  masks:
    - {preset: geometric, min: 0.99, max: 1.01}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")

    def read(*overrides, **options):
        return read_recipe("r.yaml", ["policy.lr=1e-3", *overrides], **options)

    return read


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Not there.
        (
            "policy.train_micro_batch_siz=4",
            "the recipe has no key policy.train_micro_batch_siz; did you mean policy.train_micro_batch_size=4? To add "
            "it, write ++policy.train_micro_batch_siz=4",
        ),
        (
            "loss_fn.nonfinite=raise",
            "the recipe has no key loss_fn.nonfinite; to add it, write ++loss_fn.nonfinite=rai",
        ),
        ("loss_fn.nonfinit=raise", "did you mean ++loss_fn.nonfinite=raise? To add it, write ++loss_fn.nonfinit=raise"),
        ("polcy.generation.backend=x", "no key polcy.generation.backend; did you mean policy.generation.backend=x?"),
        ("backend=megatron", "no key backend; did you mean policy.generation.backend=megatron?"),
        (
            "policy.generation={backend: x, vllm_cfg: {precison: y}}",
            "no key policy.generation.vllm_cfg.precison; did you mean policy.generation.vllm_cfg.precision? To add it, "
            "write ++policy.generation={backend: x, vllm_cfg: {precison: y}}",
        ),
        ("loss_fn.name.x=1", "no key loss_fn.name.x; to add it, write ++loss_fn.name.x=1"),
        ("loss_fn.masks.0.mn=1", "no key loss_fn.masks.0.mn; to add it"),
        # There already.
        ("+loss_fn.name=gspo", "loss_fn.name exists already (at r.yaml:7); write ++loss_fn.name=gspo to replace it"),
        # To delete.
        ("~loss_fn.nam", "there is no loss_fn.nam to delete; did you mean ~loss_fn.name?"),
        ("~loss_fn.nonfinite", "there is no loss_fn.nonfinite to delete; remove the override"),
        ("~zzz", "there is no zzz to delete; remove the override"),
        ("~loss_fn.ratio_clip_c", "loss_fn.ratio_clip_c has no value, and Hydra does not delete such keys"),
        ("~loss_fn.name=sapo", "loss_fn.name is 'gspo', not 'sapo'; write ~loss_fn.name to delete it"),
        # Lists and mappings.
        ("loss_fn.masks[0].min=0.98", "an item of a list is addressed with a dot; write loss_fn.masks.0.min=0.98"),
        (
            "loss_fn.masks.1.min=0.98",
            "loss_fn.masks is a list: an override can change keys of its items (loss_fn.masks.0.<key>=…)",
        ),
        ("~loss_fn.masks.0", "or replace it as a whole (loss_fn.masks=[…]), but can't add or delete an item"),
        (
            "loss_fn.masks={a: 1}",
            "is a list, which this value can't replace; delete it first: ~loss_fn.masks ++loss_fn",
        ),
        ("policy.generation=[1]", "is a mapping, which this value can't replace; delete it first: ~policy.generation"),
        # Grammar.
        ("loss_fn.name", "it is not of the form key.path=value; write for example"),
        ("loss_fn.masks=[1", "in Hydra's grammar; quote a value"),
        ("loss_fn.name=int('x')", "ValueError while evaluating 'int('x')': invalid literal for int()"),
        ("=1", "it is not key.path=value in Hydra's grammar; quote a value"),
        ("loss_fn/name=sapo", "the recipe has no key loss_fn/name; did you mean loss_fn.name=sapo?"),
        ("loss_fn..name=1", "it is not key.path=value in Hydra's grammar; quote a value"),
        ("loss_fn.name=gspo,cispo", "Hydra reads this as a sweep, which NeMo-RL lacks; write a list as loss_fn.name=["),
        ("loss_fn@x=1", "loss_fn@x is a config group of Hydra, which recipes don't have; write a dotted key"),
    ],
)
def test_refusals_name_the_override_the_key_and_the_fix(override, message, recipe):
    with pytest.raises(ConfigError) as caught:
        recipe(override)
    assert str(caught.value).startswith(f"override '{override}': ")
    assert message in str(caught.value)
    assert caught.value.__cause__ is None
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.train_micro_batch_size=4"],
        ["++loss_fn.nonfinite=raise"],
        ["loss_fn.masks.0.min=0.98"],
        ["~policy.generation", "++policy.generation=[1]"],
        ["loss_fn.name='gspo,cispo'"],
    ],
)
def test_the_fixes_that_errors_name_work(overrides, recipe):
    recipe(*overrides)


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (
            ["loss_fn.masks=[{preset: geometrc}]"],
            {"loss_fn.masks[0].preset": 0, "loss_fn.masks[1].max": 0, "loss_fn.name": "r.yaml:7"},
        ),
        (["loss_fn.masks.0.min=0.98"], {"loss_fn.masks[0].min": 0, "loss_fn.masks[0].max": "r.yaml:10"}),
        (
            ["policy.generation={vllm_cfg: {precision: float16}}"],
            {
                "policy.generation.vllm_cfg.precision": 0,
                "policy.generation.backend": "r.yaml:4",
                "policy.train_micro_batch_size": "r.yaml:2",
            },
        ),
        (["++grpo.async.enabled=true"], {"grpo.async.enabled": 0, "grpo.async": 0, "grpo": 0}),
        (["++loss_fn.name.x=1"], {"loss_fn.name.x": 0, "loss_fn.name": 0, "loss_fn.ratio_clip_c": "r.yaml:8"}),
        (["loss_fn=null"], {"loss_fn": 0, "loss_fn.name": 0, "loss_fn.masks[0].min": 0}),
        (["~loss_fn.name"], {"loss_fn.name": 0, "loss_fn": "r.yaml:6", "loss_fn.masks[0].min": "r.yaml:10"}),
        (["~loss_fn"], {"loss_fn": 0, "loss_fn.masks[0].min": 0, "policy": "r.yaml:1"}),
        (["~loss_fn.masks", "++loss_fn.masks=[{min: 1}]"], {"loss_fn.masks": 1, "loss_fn.masks[0].min": 1}),
        (["loss_fn.name=sapo", "loss_fn.name=cispo"], {"loss_fn.name": 1}),
        # Hydra deletes what the reference leads to.
        (["~policy.engine.backend"], {"policy.generation.backend": 0, "policy.engine": "r.yaml:5"}),
    ],
)
def test_an_override_is_the_origin_of_what_it_changes(overrides, places, recipe):
    origins = recipe(*overrides).origins
    for key, place in places.items():
        expected = place if isinstance(place, str) else f"override '{overrides[place]}'"
        assert str(origins.at(key)) == expected, key


def test_new_keys_may_be_set_where_all_keys_are_checked_later(recipe):
    assert recipe("grpo.seed=7", "loss_fn.new={a: 1}", new_keys=True).data["loss_fn"]["new"] == {"a": 1}
    with pytest.raises(ConfigError, match=r"\+ adds a key, but loss_fn.name exists already"):
        recipe("+loss_fn.name=gspo", new_keys=True)


def test_a_missing_hydra_names_the_extra(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra._internal.config_loader_impl", None)
    with pytest.raises(MissingDependencyError, match=r"overriding a setting needs hydra, .*nemo-geomask\[recipes\]"):
        recipe()


# --- with NeMo-RL

CHILD = """\
defaults: ${oc.env:NEMO_RL_ROOT}/examples/configs/grpo_math_1B.yaml
policy:
  scratch: {a: 1, b: {c: 2}}
  alias: ${policy.scratch}
  needed: given
loss_fn:
  name: gspo
  is_correction_level: sequence
  masks:
    - {preset: geometric, min: 0.99, max: 1.01}
    - {preset: veto, max: 5.0}
"""

MASKS = "[{preset:geometric,min:0.9,max:1.1}]"

ACCEPTED = [
    [],
    # Values.
    ["grpo.seed=7"],
    ["loss_fn.ratio_clip_min=1e-3", "loss_fn.ratio_clip_max=.5", "loss_fn.reference_policy_kl_penalty=-1E+2"],
    ["loss_fn.ratio_clip_c=inf"],
    ["loss_fn.ratio_clip_min=1_0"],
    ["loss_fn.is_correction_level="],
    ["loss_fn.is_correction_level=''"],
    ["loss_fn.is_correction_level=null"],
    ["loss_fn.name='a, b'"],
    ['loss_fn.name="it\'s: {so}"'],
    ["loss_fn.name=my.module:LOSS"],
    ["loss_fn.name=two words"],
    ["loss_fn.name=007", "policy.model_name=/models/Qwen-3@main", "policy.needed='3'"],
    ["loss_fn.token_level_loss=TRUE", "loss_fn.name=yes", "policy.needed=off"],
    ["loss_fn.name=int('3')", "policy.needed=str(3)"],
    ["loss_fn.name=glob(a*)"],
    # Lists and mappings.
    [f"loss_fn.masks={MASKS}"],
    ["loss_fn.masks=[{preset: geometric, min: 0.9}, {preset: 'opsm', delta: 1e-1}]"],
    ["loss_fn.masks=[]"],
    ["loss_fn.masks=null"],
    ["loss_fn.masks.0.min=0.98"],
    ["loss_fn.masks.1={max: 6.0}"],
    ["policy.scratch={a: 3}"],
    ["policy.scratch={b: {c: 3}}", "policy.scratch.b={}"],
    ["policy.scratch=3"],
    ["policy.scratch=null", "policy.scratch={z: 1}"],
    ["policy.alias={z: 1}"],
    ["loss_fn=null"],
    # Adding.
    ["++loss_fn.nonfinite=raise"],
    ["+loss_fn.nonfinite=raise"],
    ["++loss_fn.name=sapo"],
    ["+loss_fn.masks=[]"],
    ["+policy.scratch={d: 4}"],
    ["++policy.scratch={b: {d: 4}}"],
    ["+loss_fn.ratio_clip_c=3.0"],
    ["++new.section.key=[1,[2,{a:b}]]", "new.section.key=x"],
    ["++loss_fn.name.x=1"],
    ["++policy.alias.a=5"],
    ["+hydra.x=1"],
    # References.
    ["loss_fn.ratio_clip_min=${loss_fn.ratio_clip_max}", "loss_fn.ratio_clip_max=0.3"],
    ["++loss_fn.masks=[{preset:veto,max:${policy.scratch.a}}]"],
    ["loss_fn.ratio_clip_min='${mul:${policy.scratch.a},4}'"],
    ["loss_fn.name=${oc.env:NEMO_RL_ROOT}"],
    ["++new=${policy.scratch}"],
    # Deleting.
    ["~loss_fn.name"],
    ["~loss_fn.masks"],
    ["~loss_fn.name=gspo"],
    ["~loss_fn"],
    ["~policy.alias.a"],
    ["~policy.alias"],
    ["~loss_fn.masks", f"+loss_fn.masks={MASKS}"],
    ["~loss_fn.masks.0.min"],
]

REFUSED = [
    ["loss_fn.nonfinite=raise"],
    ["policy.train_micro_batch_siz=4"],
    ["policy.scratch={d: 4}"],
    ["policy.alias.a=5"],
    ["loss_fn.name.x=1"],
    ["defaults=x.yaml"],
    ["+loss_fn.name=gspo"],
    ["loss_fn.masks[0].min=0.98"],
    ["loss_fn.masks.7.min=0.98"],
    ["loss_fn.masks.x=1"],
    ["++loss_fn.masks.2={preset: veto}"],
    ["~loss_fn.masks.0"],
    ["~loss_fn.nam"],
    ["~loss_fn.name=sapo"],
    ["~loss_fn.ratio_clip_c"],
    ["~loss_fn.name", "loss_fn.name=sapo"],
    ["loss_fn.masks={a: 1}"],
    ["policy.scratch=[1]"],
    ["loss_fn.name=a,b"],
    ["loss_fn.name=choice(a,b)"],
    ["loss_fn/name=a"],
    ["loss_fn@x=a"],
    ["loss_fn.name"],
    ["loss_fn..name=1"],
    ["=1"],
    ["loss_fn.masks=[1"],
    ["loss_fn.name=int('x')"],
    ["loss_fn.name = a b "],
    ["--loss_fn.name=a"],
    ["loss_fn.name=${nowhere}"],
    ["loss_fn.name=${"],
    ["++loss_fn.masks=[{preset:veto,max:${mul:${policy.scratch.a},4}}]"],
    ["policy.needed=~"],
]


@pytest.fixture
def child(tmp_path, monkeypatch):
    config = pytest.importorskip("nemo_rl.utils.config", reason="NeMo-RL is not importable", exc_type=ImportError)
    root = nemo_rl_root()
    if root is None:
        pytest.skip("NeMo-RL is installed without its examples")
    monkeypatch.setenv("NEMO_RL_ROOT", str(root))
    config.register_omegaconf_resolvers()
    path = tmp_path / "child.yaml"
    path.write_text(CHILD, encoding="utf-8")

    def theirs(overrides):
        from omegaconf import OmegaConf

        loaded = config.load_config(path)
        if overrides:
            loaded = config.parse_hydra_overrides(loaded, list(overrides))
        return OmegaConf.to_container(loaded, resolve=True)

    return path, theirs


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_accepted_as_by_nemo_rl(overrides, child):
    path, theirs = child
    assert load_recipe(path, overrides) == theirs(overrides)


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_refused_as_by_nemo_rl(overrides, child):
    path, theirs = child
    with pytest.raises(Exception):  # noqa: B017, PT011 - theirs: OverridesError, or omegaconf's on a reference
        theirs(overrides)
    with pytest.raises(ConfigError):
        load_recipe(path, overrides)


def test_a_key_that_vllm_has_is_not_taken_for_that_of_another_engine(recipe):
    other = "++policy.generation.mcore_generation_config.enable_prefix_caching=true"
    with pytest.raises(ConfigError) as caught:
        recipe(other, "policy.generation.vllm_cfg.enable_prefix_caching=false")
    assert "did you mean" not in str(caught.value)
    assert "++policy.generation.vllm_cfg.enable_prefix_caching=false" in str(caught.value)


@pytest.mark.slow
def test_overrides_that_take_too_many_copies_are_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"k{i}: 1\n" for i in range(9000)), encoding="utf-8")
    overrides = [f"++k{i}=2" for i in range(30)]
    with pytest.raises(InputLimitError, match=r"^override '\+\+k5=2': merging .* over the limit merged_settings"):
        read_recipe(path, overrides)
