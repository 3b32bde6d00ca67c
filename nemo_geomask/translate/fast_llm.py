"""Fast-LLM: a policy-gradient loss of a language-model head."""

from __future__ import annotations

from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, chosen, inert

__all__ = ["PEER"]


def _convert(given: Given) -> Lines:
    yield from chosen(given, "type", {"grpo": [Line("name", "clipped_pg")], "gspo": [Line("name", "gspo")]})
    yield Line("ratio_clip_min", given.number("epsilon_low"))
    yield Line("ratio_clip_max", given.number("epsilon_high"))
    by_documents = bool(given["normalize_by_documents"]) or given["type"] == "gspo"
    note = "Fast-LLM's gspo sums over tokens and divides by the documents" if given["type"] == "gspo" else ""
    yield Line("loss_normalization", "documents" if by_documents else "tokens", note)
    yield Line("reference_policy_kl_penalty", 0.0)
    yield from inert(given, {"weight": ((1, 1.0, None), "scale the learning rate by it")})
    yield Remark(
        "Fast-LLM's old log-probs are a column of the data: the trainer's or the sampler's (ratio_anchor: gen)."
    )


PEER = Peer(
    name="fast_llm",
    title="Fast-LLM's policy-gradient loss",
    source="ServiceNow/Fast-LLM at 7d61a1ba; normalize_by_documents by PR 502",
    defaults={"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "normalize_by_documents": False, "weight": 1.0},
    convert=_convert,
)
