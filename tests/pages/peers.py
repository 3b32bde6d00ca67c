"""Tables of each peer's recorded cases, for ``docs/reference/peers.md``."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_geomask.tools.translate import Translation, translate
from nemo_geomask.yaml_text import as_yaml
from tests.helpers.markdown import markdown_table
from tests.tools.translate.peers.compare import expected_differences, index

_VERDICTS = {"same": "same", "loss": "same gradient", "both": "differs"}


def cases(peer: str) -> Iterator[str]:
    """Yield the lines of a peer's Markdown table."""
    entries, commit = index(peer)["cases"], index(peer)["commit"]
    count = sum(entry["count"] for entry in entries.values())
    defaults = _block(translate({}, peer))
    yield f"At commit `{commit[:9]}`: {len(entries)} cases on {count} batches. Defaults: {_code(defaults)}."
    yield ""
    rows = []
    for name, entry in entries.items():
        translation = translate(entry["settings"], peer)
        verdict = _VERDICTS["both" if translation.not_expressed else expected_differences(peer).get(name, "same")]
        why = "; ".join(translation.not_expressed) or ("" if verdict == "same" else " ".join(translation.differences))
        theirs = _code([f"{key.rpartition('.')[2]}: {as_yaml(value)}" for key, value in entry["settings"].items()])
        block = [line for line in _block(translation) if line not in defaults]
        rows.append((name, theirs or "defaults", _code(block), verdict + (f": {why}" if why else "")))
    yield markdown_table(("case", "theirs", "`loss_fn`, where not as under defaults", "answer"), rows)


def _code(lines: list[str]) -> str:
    return " ".join(f"`{line}`" for line in lines)


def _block(translation: Translation) -> list[str]:
    lines = [line for line in translation.yaml().splitlines() if not line.lstrip().startswith("#")]
    return [line.strip().removeprefix("- ") for line in lines if line.startswith("  ") and line.strip() != "masks:"]


TITLES = {
    "verl": "verl",
    "trl": "TRL",
    "slime": "slime",
    "areal": "AReaL",
    "skyrl": "SkyRL",
    "prime_rl": "prime-rl",
    "openrlhf": "OpenRLHF",
    "open_instruct": "open-instruct",
    "fast_llm": "Fast-LLM",
}


def peer_sections() -> str:
    """Return a Markdown section for each peer."""
    return "\n".join(f"## {title}\n\n" + "\n".join(cases(peer)) + "\n" for peer, title in TITLES.items())
