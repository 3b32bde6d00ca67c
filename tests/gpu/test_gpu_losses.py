"""Every variant on a GPU, from logits to their gradient and on padded rows, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the losses' settings need pydantic, which is not installed")

from nemo_geomask import build_loss
from tests.helpers import batches
from tests.helpers.from_logits import CONFIGS, answer_to, check_from_logits, check_loss

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("name", CONFIGS)
def test_from_logits_equals_oracle(name):
    check_from_logits(name, device=DEVICE)


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_equals_oracle(name):
    batch = batches.rollouts(seed=5)
    loss_fn = build_loss(CONFIGS[name])
    answer = answer_to(loss_fn, batch)
    data = {key: value.to(DEVICE) for key, value in batch.data.items()}
    found = batches.evaluate(loss_fn, replace(batch, curr=batch.curr.to(DEVICE), data=data))
    check_loss(found.loss, found.metrics, answer)
    np.testing.assert_allclose(found.grad.cpu().numpy(), np.array(answer.grad), rtol=1e-4, atol=1e-6)
