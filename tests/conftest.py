"""What has to be settled before any test module is imported."""

import multiprocessing
import os

import pytest
import torch
from hypothesis import settings

# Their asserts say what they compared, as those of test modules do.
pytest.register_assert_rewrite("tests.helpers")

# Triton asks when it is imported; the processes that tests start inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Ranks and the lab's processes are forked from one process that has imported these, so that none imports them again.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "nemo_geomask.losses",
        "nemo_geomask.parallel",
        "nemo_geomask.tools.lab.trainer",
        # The lab's policy, whose first model imports these.
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)


@pytest.hookimpl(optionalhook=True)  # the tests of the vLLM environment run without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """Start one worker more than there are cores, since many tests wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


# As many examples as a look at each setting is worth; `make quick` asks for its own.
for name, examples in (("whole", 12), ("quick", 4)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True)
settings.load_profile("whole")


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
