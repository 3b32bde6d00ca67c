"""Tables and sentences of the outcome of a sweep, from its JSON."""

from __future__ import annotations

import math
from typing import Any

from nemo_geomask.tools.diagnose.measure.step_sums import Estimate, StepSums
from nemo_geomask.tools.diagnose.measure.thresholds import MAX_PULL, MIN_SEQUENCES
from nemo_geomask.tools.diagnose.report.json_formats import CandidateJson, SweepJson
from nemo_geomask.tools.diagnose.report.report_tables import Table
from nemo_geomask.tools.shared.terminal_text import escape_line


def sweep_table(sweep: SweepJson) -> Table:
    """Return the table of the candidates."""
    candidates: list[Any] = list(sweep["candidates"])

    def mark(candidate: CandidateJson) -> str:
        return "→" if candidate["name"] == sweep["recommended"] else "*" if candidate["on_front"] else ""

    rows: list[tuple[Any, ...]] = [
        (
            *(candidate["name"], mark(candidate)),
            *(candidate[measure]["value"] for measure in sweep["definitions"]),
            *(", ".join(map(str, candidate["skipped"])), candidate["source"]),
        )
        for candidate in candidates
    ]
    columns = ("candidate", "", *sweep["definitions"], "steps skipped", "source")
    return Table("candidates", _title(sweep), columns, rows, sweep["definitions"])


def explain_harm(sums: StepSums, pull: Estimate) -> str:
    """Return what the sums of some steps tell of the bias that persists, and the pull on an objective over them."""
    wrong, explained = _wrong_tokens(sums), sums.advantage_explained()
    if math.isnan(wrong):
        return "The records do not tell whether the bias persists: they hold no advantages, or no trained token."
    text = f"A response has {wrong:.2g} tokens that the training engine would not have sampled"
    if math.isnan(pull.value):
        return (
            f"{text}. Whether training is pulled to them is not testable: in a step, few responses to different "
            "prompts get the same reply, and its length does not predict the advantage."
        )
    text += ". No luck is seen in the replies: " if max(explained.low, pull.low) <= 0 else ", and "
    text += (
        f"the recorded context predicts {explained.value:.1%} ({explained.low:.1%} to {explained.high:.1%}) of the "
        f"mean square of the advantage, a pull of {pull.value:.2g} ({pull.low:.2g} to {pull.high:.2g})"
    )
    if pull.low > MAX_PULL:
        return f"{text}, above {MAX_PULL}, to the sampler's errors or away from them."
    return f"{text}, {'not' if pull.high <= MAX_PULL else 'not surely'} above {MAX_PULL}."


def may_do_harm(sums: StepSums) -> bool:
    """Return True unless the pull, or the wrong tokens where no pull is testable, are surely below the limit."""
    pull = sums.pull().high
    return sums["sequences"] >= MIN_SEQUENCES and (_wrong_tokens(sums) if math.isnan(pull) else pull) > MAX_PULL


def _wrong_tokens(sums: StepSums) -> float:
    return sums.mean("wrong_tokens", "sequences_with_advantages")


def _title(sweep: SweepJson) -> str:
    """Return the title of the table of candidates: its steps, what was left out, and over which tokens it is."""
    title = f"{sweep['objective']}; steps {', '.join(map(str, sweep['steps']))}"
    if sweep["left_out"]:
        title += f"; {sum(sweep['left_out'].values())} sequences left out"
    if sweep["damaged_files"]:
        first, *_ = sweep["damaged_files"].values()
        title += f"; {len(sweep['damaged_files'])} files left out as damaged, the first: {escape_line(first)}"
    with_gradient, trained = sweep["tokens"]["with_gradient"], sweep["tokens"]["trained"]
    tokens = f"{trained:,} trained tokens"
    if with_gradient < trained:
        tokens = f"{with_gradient:,} of {tokens}, without those whose advantage is 0 and which have no gradient"
    return f"{title}; *: no other has less {sweep['decided_by']} and less variance, →: recommended; over {tokens}"
