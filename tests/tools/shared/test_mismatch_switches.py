"""The table of switches: well-formed, and its keys are read by the NeMo-RL and the vLLM that are here."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from nemo_geomask.tools.shared.mismatch_switches import VERSIONS, mismatch_switches

SWITCHES = mismatch_switches()
ENGINE_ARGUMENTS = "policy.generation.vllm_kwargs."  # NeMo-RL hands these to vLLM
CHECKOUTS = {version: Path(os.environ.get("NEMO_RL_CHECKOUTS", "/tmp/host"), f"RL-{version}") for version in VERSIONS}


def test_ids_and_keys_are_unique():
    assert len({switch.id for switch in SWITCHES}) == len(SWITCHES)
    assert len({switch.key for switch in SWITCHES}) == len(SWITCHES)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.id)
def test_fields_have_known_values(switch):
    assert switch.side in ("engine", "trainer", "both")
    assert switch.cost in ("request", "engine", "trainer", "layout")
    assert switch.since in VERSIONS
    assert (switch.cost == "request") == bool(switch.field)
    assert switch.cost in ("request", "layout") or switch.side in (switch.cost, "both")


def test_a_value_brings_those_that_the_recipe_lacks_beside_it():
    by_id = {switch.id: switch for switch in SWITCHES}
    chunks = "policy.logprob_chunk_size"
    deferred = by_id["logits_dtype"]
    assert deferred.settings({deferred.key: True}) == {deferred.key: False}
    assert deferred.settings({deferred.key: True, chunks: 1024}) == {deferred.key: False, chunks: None}
    dispatcher = "policy.megatron_cfg.moe_token_dispatcher_type"
    experts = by_id["megatron_ep"]
    assert experts.settings({dispatcher: "alltoall"}) == {experts.key: 1}
    assert experts.settings({dispatcher: "flex"}) == {experts.key: 1, dispatcher: "alltoall"}


def test_switches_of_a_group_are_of_one_side():
    sides = {}
    for switch in SWITCHES:
        if switch.cost != "request":
            sides.setdefault(switch.group, set()).add(switch.side)
    assert all(len(group) == 1 for group in sides.values())


def words_of(checkout):
    """Words in the Python code of NeMo-RL's policies and engines, and in its base recipes."""
    files = [*(checkout / "nemo_rl").rglob("*.py"), *(checkout / "examples" / "configs").glob("*.yaml")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_nemo_rl_has_the_keys_of_its_version(version):
    checkout = CHECKOUTS[version]
    if not checkout.is_dir():
        pytest.skip(f"no checkout of NeMo-RL {version}: set NEMO_RL_CHECKOUTS to the folder of RL-v0.6.0, RL-v0.7.0, …")
    words = words_of(checkout)
    for switch in SWITCHES:
        outer = "vllm_kwargs" if switch.key.startswith(ENGINE_ARGUMENTS) else ""
        outer = "env_vars" if ".env_vars." in switch.key else outer
        names = {outer} if outer else set(switch.key.split("."))
        if VERSIONS.index(version) >= VERSIONS.index(switch.since):
            names |= {part for key in switch.also for part in key.split(".")}
            assert names <= words, f"{switch.id}: {names - words}"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_has_the_engine_arguments():
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    arguments = (folder / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    for switch in SWITCHES:
        if switch.key.startswith(ENGINE_ARGUMENTS):
            name = switch.key.removeprefix(ENGINE_ARGUMENTS).split(".")[0]
            assert re.search(rf"^    {name}: ", arguments, re.MULTILINE), switch.id
