"""What has to be settled before any test module is imported."""

import os

import pytest
import torch

# Their asserts say what they compared, as those of test modules do.
pytest.register_assert_rewrite("tests.helpers")

# Triton asks when it is imported; the processes that tests start inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
