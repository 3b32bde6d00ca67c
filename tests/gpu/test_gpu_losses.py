"""Every variant on a GPU, from logits to their gradient and on padded rows, against the float64 oracle."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the losses' settings need pydantic, which is not installed")

from nemo_geomask import build_loss
from nemo_geomask.hosts.nemo_rl.packed_microbatch import loss_at_once
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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_row_of_given_rows_waits_for_nothing(name):
    batch = batches.rollouts(seed=5)
    loss_fn = build_loss(CONFIGS[name])
    answer = answer_to(loss_fn, batch)
    curr = batch.curr.to(DEVICE).requires_grad_()
    data = {key: value.to(DEVICE) for key, value in batch.data.items()}
    seqs, toks = (torch.tensor(float(count), device=DEVICE) for count in (batch.seqs, batch.toks))
    rows, width = batch.data["token_mask"].shape
    given = types.SimpleNamespace(
        loss_fn=loss_fn,
        prepare_fn=lambda logits, data, **_: ({"next_token_logprobs": logits}, data),
        cu_seqlens_q=torch.arange(0, (rows + 1) * width, width, device=DEVICE),
        cu_seqlens_q_padded=None,
        vocab_parallel_rank=0,
        vocab_parallel_group=None,
        context_parallel_group=None,
    )
    loss_at_once(given, curr, data, seqs, toks)  # the first call may wait for memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, metrics = loss_at_once(given, curr, data, seqs, toks)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_loss(loss, metrics, answer)
    np.testing.assert_allclose(curr.grad.cpu().numpy(), np.array(answer.grad), rtol=1e-4, atol=1e-6)
