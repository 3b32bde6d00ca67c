"""What was promised, held against what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_geomask.bench.paths import OURS
from nemo_geomask.bench.paths.eager import CHUNK

__all__ = ["BARS", "check_linear", "check_logprobs", "check_loss"]

# As a caller gets it; figures that stand by themselves are held against the bar without the check of the targets too.
_OURS, _UNCHECKED = OURS[0].name, OURS[1].name
_V = 151_936


class _Bar(NamedTuple):
    """A bound on a figure of ours, or on how many times as fast as ``peer`` ours is, in the cases of ``at``."""

    device: str
    bound: float
    peer: str | None = None
    figure: str | None = None
    at: Mapping[str, Any] = {}
    at_most: bool = False


_PLAIN = {"vocab": _V, "fraction": 1.0, "entropy": False, "temperature": 1.0, "dtype": "bfloat16"}
_WHOLE = {**_PLAIN, "tp": 1}
BARS = (
    _Bar("cuda", 0.9, figure="of_copy", at={"vocab": _V, "fraction": 1.0, "dtype": "bfloat16"}),
    _Bar("cuda", 15.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at=_WHOLE),
    _Bar("cuda", 3.0, peer="Liger vocabulary-parallel CE", at=_PLAIN),
    _Bar("cuda", 3.0, peer="TransformerEngine parallel_cross_entropy", at=_PLAIN),
    _Bar("cuda", 1.0, peer="flash-attn CE", at=_WHOLE),
    _Bar("cuda", 1.0, peer="QuACK CE", at=_WHOLE),
    _Bar("cuda", 2.0, peer="flash-attn CE", at={**_WHOLE, "fraction": 0.2}),
    _Bar("cuda", 2.0, peer="QuACK CE", at={**_WHOLE, "fraction": 0.2}),
    _Bar("cuda", 32.0, figure="extra_bytes_per_token", at={"vocab": _V, "dtype": "bfloat16"}, at_most=True),
    _Bar("cpu", 8.0, peer=f"NeMo-RL ChunkedDistributedLogprob({CHUNK})", at={**_WHOLE, "tokens": 256}),
    _Bar("cpu", 3.0, peer="NeMo-RL DistributedLogprob of logits.float()", at={**_WHOLE, "tokens": 256}),
    _Bar("cpu", 2.0, peer="torch F.cross_entropy", at={**_WHOLE, "tokens": 256}),
)
_ENOUGH_TOKENS = {"cuda": 4096, "cpu": 256}  # below that a GPU is not full, and a CPU's pass over them too short
_FROM_LOGITS = 1.1
# How many times as fast as NeMo-RL's class on the same padded batch, by how ours runs.
_ON_LOGPROBS = {
    "padded": 1 / 1.15,
    "padded, metrics: nemo_rl": 1.0,
    "padded, compiled": 3.0,
    "padded, compiled, metrics: nemo_rl": 3.0,
}
_SKEWED = {"one by one": 10.0, "one by one, metrics: nemo_rl": 10.0, "at once": 2.0, "at once, compiled": 2.0}


def check_logprobs(results: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """Each bar of this device in each case that it speaks of.

    Returns:
        ``name``, ``bound``, ``found`` and ``passed``; the last two None where the figure is missing.
    """
    found = []
    for bar in BARS:
        if bar.device != device:
            continue
        fitting = [result for result in results if _speaks_of(bar, result["case"])]
        ours = (_OURS,) if bar.peer else (_OURS, _UNCHECKED)
        verdicts = [_judge(bar, result, path) for result in fitting for path in ours]
        found += verdicts or [_verdict(_name(bar), bar, None, "no such case was run")]
    return found


_LINEAR, _LOGITS = "nemo_geomask linear_logprobs", "nemo_geomask with logits"
_OF_LOGITS, _OF_PRODUCTS, _SLOWER, _FASTER = 0.1, 0.85, 1.1, 3.5


def check_linear(results: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """The bars on log-probs without logits: memory, share of the matrix products' speed, gain where few tokens train.

    Args:
        results: as ``bench linear`` finds them.
        device: what it was measured on.

    Returns:
        As :func:`check_logprobs`.
    """
    found = []
    for result in results:
        rows = {row["path"]: row for row in result["paths"]}
        mine, title = rows.get(_LINEAR, {}), result["title"]
        if mine.get("status") != "measured":
            continue
        if device == "cuda":
            bar = _Bar(device, _OF_PRODUCTS)
            found.append(_verdict(f"of the matrix products' rate: {title}", bar, mine["of_products"]))
        else:
            memory = _Bar(device, _OF_LOGITS, at_most=True)
            found.append(_verdict(f"extra memory, of the logits': {title}", memory, mine.get("of_logits")))
            alone = result["products"]["ms"]["median"] + result["kernels"]["ms"]["median"]
            bar = _Bar(device, _SLOWER, at_most=True)
            found.append(_verdict(f"times products and kernels: {title}", bar, mine["ms"]["median"] / alone))
        whole = rows.get(_LOGITS, {"status": "absent", "reason": "not asked for"})
        if result["case"]["fraction"] == 0.2:
            found.append(_times(f"times as fast as with logits: {title}", device, _FASTER, mine, whole))
    return found


def check_loss(results: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """The bars on a loss beside NeMo-RL's, padded and packed, and from logits.

    Args:
        results: as ``bench loss`` finds them.
        device: what it was measured on.

    Returns:
        As :func:`check_logprobs`; with fewer logits than the bar speaks of, what was found is not judged.
    """
    found = []
    rows = {(row["loss"], row["how"]): row for row in results.get("on_logprobs", ())}
    for (loss, how), row in rows.items():
        theirs = rows.get((loss, "NeMo-RL, padded"))
        if how in _ON_LOGPROBS and theirs is not None:
            found.append(_times(f"{loss}, {how}: times as fast as NeMo-RL's", device, _ON_LOGPROBS[how], row, theirs))
    ways = {row["way"]: row for row in results.get("skewed", {}).get("ways", ())}
    for way, bound in _SKEWED.items():
        if f"ours, {way}" in ways:
            name = f"skewed packed row, {way}: times as fast as NeMo-RL's"
            theirs = ways[f"NeMo-RL, {way.partition(',')[0]}"]
            found.append(_times(name, device, bound, ways[f"ours, {way}"], theirs))
    return found + _from_logits(results, device)


def _times(name: str, device: str, bound: float, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    bar = _Bar(device, bound)
    for row in (ours, theirs):
        if row["status"] != "measured":
            return _verdict(name, bar, None, f"{row['status']}: {row['reason']}")
    return _ratio(name, bar, ours, theirs)


def _from_logits(results: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    bar = _Bar(device, _FROM_LOGITS, at_most=True)
    tokens, vocab, enough = results["case"]["tokens"], results["case"]["vocab"], _ENOUGH_TOKENS[device]
    found = []
    for entry in results["from_logits"]:
        verdict = _verdict(f"{entry['loss']} from logits, times the log-prob pass alone", bar, entry["of_logprobs"])
        if tokens * vocab < enough * _V:
            verdict |= {
                "passed": None,
                "reason": f"too small to judge: {tokens} x {vocab} logits; from {enough} x {_V} on",
            }
        if "processor_ms" in entry:
            alone = entry["logprobs"]["processor_ms"]["median"]
            verdict["by_processor_time"] = entry["processor_ms"]["median"] / alone
        found.append(verdict)
    return found


def _speaks_of(bar: _Bar, case: Mapping[str, Any]) -> bool:
    if case["tokens"] < _ENOUGH_TOKENS[bar.device]:
        return False
    return all(case[key] == value for key, value in bar.at.items())


def _judge(bar: _Bar, result: Mapping[str, Any], path: str) -> dict[str, Any]:
    rows = {row["path"]: row for row in result["paths"]}
    ours = rows.get(path, {})
    name = f"{path}: {_name(bar)}: {result['title']}"
    if ours.get("status") != "measured":
        return _verdict(name, bar, None, "it was not measured")
    if bar.peer is None:
        return _verdict(name, bar, ours.get(bar.figure or ""))
    peer = rows.get(bar.peer, {"status": "absent", "reason": "not asked for"})
    if peer["status"] != "measured":
        return _verdict(name, bar, None, f"{bar.peer} {peer['status']}: {peer['reason']}")
    return _ratio(name, bar, ours, peer)


def _ratio(name: str, bar: _Bar, ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    verdict = _verdict(name, bar, peer["ms"]["median"] / ours["ms"]["median"])
    if "processor_ms" in ours:
        # On a machine with other work to do, the steadier of the two.
        verdict["by_processor_time"] = peer["processor_ms"]["median"] / ours["processor_ms"]["median"]
    return verdict


def _name(bar: _Bar) -> str:
    return f"times as fast as {bar.peer}" if bar.peer else str(bar.figure).replace("_", " ")


def _verdict(name: str, bar: _Bar, found: float | None, reason: str | None = None) -> dict[str, Any]:
    passed = None if found is None else found <= bar.bound if bar.at_most else found >= bar.bound
    verdict = {"name": name, "bound": f"{'≤' if bar.at_most else '≥'} {bar.bound:g}", "found": found, "passed": passed}
    return verdict if reason is None else {**verdict, "reason": reason}
