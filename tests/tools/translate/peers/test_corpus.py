"""What translate answers for every example configuration of the peers, against the recorded answers."""

from __future__ import annotations

import json

import pytest

from nemo_geomask.losses.build import build_with_warnings
from tests.tools.translate.peers.compare import DATA, compare_case, index
from tests.tools.translate.peers.corpus import ANSWERS, EXAMPLES, answers, checkout_of, sample
from tests.tools.translate.peers.record import commit_of

RECORDED = json.loads(ANSWERS.read_text(encoding="utf-8"))
FILES = [(peer, name) for peer, entry in RECORDED.items() for name in entry["files"]]
SAMPLE = [
    (file.stem, case)
    for file in sorted((DATA / "corpus").glob("*.npz"))
    for case in index(file.stem, "corpus")["cases"]
]


def test_corpus_covers_all_peers():
    assert set(RECORDED) == set(EXAMPLES)
    assert len(FILES) > 700


@pytest.mark.parametrize("peer", EXAMPLES)
def test_every_expressed_file_was_compared(peer):
    compared = {case for of_peer, case in SAMPLE if of_peer == peer}
    assert set(sample(RECORDED[peer]["files"], peer)) == compared


@pytest.mark.parametrize("peer", EXAMPLES)
def test_no_file_is_taken_for_one_of_another_peer(peer):
    others = {entry["peer"] for entry in RECORDED[peer]["files"].values() if entry["status"] == 0} - {peer}
    assert others == set()


@pytest.mark.parametrize("peer", EXAMPLES)
def test_every_answer_is_a_valid_block_or_says_why_not(peer):
    for name, entry in RECORDED[peer]["files"].items():
        if entry["status"] == 2:
            assert entry["error"], name
        else:
            build_with_warnings(entry["loss_fn"])
            assert bool(entry["not_expressed"]) == (entry["status"] == 1), name


@pytest.mark.parametrize(("peer", "case"), SAMPLE, ids=[f"{peer}: {case}" for peer, case in SAMPLE])
def test_an_expressed_file_has_the_loss_of_the_peers_own_code(peer, case):
    comparison = compare_case(peer, case, "corpus")
    assert dict(comparison.translation.loss_fn) == RECORDED[peer]["files"][case]["loss_fn"]
    assert comparison.translation.not_expressed == ()
    assert comparison.trained > 0
    assert comparison.verdict == "same", (comparison.losses, comparison.gradients)


@pytest.mark.parametrize("peer", EXAMPLES)
def test_answers_are_those_that_were_recorded(peer):
    folder = checkout_of(peer)
    if commit_of(folder) != RECORDED[peer]["commit"]:
        pytest.skip(f"{folder} is at another commit than {RECORDED[peer]['commit']}")
    assert answers(peer, folder.parent) == RECORDED[peer]["files"]
