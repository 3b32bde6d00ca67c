"""Fast-LLM: settings of a policy-gradient loss."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    convert_value,
    without_counterpart,
)


def _convert(settings: PeerSettings) -> Conversion:
    yield from convert_value(
        settings, "type", {"grpo": [Assign("name", "clipped_pg")], "gspo": [Assign("name", "gspo")]}
    )
    yield Assign("ratio_clip_min", settings.number("epsilon_low"))
    yield Assign("ratio_clip_max", settings.number("epsilon_high"))
    by_documents = bool(settings["normalize_by_documents"]) or settings["type"] == "gspo"
    note = (
        "Fast-LLM's gspo divides the sum over tokens by the number of documents" if settings["type"] == "gspo" else ""
    )
    yield Assign("loss_normalization", "documents" if by_documents else "tokens", note)
    yield Assign("reference_policy_kl_penalty", 0.0)
    yield from without_counterpart(settings, {"weight": ((1, 1.0, None), "multiply the learning rate by it instead")})
    yield Remark("Fast-LLM reads the old log-probs from the data; if they are the sampler's, set ratio_anchor: gen.")


PEER = Peer(
    name="fast_llm",
    title="Fast-LLM's policy-gradient loss",
    source="ServiceNow/Fast-LLM at 7d61a1ba; normalize_by_documents by PR 502",
    defaults={"type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "normalize_by_documents": False, "weight": 1.0},
    convert=_convert,
    marks=("epsilon_low", "normalize_by_documents", "*.losses.*.epsilon_low", "model.base_model.*", "pretrained.*"),
)
