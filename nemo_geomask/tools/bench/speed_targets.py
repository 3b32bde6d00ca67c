"""Speed and memory targets of our paths, and the verdicts on measured results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_geomask.tools.bench.paths import OURS
from nemo_geomask.tools.bench.paths.eager_peers import CHUNK

__all__ = ["TARGETS", "check_linear", "check_logprobs", "check_loss"]

# Our path with default options, and without validation of token ids. The latter is checked only against targets that do
# not compare with a peer.
_OURS, _UNCHECKED = OURS[0].name, OURS[1].name
_VOCAB = 151_936  # Qwen3's


class _Target(NamedTuple):
    """Bound on one of our measured figures, or on the ratio of a peer's time to ours.

    Attributes:
        device: type of the device that the target is for.
        bound: the bound.
        peer: path whose time is divided by ours; None: the bound is on ``figure``.
        figure: key of the figure in a path's row.
        at: fields of the cases that the target applies to, with their values.
        at_most: True if the bound is an upper bound.
    """

    device: str
    bound: float
    peer: str | None = None
    figure: str | None = None
    at: Mapping[str, Any] = {}
    at_most: bool = False


_PLAIN = {"vocab": _VOCAB, "fraction": 1.0, "entropy": False, "temperature": 1.0, "dtype": "bfloat16"}
_UNSHARDED = {**_PLAIN, "tp": 1}
TARGETS = (
    _Target("cuda", 0.9, figure="of_copy", at={"vocab": _VOCAB, "fraction": 1.0, "dtype": "bfloat16"}),
    # The check of the targets costs at most 2 %.
    _Target("cuda", 0.98, peer=_UNCHECKED, at={"vocab": _VOCAB, "fraction": 1.0, "dtype": "bfloat16"}),
    _Target("cuda", 15.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at=_UNSHARDED),
    _Target("cuda", 3.0, peer="Liger vocabulary-parallel CE", at=_PLAIN),
    _Target("cuda", 3.0, peer="TransformerEngine parallel_cross_entropy", at=_PLAIN),
    _Target("cuda", 1.0, peer="flash-attn CE", at=_UNSHARDED),
    _Target("cuda", 1.0, peer="QuACK CE", at=_UNSHARDED),
    _Target("cuda", 2.0, peer="flash-attn CE", at={**_UNSHARDED, "fraction": 0.2}),
    _Target("cuda", 2.0, peer="QuACK CE", at={**_UNSHARDED, "fraction": 0.2}),
    _Target("cuda", 32.0, figure="extra_bytes_per_token", at={"vocab": _VOCAB, "dtype": "bfloat16"}, at_most=True),
    _Target("cpu", 8.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at={**_UNSHARDED, "tokens": 256}),
    _Target("cpu", 3.0, peer="NeMo-RL DistributedLogprob of logits.float()", at={**_UNSHARDED, "tokens": 256}),
    _Target("cpu", 2.0, peer="torch F.cross_entropy", at={**_UNSHARDED, "tokens": 256}),
)
_ENOUGH_TOKENS = {"cuda": 4096, "cpu": 256}  # fewer do not fill a GPU, or take too little time on a CPU
_MAX_WITH_LOSS = 1.1  # largest ratio of the time of log-probs and loss to the time of log-probs alone
# For each device, layout and option of our loss, the least ratio of the time of NeMo-RL's class to ours on the same
# batch. Those of a CPU are the least ratios over the losses of a recorded run, 0.742, 1.02, 1.89 and 2.43, rounded down
# (docs/performance/loss-amd-epyc-2026-11-23.json: [16, 2048], one thread).
_MIN_SPEEDUP = {
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
_MIN_PACKED_SPEEDUP = {
    "one by one": 10.0,
    "one by one, metrics: nemo_rl": 10.0,
    "at once": 2.0,
    "at once, compiled": 2.0,
}


def check_logprobs(results: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """Check the targets of this device in each case to which they apply.

    Returns:
        For each check ``name``, ``bound``, ``found`` (the measured figure) and ``passed``. The last two are None if the
        figure was not measured.
    """
    verdicts = []
    for target in TARGETS:
        if target.device != device:
            continue
        applicable = [result for result in results if _applies(target, result["case"])]
        ours = (_OURS,) if target.peer else (_OURS, _UNCHECKED)
        checks = [_check(target, result, path) for result in applicable for path in ours]
        verdicts += checks or [_verdict(_name(target), target, None, "no case was run to which it applies")]
    return verdicts


_WITHOUT_LOGITS, _WITH_LOGITS = "nemo_geomask linear_logprobs", "nemo_geomask with logits"
_MAX_EXTRA_MEMORY = 0.1  # largest ratio of extra memory to the size of the logits
_MIN_PRODUCT_RATE = 0.85  # least ratio of the matrix products' time to ours
_MAX_TIME = 1.1  # largest ratio of our time to that of the matrix products and the log-prob kernels
_MIN_SPEEDUP_OF_FEW = 3.5  # least ratio of the time with logits to ours, if a fifth of the tokens train


def check_linear(results: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """Check log-probs without logits: memory, speed relative to the matrix products, speed if few tokens train.

    Args:
        results: cases of ``bench linear``.
        device: type of the device on which they were measured.

    Returns:
        As :func:`check_logprobs`.
    """
    verdicts = []
    for result in results:
        rows = {row["path"]: row for row in result["paths"]}
        ours, title = rows.get(_WITHOUT_LOGITS, {}), result["title"]
        if ours.get("status") != "measured":
            continue
        if device == "cuda":
            target = _Target(device, _MIN_PRODUCT_RATE)
            verdicts.append(_verdict(f"of the matrix products' rate: {title}", target, ours["of_products"]))
        else:
            memory = _Target(device, _MAX_EXTRA_MEMORY, at_most=True)
            verdicts.append(_verdict(f"extra memory, of the logits': {title}", memory, ours.get("of_logits")))
            baseline = result["products"]["ms"]["median"] + result["kernels"]["ms"]["median"]
            target = _Target(device, _MAX_TIME, at_most=True)
            verdicts.append(_verdict(f"times products and kernels: {title}", target, ours["ms"]["median"] / baseline))
        with_logits = rows.get(_WITH_LOGITS, {"status": "absent", "reason": "not selected"})
        if result["case"]["fraction"] == 0.2:
            name = f"times as fast as with logits: {title}"
            verdicts.append(_speedup_verdict(name, device, _MIN_SPEEDUP_OF_FEW, ours, with_logits))
    return verdicts


def check_loss(results: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """Check losses against NeMo-RL's on padded and packed batches, and losses from logits against log-probs alone.

    Args:
        results: result of ``bench loss``.
        device: type of the device on which it was measured.

    Returns:
        As :func:`check_logprobs`; ``passed`` is also None if there are too few logits to judge.
    """
    verdicts, min_speedup = [], _MIN_SPEEDUP[device]
    rows = {(row["loss"], row["how"]): row for row in results.get("on_logprobs", ())}
    for (loss, how), row in rows.items():
        theirs = rows.get((loss, "NeMo-RL, padded"))
        if how in min_speedup and theirs is not None:
            name = f"{loss}, {how}: times as fast as NeMo-RL's"
            verdicts.append(_speedup_verdict(name, device, min_speedup[how], row, theirs))
    ways = {row["way"]: row for row in results.get("skewed", {}).get("ways", ())}
    for way, bound in _MIN_PACKED_SPEEDUP.items():
        if f"ours, {way}" in ways:
            name = f"skewed packed row, {way}: times as fast as NeMo-RL's"
            theirs = ways[f"NeMo-RL, {way.partition(',')[0]}"]
            verdicts.append(_speedup_verdict(name, device, bound, ways[f"ours, {way}"], theirs))
    return verdicts + _from_logits(results, device)


def _speedup_verdict(
    name: str, device: str, bound: float, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the verdict on the ratio of another path's time to ours, which must be at least ``bound``."""
    target = _Target(device, bound)
    for row in (ours, theirs):
        if row["status"] != "measured":
            return _verdict(name, target, None, f"{row['status']}: {row['reason']}")
    return _ratio(name, target, ours, theirs)


def _from_logits(results: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    target = _Target(device, _MAX_WITH_LOSS, at_most=True)
    tokens, vocab, enough = results["case"]["tokens"], results["case"]["vocab"], _ENOUGH_TOKENS[device]
    verdicts = []
    for entry in results["from_logits"]:
        verdict = _verdict(f"{entry['loss']} from logits, times the log-prob pass alone", target, entry["of_logprobs"])
        if tokens * vocab < enough * _VOCAB:
            verdict |= {
                "passed": None,
                "reason": f"too small to judge: {tokens} x {vocab} logits; from {enough} x {_VOCAB} on",
            }
        if "processor_ms" in entry:
            alone = entry["logprobs"]["processor_ms"]["median"]
            verdict["by_processor_time"] = entry["processor_ms"]["median"] / alone
        verdicts.append(verdict)
    return verdicts


def _applies(target: _Target, case: Mapping[str, Any]) -> bool:
    if case["tokens"] < _ENOUGH_TOKENS[target.device]:
        return False
    return all(case[key] == value for key, value in target.at.items())


def _check(target: _Target, result: Mapping[str, Any], path: str) -> dict[str, Any]:
    rows = {row["path"]: row for row in result["paths"]}
    ours = rows.get(path, {})
    name = f"{path}: {_name(target)}: {result['title']}"
    if ours.get("status") != "measured":
        return _verdict(name, target, None, "it was not measured")
    if target.peer is None:
        return _verdict(name, target, ours.get(target.figure or ""))
    peer = rows.get(target.peer, {"status": "absent", "reason": "not selected"})
    if peer["status"] != "measured":
        return _verdict(name, target, None, f"{target.peer} {peer['status']}: {peer['reason']}")
    return _ratio(name, target, ours, peer)


def _ratio(name: str, target: _Target, ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    verdict = _verdict(name, target, peer["ms"]["median"] / ours["ms"]["median"])
    if "processor_ms" in ours:
        # This ratio varies less on a machine that runs other processes.
        verdict["by_processor_time"] = peer["processor_ms"]["median"] / ours["processor_ms"]["median"]
    return verdict


def _name(target: _Target) -> str:
    return f"times as fast as {target.peer}" if target.peer else str(target.figure).replace("_", " ")


def _verdict(name: str, target: _Target, figure: float | None, reason: str | None = None) -> dict[str, Any]:
    passed = None if figure is None else figure <= target.bound if target.at_most else figure >= target.bound
    verdict = {
        "name": name,
        "bound": f"{'≤' if target.at_most else '≥'} {target.bound:g}",
        "found": figure,
        "passed": passed,
    }
    return verdict if reason is None else {**verdict, "reason": reason}
