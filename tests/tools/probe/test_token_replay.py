"""The logits processor's bookkeeping: which token belongs to which row, as requests enter, move and leave."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch")

from nemo_geomask.hosts.nemo_rl import patch  # noqa: E402
from nemo_geomask.tools.probe.engine_scores import REPLAY  # noqa: E402
from nemo_geomask.tools.probe.token_replay import TokenReplay  # noqa: E402


@pytest.fixture
def processor():
    yield TokenReplay(None, None, False)
    patch.undo_all()


def update(removed=(), added=(), moved=()):
    return SimpleNamespace(removed=removed, added=added, moved=moved)


def added(row, tokens, decoded):
    return row, SimpleNamespace(extra_args=None if tokens is None else {REPLAY: tokens}), None, decoded


def test_each_row_gets_its_next_token(processor):
    first, second = [], []
    processor.update_state(update(added=[added(0, [5, 6], first), added(1, None, []), added(2, [7], second)]))
    assert processor.given_tokens(3) == {0: 5, 2: 7}
    first.append(5)
    second.append(7)
    processor.update_state(None)
    assert processor.given_tokens(3) == {0: 6}


def test_requests_that_move_leave_or_are_replaced_are_followed(processor):
    processor.update_state(update(added=[added(row, [10 + row], []) for row in range(4)]))
    swap, one_way = SimpleNamespace(name="SWAP"), SimpleNamespace(name="UNIDIRECTIONAL")
    processor.update_state(update(moved=[(0, 1, swap)]))
    assert processor.given_tokens(4) == {0: 11, 1: 10, 2: 12, 3: 13}
    processor.update_state(update(removed=[2], moved=[(3, 2, one_way)]))
    assert processor.given_tokens(4) == {0: 11, 1: 10, 2: 13}
    processor.update_state(update(added=[added(0, None, [])]))
    assert processor.given_tokens(4) == {1: 10, 2: 13}
    assert processor.given_tokens(2) == {1: 10}


def test_the_sampled_tokens_are_exchanged_and_the_logprobs_are_not(processor):
    from vllm.v1.sample.sampler import Sampler

    logits = torch.zeros(2, 8)
    metadata = SimpleNamespace(
        all_greedy=True,
        all_random=False,
        max_num_logprobs=0,
        logprob_token_ids=None,
        logitsprocs=SimpleNamespace(argmax_invariant=[processor]),
    )
    processor.update_state(update(added=[added(1, [6], [])]))
    sampled, logprobs = Sampler(logprobs_mode="processed_logprobs").sample(logits, metadata)
    assert sampled.tolist() == [0, 6]
    assert torch.equal(logprobs, logits.log_softmax(-1))
