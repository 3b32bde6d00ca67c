"""Speed and memory targets of our paths, and the verdicts on measured results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nemo_geomask.tools.bench.peers import CHUNK
from tests.benchmarks.logit_paths import OURS

Row = Mapping[str, Any]
_VOCAB = 151_936  # Qwen3's
_ENOUGH_TOKENS = {"cuda": 4096, "cpu": 256}  # fewer do not fill a GPU, or take too little time on a CPU
# Our path with default options, and without validation of token ids. The latter is held only to what is no comparison.
_OURS, _UNCHECKED, *_ = OURS


class LogitTarget(NamedTuple):
    """Bound on one of our figures from logits, or on the ratio of a peer's time to ours.

    It is on ``figure``, a key of our row, if there is no ``peer``. It is for cases whose fields have the values ``at``.
    """

    device: str
    bound: float
    peer: str | None = None
    figure: str = ""
    at: Mapping[str, Any] = {}
    at_most: bool = False


_WHOLE = {"vocab": _VOCAB, "fraction": 1.0, "dtype": "bfloat16"}
_PLAIN = {**_WHOLE, "entropy": False, "temperature": 1.0}
_UNSHARDED = {**_PLAIN, "tp": 1}
LOGIT_TARGETS = (
    LogitTarget("cuda", 0.9, figure="of_copy", at=_WHOLE),
    # The check of the targets costs at most 2 %.
    LogitTarget("cuda", 0.98, peer=_UNCHECKED, at=_WHOLE),
    LogitTarget("cuda", 15.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at=_UNSHARDED),
    LogitTarget("cuda", 3.0, peer="Liger vocabulary-parallel CE", at=_PLAIN),
    LogitTarget("cuda", 3.0, peer="TransformerEngine parallel_cross_entropy", at=_PLAIN),
    LogitTarget("cuda", 1.0, peer="flash-attn CE", at=_UNSHARDED),
    LogitTarget("cuda", 2.0, peer="flash-attn CE", at={**_UNSHARDED, "fraction": 0.2}),
    LogitTarget("cuda", 32.0, figure="extra_bytes_per_token", at={"vocab": _VOCAB, "dtype": "bfloat16"}, at_most=True),
    LogitTarget("cpu", 8.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at={**_UNSHARDED, "tokens": 256}),
    LogitTarget("cpu", 3.0, peer="NeMo-RL DistributedLogprob of logits.float()", at={**_UNSHARDED, "tokens": 256}),
    LogitTarget("cpu", 2.0, peer="torch F.cross_entropy", at={**_UNSHARDED, "tokens": 256}),
)
_PRODUCT_RATE = 0.85  # least ratio of the four matrix products' time to ours, without logits
_EXTRA_MEMORY = 0.1  # largest ratio of extra memory to the size of the logits, on a CPU
_FEW = 3.5  # least ratio of the time with logits to ours, if a fifth of the tokens train
_WITH_LOSS = 1.1  # largest ratio of the time of log-probs and loss to the time of log-probs alone
# For each device, layout and option of our loss, the least ratio of the time of NeMo-RL's class to ours on the same
# batch. Those of a CPU are the least ratios over the losses of a recorded run, 0.742, 1.02, 1.89 and 2.43, rounded down
# (docs/performance/loss-amd-epyc-2026-11-23.json: [16, 2048], one thread).
_SPEEDUP = {
    "cuda": {
        "padded": 1 / 1.15,
        "padded, metrics: nemo_rl": 1.0,
        "padded, compiled": 3.0,
        "padded, compiled, metrics: nemo_rl": 3.0,
    },
    "cpu": {
        "padded": 0.7,
        "padded, metrics: nemo_rl": 1.0,
        "padded, compiled": 1.8,
        "padded, compiled, metrics: nemo_rl": 2.3,
    },
}
# The same for each wrapper on packed sequences of very different lengths.
_PACKED_SPEEDUP = {
    "one by one": 10.0,
    "one by one, metrics: nemo_rl": 10.0,
    "at once": 2.0,
    "at once, compiled": 2.0,
}


def _verdict(target: str, bound: float, found: float | None, *, at_most: bool = False, **more: Any) -> Iterator[Row]:
    """Yield the verdict on a figure; nothing if it was not measured."""
    if found is not None:
        passed = found <= bound if at_most else found >= bound
        sign = "≤" if at_most else "≥"
        yield {"target": target, "bound": f"{sign} {bound:.3g}", "found": found, "passed": passed, **more}


def _speedup(target: str, bound: float, ours: Row, theirs: Row) -> Iterator[Row]:
    """Yield the verdict on the ratio of another path's time to ours, which must be at least ``bound``."""
    if ours.get("status") == theirs.get("status") == "measured":
        # The ratio of processor times varies less on a machine that runs other processes.
        ratio, *by_processor = (
            theirs[key]["median"] / ours[key]["median"] for key in ("ms", "processor_ms") if key in ours
        )
        yield from _verdict(target, bound, ratio, by_processor_time=by_processor[0] if by_processor else None)


def check_logits(result: Row) -> Iterator[Row]:
    """Yield the verdicts on ``logprobs``, in each case to which a target of its device applies."""
    for target in LOGIT_TARGETS:
        for case in result["cases"]:
            sizes, rows = case["case"], {row["path"]: row for row in case["paths"]}
            if target.device != result["machine"]["device"] or sizes["tokens"] < _ENOUGH_TOKENS[target.device]:
                continue
            if any(sizes[key] != value for key, value in target.at.items()):
                continue
            for name in (_OURS,) if target.peer else (_OURS, _UNCHECKED):
                ours = rows.get(name, {})
                what = f"times as fast as {target.peer}" if target.peer else target.figure.replace("_", " ")
                title = f"{name}: {what}: {case['title']}"
                if target.peer:
                    yield from _speedup(title, target.bound, ours, rows.get(target.peer, {}))
                else:
                    yield from _verdict(title, target.bound, ours.get(target.figure), at_most=target.at_most)


def check_linear(result: Row) -> Iterator[Row]:
    """Yield the verdicts on log-probs without logits: their speed beside the products, memory, few trained tokens."""
    for case in result["cases"]:
        rows, title = {row["path"]: row for row in case["paths"]}, case["title"]
        ours = rows.get("nemo_geomask linear_logprobs", {})
        yield from _verdict(f"of the matrix products' rate: {title}", _PRODUCT_RATE, ours.get("of_products"))
        if result["machine"]["device"] == "cpu":
            found = ours.get("of_logits")
            yield from _verdict(f"extra memory, of the logits': {title}", _EXTRA_MEMORY, found, at_most=True)
        if case["case"]["fraction"] == 0.2:
            with_logits = rows.get("nemo_geomask with logits", {})
            yield from _speedup(f"times as fast as with logits: {title}", _FEW, ours, with_logits)


def check_loss(result: Row) -> Iterator[Row]:
    """Yield the verdicts on losses beside NeMo-RL's, and on losses from logits beside log-probs alone."""
    device = result["machine"]["device"]
    rows = {(row["loss"], row["how"]): row for row in result.get("on_logprobs", ())}
    for (loss, how), row in rows.items():
        if how in _SPEEDUP[device]:
            theirs = rows.get((loss, "NeMo-RL, padded"), {})
            yield from _speedup(f"{loss}, {how}: times as fast as NeMo-RL's", _SPEEDUP[device][how], row, theirs)
    ways = {row["way"]: row for row in result.get("skewed", {}).get("ways", ())}
    for way, bound in _PACKED_SPEEDUP.items():
        ours, theirs = ways.get(f"ours, {way}", {}), ways.get(f"NeMo-RL, {way.partition(',')[0]}", {})
        yield from _speedup(f"skewed packed row, {way}: times as fast as NeMo-RL's", bound, ours, theirs)
    case = result.get("case", {"tokens": 0, "vocab": 0})
    if case["tokens"] * case["vocab"] >= _ENOUGH_TOKENS[device] * _VOCAB:  # fewer logits are not judged
        for row in result["from_logits"]:
            title = f"{row['loss']} from logits, times the log-prob pass alone"
            cpu = None
            if "processor_ms" in row:
                cpu = row["processor_ms"]["median"] / row["logprobs"]["processor_ms"]["median"]
            yield from _verdict(title, _WITH_LOSS, row["of_logprobs"], at_most=True, by_processor_time=cpu)
