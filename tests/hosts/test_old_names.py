"""Module and error names that documentation of earlier versions used."""

import importlib
import subprocess
import sys

import pytest

import nemo_geomask

OLD = {
    "logprobs": ("nemo_geomask.hosts.logprob_libraries", "logprob_backend"),
    "megatron": ("nemo_geomask.hosts.megatron", "policy_loss"),
    "nemo_rl": ("nemo_geomask.hosts.nemo_rl", "prepare_worker"),
    "vllm": ("nemo_geomask.hosts.vllm", "rollout_batch"),
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_module_warns_and_has_the_new_ones_names(old):
    new, name = OLD[old]
    module = importlib.import_module(f"nemo_geomask.integrations.{old}")
    with pytest.warns(DeprecationWarning, match=f"nemo_geomask.integrations.{old} is now called {new}"):
        attribute = getattr(module, name)
    assert attribute is getattr(importlib.import_module(new), name)
    with pytest.warns(DeprecationWarning, match=new), pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such


def test_from_import_warns_at_the_caller():
    code = "from nemo_geomask.integrations.vllm import rollout_batch, load_weights"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code], capture_output=True, text=True
    )
    assert "integrations.vllm is now called nemo_geomask.hosts.vllm" in done.stderr


def test_an_old_error_is_the_new_one():
    for module in (nemo_geomask, importlib.import_module("nemo_geomask.hosts.nemo_rl")):
        with pytest.warns(DeprecationWarning, match=f"{module.__name__}.SeamError is now called .*HostAPIError"):
            error = module.SeamError
        assert error is module.HostAPIError is nemo_geomask.HostAPIError
    assert "SeamError" not in nemo_geomask.__all__
