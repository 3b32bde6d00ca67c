"""What has to be settled before any test module is imported."""

import multiprocessing
import os

import pytest
from hypothesis import settings

# Their asserts say what they compared, as those of test modules do.
pytest.register_assert_rewrite("tests.helpers")

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


def pytest_collection(session):
    """Let Triton, which asks when it is imported, interpret its kernels where there is no GPU."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        import torch  # takes seconds, and the process that hands out the tests needs none of it

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True)  # the tests of the vLLM environment run without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """Start a worker a core; and one more for the slow tests, many of which wait for processes of their own."""
    return (os.cpu_count() or 1) + ("not slow" not in config.option.markexpr)


# As many examples as a look at each setting is worth; `make quick` asks for its own.
for name, examples in (("whole", 12), ("quick", 4)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True)
settings.load_profile("whole")


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype until the test ends."""
    import torch

    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
