"""How mutants are counted, and whether what the configuration names is there."""

from __future__ import annotations

import pytest

from tests.mutation.__main__ import ROOT
from tests.mutation.score import Equivalent, Mutant, Score, read_equivalents, read_rooms

DIFF = "--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n def f(x):\n-    return x < 0\n+    return x <= 0\n"
LISTED = [Equivalent("a.py", "return x < 0", "return x <= 0", "x is never 0")]


def test_survivors_count_unless_they_are_listed():
    outcomes = [
        Mutant("f_1", "a.py", "killed"),
        Mutant("f_2", "a.py", "timeout"),
        Mutant("f_3", "a.py", "survived", DIFF),
        Mutant("f_4", "a.py", "no tests", DIFF.replace("<= 0", "> 0")),
    ]
    score = Score("room", 40, outcomes)
    assert [mutant.name for mutant in score.survivors([])] == ["f_3", "f_4"]
    assert score.summary([]) == "room: 2 of 4 noticed (50.0%); 0 equivalent; 4 of 40 mutants tested"
    assert [mutant.name for mutant in score.survivors(LISTED)] == ["f_4"]
    assert score.summary(LISTED) == "room: 2 of 3 noticed (66.7%); 1 equivalent; 4 of 40 mutants tested"
    # The same change in another file is another change.
    assert [mutant.name for mutant in score.survivors([LISTED[0]._replace(file="b.py")])] == ["f_3", "f_4"]
    assert Score("room", 0, []).summary([]) == "room: 0 of 0 noticed (none); 0 equivalent; 0 of 0 mutants tested"


@pytest.mark.parametrize("room", read_rooms())
def test_what_a_room_names_is_there(room):
    settings = read_rooms()[room]
    for pattern in settings["sources"]:
        assert list(ROOT.glob(pattern)), pattern
    for path in settings["tests"]:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("entry", read_equivalents(), ids=lambda entry: entry.becomes)
def test_a_listed_change_is_still_one_of_the_source(entry):
    assert " ".join(entry.was.split()) in " ".join((ROOT / entry.file).read_text(encoding="utf-8").split())
    assert entry.was != entry.becomes
    assert entry.reason
