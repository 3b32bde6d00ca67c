"""NeMo-RL's rows as packed tokens."""

import pytest
import torch

from nemo_geomask.errors import DataError, ShapeError
from nemo_geomask.losses.packing import IGNORE, check_rows, pack_rows, predicted_tokens
from nemo_geomask.segments import PackedSegments

ROWS, WIDTH = 3, 6
DATA = {
    "input_ids": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH),
    "advantages": 100 + torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH),
    "token_mask": torch.ones(ROWS, WIDTH),
    "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
    "input_lengths": torch.tensor([4, 2, 6]),
    "idx": ["not", "a", "tensor"],
}


def test_predicted_tokens_are_those_after_the_first_of_each_sequence():
    # The last length counts padding beyond the row's width, and one sequence has nothing to predict.
    packed, segments, place = predicted_tokens(DATA, [4, 1, 9], torch.device("cpu"))
    expected = [(0, 1), (0, 2), (0, 3), *((2, column) for column in range(1, 6))]
    assert packed["advantages"].tolist() == [float(DATA["advantages"][at]) for at in expected]
    assert segments.cu_seqlens.tolist() == [0, 3, 3, 8]
    assert place.tolist() == [row * WIDTH + column for row, column in expected]
    assert packed["sample_mask"] is DATA["sample_mask"]
    assert set(packed) == {"advantages", "token_mask", "sample_mask", "input_lengths"}


def test_no_rows_are_no_tokens():
    none = {key: value[:0] for key, value in DATA.items() if isinstance(value, torch.Tensor)}
    packed, segments, place = predicted_tokens(none, [], torch.device("cpu"))
    assert packed["advantages"].shape == place.shape == (0,)
    assert segments.count == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_packed_row_holds_for_each_position_the_token_that_it_predicts(dtype):
    starts = torch.tensor([0, 6, 10])
    segments = PackedSegments([0, 6, 10, 16])
    packed = pack_rows(
        {**DATA, "input_ids": DATA["input_ids"].to(dtype)}, segments, starts=starts, lengths=torch.tensor([4, 2, 6])
    )
    ids, mask = [IGNORE] * 16, [0.0] * 16
    for row, (start, length) in enumerate(zip(starts.tolist(), (4, 2, 6), strict=True)):
        for position in range(length - 1):
            mask[start + position] = 1.0
            if row != 1:
                ids[start + position] = int(DATA["input_ids"][row, position + 1])
    assert packed["targets"].dtype == torch.int64
    assert packed["targets"].tolist() == ids
    assert packed["token_mask"].tolist() == mask


@pytest.mark.parametrize("call", ["pack_rows", "predicted_tokens"])
def test_packing_calls_that_do_not_fit_are_refused(call):
    def pack(data):
        if call == "predicted_tokens":
            return predicted_tokens(data, [4, 2, 6], torch.device("cpu"))
        starts, lengths = torch.tensor([0, 4, 6]), torch.tensor([4, 2, 6])
        return pack_rows(data, PackedSegments([0, 4, 6, 12]), starts=starts, lengths=lengths)

    with pytest.raises(DataError, match=r"data\['sample_mask'\] is missing"):
        pack({key: value for key, value in DATA.items() if key != "sample_mask"})
    with pytest.raises(ShapeError, match=r"data\['advantages'\] must be \[3, 6\] .* but it is \[3, 5\]"):
        pack({**DATA, "advantages": DATA["advantages"][:, 1:]})
    with pytest.raises(ShapeError, match="has 2 rows, but 3 sequences are packed"):
        pack({**DATA, "token_mask": DATA["token_mask"][:2], "input_ids": DATA["input_ids"][:2]})


def rows(**changes):
    """Two rows of four tokens, all trained; ``changes`` are values by name of the tensor and place."""
    data = {
        "input_ids": torch.arange(8).reshape(2, 4),
        "token_mask": torch.ones(2, 4),
        "sample_mask": torch.ones(2),
    }
    for name, at in changes.items():
        for place, value in at.items():
            data[name][place] = value
    return data


def test_trained_tokens_within_their_sequences_and_the_vocabulary_pass():
    whole = torch.tensor([4, 4])
    check_rows(rows(), lengths=whole, vocab_size=8)
    # Nothing predicts the first token, and no other of these is trained.
    check_rows(rows(input_ids={(0, 0): 99, (1, 0): -1}), lengths=whole, vocab_size=8)
    check_rows(rows(input_ids={(1, 2): 99}, token_mask={(1, 2): 0.0}), lengths=whole, vocab_size=8)
    check_rows(rows(sample_mask={1: 0.0}), lengths=torch.tensor([4, 2]), vocab_size=4)
    check_rows(rows(token_mask={(0, 3): 0.0}), lengths=torch.tensor([3, 4]), vocab_size=8)


@pytest.mark.parametrize(
    ("changes", "lengths", "message"),
    [
        ({"input_ids": {(0, 2): -1}}, [4, 4], "holds 1 trained tokens outside the vocabulary of 8, the first is -1"),
        ({"input_ids": {(0, 2): 9, (1, 3): 8}}, [4, 4], "holds 2 trained tokens .* of 8, the first is 9"),
        ({}, [4, 3], r"trains 1 tokens behind the end .* gives as \[4, 3\]"),
        ({}, [2, 4], r"trains 2 tokens behind the end .* gives as \[2, 4\]"),
        # The end of a sequence comes first: what lies behind it need not be a token.
        ({"input_ids": {(0, 3): 9}}, [3, 4], "trains 1 tokens behind the end"),
    ],
)
def test_trained_tokens_elsewhere_are_named(changes, lengths, message):
    with pytest.raises(DataError, match=message):
        check_rows(rows(**changes), lengths=torch.tensor(lengths), vocab_size=8)
