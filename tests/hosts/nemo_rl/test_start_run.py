"""NeMo-RL's start, run over a made source: what it refuses, on which settings that depends, and what stays unknown."""

import textwrap

import pytest

from nemo_geomask.hosts.nemo_rl.start_run import start_refusals

SCRIPT = """
from nemo_rl.algorithms.grpo import MasterConfig, setup
from nemo_rl.utils.config import load_config

def main():
    config = load_config("recipe.yaml")
    config = MasterConfig(**config)
    setup(config, tokenizer=object())
"""
FORMER_SCRIPT = """
from nemo_rl.algorithms.grpo import check_batch
from nemo_rl.utils.config import load_config, parse_hydra_overrides

def main():
    args, overrides = parse_args()
    config = load_config(args.config)
    if overrides:
        config = parse_hydra_overrides(config, overrides)
    config = OmegaConf.to_container(config, resolve=True)
    assert config["policy"]["batch"] % 3 == 0, "not a third"
"""  # v0.6.0's, which validates no class
MODULE = """
import os
from typing import Annotated, Literal, NotRequired, TypedDict, Union, get_args

from nemo_rl.distributed.workers import RayWorkerBuilder, Cluster, Strict
from nemo_rl.utils.logger import Logger
from pydantic import BaseModel, Field, model_validator
from somewhere_else import probe


Kinds = Literal["good", "fine"]


class Shaping(BaseModel):
    enabled: bool = False
    limit: int = 8


class Fifo(BaseModel):
    name: Literal["fifo"]
    depth: int = 1


class Windowed(BaseModel):
    name: Literal["windowed"]
    window: int

    @model_validator(mode="after")
    def check(self):
        if self.window > 4:
            raise ValueError(f"window {self.window} is too wide")
        return self


class Item(BaseModel):
    size: int = 3

    def doubled(self):
        return self.size * 2


class GRPOConfig(BaseModel):
    items: list[Item]
    steps: int = 10
    prompts: int
    shaping: Shaping = Field(default_factory=Shaping)
    sampler: Annotated[Union[Fifo, Windowed], Field(discriminator="name")] = None


class PolicyConfig(TypedDict):
    batch: int
    backend: NotRequired[dict]


class MasterConfig(BaseModel):
    grpo: GRPOConfig
    policy: PolicyConfig


def needs_gym(config):
    gym = bool(config.policy.get("gym"))
    if not gym:
        return False
    return True


class Loss:
    scale = 2

    def __init__(self, config, extra=None):
        self.kind = config["kind"]
        self.extra = extra
        assert self.kind != "bad", f"kind {self.kind} times {self.scale}"

    @property
    def doubled(self):
        return self.kind * 2


class Special(Loss):
    def __init__(self, config):
        super().__init__({**config, "kind": "bad" if config["batch"] > 4 else "good"})


def setup(config, tokenizer):
    grpo, policy = config.grpo, config.policy
"""
WORKERS = """
class RayWorkerBuilder:
    pass


class Cluster:
    def __init__(self, counts):
        self._counts = counts

    def world_size(self):
        return sum(self._counts)


class Worker:
    def __init__(self, config, rank=None):
        self.config = config
        if rank is not None:
            return
        assert config["batch"] > 2, "only where a rank is missing"


class Strict:
    def __init__(self, config):
        assert config["batch"] % 2 == 0, "batch must be even"
"""
RECIPE = {
    "grpo": {"prompts": 4, "items": [{"size": 2}, {}]},
    "policy": {"batch": 8, "kind": "good", "gym": False, "list": [1, 2]},
}


@pytest.fixture
def refusals(tmp_path):
    """Refusals of a start whose ``setup`` has a body, as (keys, message, line in the body), in a changed recipe."""

    def run(body, **changes):
        sources = {
            "examples/run_grpo.py": SCRIPT,
            "nemo_rl/algorithms/grpo.py": MODULE + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n",
            "nemo_rl/distributed/workers.py": WORKERS,
        }
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in sources.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        data = {section: {**values, **changes.get(section, {})} for section, values in RECIPE.items()}
        start = MODULE.count("\n")
        return [
            (sorted(each.keys), each.message, int(each.place.rpartition(":")[2]) - start)
            for each in start_refusals(root, data, "grpo")
        ]

    return run


REFUSED = [
    ("assert policy['batch'] % 3 == 0, 'three'", ["policy.batch"], "three"),
    ("assert policy['batch'] % 3 == 0", ["policy.batch"], "policy['batch'] % 3 == 0"),
    (
        "assert grpo.prompts * 3 == policy['batch'], f'{grpo.prompts} x {tokenizer}'",
        ["grpo.prompts", "policy.batch"],
        "4 x …",
    ),
    (
        "if policy.get('kind', 'none') in ('good', 'fine'):\n    raise ValueError('no ' + policy['kind'])",
        ["policy.kind"],
        "no good",
    ),
    ("if policy.get('missing', 3) > 2:\n    raise ValueError('many')", ["policy.missing"], "many"),
    # Of a conjunction, what is false decides; what is unknown beside it does not matter.
    ("assert probe() and policy['batch'] > 9, 'small'", ["policy.batch"], "small"),
    ("assert not (probe() or policy['batch'] < 9), 'small'", ["policy.batch"], "small"),
    ("assert 1 < grpo.prompts < 3, 'range'", ["grpo.prompts"], "range"),
    # Defaults of a model, of a model in it, and of what the recipe lacks.
    ("assert grpo.steps > 20, 'short'", ["grpo.steps"], "short"),
    ("assert grpo.shaping.limit > 9, 'limit'", ["grpo.shaping.limit"], "limit"),
    ("assert getattr(grpo, 'steps', 99) > 20, 'short'", ["grpo.steps"], "short"),
    # Through functions, objects, names, lists and changes of the recipe.
    ("assert needs_gym(config), 'gym'", ["policy.gym"], "gym"),
    ("Loss({**policy, 'kind': 'bad' if policy['batch'] > 4 else 'good'})", ["policy.batch"], "kind bad times 2"),
    ("assert Loss(policy).doubled != 'goodgood', 'doubled'", ["policy.kind"], "doubled"),
    ("size = policy['batch']\nsize //= 3\nassert size == 3, str(size)", ["policy.batch"], "2"),
    ("policy['batch'] = grpo.prompts\nassert policy['batch'] == 8, 'changed'", ["grpo.prompts"], "changed"),
    ("for each in policy['list']:\n    assert each < 2, f'item {each}'", ["policy.list"], "item 2"),
    ("assert all(each < 2 for each in policy['list'] if each), 'all'", ["policy.list"], "all"),
    (
        "many = []\nfor each in policy['list']:\n    many.append(each)\nassert len(many) == 3, 'many'",
        ["policy.list"],
        "many",
    ),
    (
        "assert sum(each.doubled() for each in grpo.items) == 9, 'sum'",
        ["grpo.items[0].size", "grpo.items[1].size"],
        "sum",
    ),
    (
        "pair = [Loss(policy), Loss(policy)]\n"
        "for i, (_, b) in enumerate(zip(pair, policy['list'])):\n    assert b < 2, str(i)",
        ["policy.list"],
        "1",
    ),
    ("a, b = policy['list']\nassert a == b, 'pair'", ["policy.list"], "pair"),
    ("assert Cluster([2] * policy['batch']).world_size() % 3 == 0, 'world'", ["policy.batch"], "world"),
    (
        "RayWorkerBuilder('nemo_rl.distributed.workers.Strict', {**policy, 'batch': policy['batch'] + 1})",
        ["policy.batch"],
        "batch must be even",
    ),
    (
        "Strict.options(name='x').remote({**policy, 'batch': policy['batch'] + 1})",
        ["policy.batch"],
        "batch must be even",
    ),
    ("assert policy['kind'] not in frozenset(get_args(Kinds)), 'word'", ["policy.kind"], "word"),
    ("Special(policy)", ["policy.batch"], "kind bad times 2"),
    ("assert os.getenv('X', '0') == policy['kind'], 'default'", ["policy.kind"], "default"),
    ("assert not bool(policy['gym']) and bool(policy['list']) is False, 'truth'", ["policy.list"], "truth"),
    ("assert not dict(policy)['batch'], 'copy'", ["policy.batch"], "copy"),
    # A constant follows from the tests around its assignment.
    (
        "big = False\nif policy['batch'] > 4:\n    big = True\nif big:\n    raise ValueError('big')",
        ["policy.batch"],
        "big",
    ),
    (
        "if policy['kind'] == 'a':\n    pass\nelif policy['kind'] == 'b':\n    pass\nelse:\n    raise OSError('kind')",
        ["policy.kind"],
        "kind",
    ),
    (
        "os.environ['X'] = '1'\nif policy['batch'] == 8 and os.environ.get('X') == '1':\n    raise ValueError('x')",
        ["policy.batch"],
        "x",
    ),
    ("with open('x'):\n    assert policy['batch'] == 9, 'inside'", ["policy.batch"], "inside"),
    (
        "try:\n    assert policy['batch'] == 9, 'passed on'\nexcept OSError:\n    raise",
        ["policy.batch"],
        "passed on",
    ),
    # The first turn of a trainer's loop has data.
    ("while probe():\n    assert policy['batch'] == 9, 'turn'", ["policy.batch"], "turn"),
]


@pytest.mark.parametrize(("body", "keys", "message"), REFUSED)
def test_what_the_source_is_certain_to_refuse_is_found(body, keys, message, refusals):
    ((found, words, _),) = refusals(body)
    assert (found, words) == (keys, message)


@pytest.mark.parametrize(
    "body",
    [
        "assert policy['batch'] == 8",
        "assert probe(), 'unknown'",
        "assert probe(policy['batch']), 'unknown'",
        "if probe():\n    assert policy['batch'] == 9, 'not certain to run'",
        "if probe():\n    return\nassert policy['batch'] == 9, 'may have returned'",
        "for each in probe():\n    if each:\n        break\n    assert policy['batch'] == 9, 'may have left'",
        "def inner():\n    if probe():\n        raise ValueError\n    return 1\nassert inner() == probe()",
        "try:\n    assert policy['batch'] == 9, 'caught'\nexcept AssertionError:\n    pass",
        "size = policy['batch']\nif probe():\n    size = 9\nassert size == 9, 'may have changed'",
        "if probe():\n    policy['batch'] = 9\nassert policy['batch'] == 9, 'may have changed'",
        "policy[probe()] = 9\nassert policy['batch'] == 9, 'any key may have changed'",
        "sizes = []\nfor each in probe():\n    sizes.append(each)\nassert len(sizes) > 0, 'may have items'",
        "thing = probe()\nthing.size = policy['batch']\nprobe(thing)\nassert thing.size == 9, 'may have been changed'",
        "assert 1 == 2, 'depends on no setting, so that it is of this run alone'",
        "raise NotImplementedError",
        "RayWorkerBuilder('nemo_rl.distributed.workers.Worker', policy)",
        "assert policy['batch'] ** 2 == 65",
        "rows = policy['list']\nrows.pop()\nassert len(rows) == 1, 'one is gone'",
        "rows = policy['list']\nrows[0] = 9\nassert rows[0] == 9, 'was replaced'",
        "rows = policy['list']\nsame = rows\nsame.append(3)\nassert len(rows) == 3, 'under both names'",
        "if probe():\n    del policy['batch']\nassert policy.get('batch') == 9, 'may be gone'",
        "while policy['batch'] > 9:\n    assert policy['batch'] == 9, 'never runs'",
        "assert ([0] * policy['batch'] * 100_000)[0] == 1, 'too long to make'",
        "assert os.environ['SET_ELSEWHERE'] == str(policy['batch'])",
    ],
)
def test_what_is_not_certain_is_no_refusal(body, refusals):
    assert refusals(body) == []


def test_one_run_finds_several_refusals(refusals):
    body = """
    assert policy["batch"] == 9, "first"
    if policy["batch"] > 4:
        if grpo.prompts == 4:
            raise ValueError("second")
    assert grpo.prompts == 5, "third"
    """
    assert refusals(body) == [
        (["policy.batch"], "first", 1),
        (["grpo.prompts"], "second", 4),
        (["grpo.prompts"], "third", 5),
    ]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ({"name": "windowed", "window": 5}, [(["grpo.sampler.window"], "window 5 is too wide")]),
        ({"name": "windowed", "window": 4}, []),
        ({"name": "fifo", "window": 5}, []),
    ],
)
def test_the_validators_of_the_recipes_classes_run(sampler, expected, refusals):
    assert [each[:2] for each in refusals("pass", grpo={"sampler": sampler})] == expected


def test_a_source_that_never_ends_is_left(refusals):
    endless = "def again(n):\n    return again(n + 1)\nagain(0)\nassert policy['batch'] == 9, 'after'"
    assert [each[1] for each in refusals(endless)] == ["after"]
    assert refusals("for a in range(200):\n    for b in range(200):\n        c = a + b") == []


def test_a_script_without_classes_is_run_with_the_recipes_settings(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/run_grpo.py").write_text(FORMER_SCRIPT)
    (refusal,) = start_refusals(tmp_path, RECIPE, "grpo")
    assert (refusal.keys, refusal.message) == ({"policy.batch"}, "not a third")


def test_of_source_that_is_nested_too_deeply_what_was_found_stays(refusals):
    sum_of_ones = " + ".join(["1"] * 1500)
    assert [each[1] for each in refusals(f"assert policy['batch'] == 9, 'found'\nsize = {sum_of_ones}")] == ["found"]


def test_no_start_script_is_no_refusal(tmp_path):
    assert start_refusals(tmp_path, RECIPE, "grpo") == ()
