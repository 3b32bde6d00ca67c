"""Logits processor of vLLM by which an engine decodes given tokens and reports their log-probs as of its own samples.

The engine computes each distribution as it does for any request. Only the token that was drawn from it is exchanged
for the given one, after all of temperature, penalties, top-k and top-p: the log-probs are those of the engine's own
``logprobs_mode``. A request gives its tokens in ``SamplingParams.extra_args``, under
:data:`~nemo_geomask.tools.probe.engine_scores.REPLAY`.

Recent vLLM has ``SamplingParams.trace_decode_token_ids`` for this; no vLLM that a NeMo-RL release pins has it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.probe.engine_scores import REPLAY

_Processor: Any = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor


class TokenReplay(_Processor):  # type: ignore[misc, unused-ignore]
    """Keeps the given tokens of the requests in the batch; it changes no logits."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        # By row of the batch: the tokens to decode, and the engine's own list of those decoded so far.
        self._requests: dict[int, tuple[list[int], list[int]]] = {}
        sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler
        patch.attribute(sampler, "sample", _with_given_tokens).apply()

    def is_argmax_invariant(self) -> bool:
        """Return True: greedy requests may skip it."""
        return True

    def apply(self, logits: Any) -> Any:
        """Return the logits as they are."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that enter the batch, leave it, or change their row."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._requests.pop(row, None)
        for row, parameters, _, decoded in batch_update.added:
            tokens = (parameters.extra_args or {}).get(REPLAY)
            self._requests.pop(row, None)
            if tokens:
                self._requests[row] = (tokens, decoded)
        for source, target, direction in batch_update.moved:
            source_request, replaced = self._requests.pop(source, None), self._requests.pop(target, None)
            if source_request is not None:
                self._requests[target] = source_request
            if replaced is not None and direction.name == "SWAP":
                self._requests[source] = replaced

    def given_tokens(self, rows: int) -> dict[int, int]:
        """Return the next token of each row that has one."""
        return {
            row: tokens[len(decoded)]
            for row, (tokens, decoded) in self._requests.items()
            if row < rows and len(decoded) < len(tokens)
        }


def _with_given_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = original(self, logits, sampling_metadata, *args, **kwargs)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, TokenReplay):
                for row, token in processor.given_tokens(len(sampled)).items():
                    sampled[row] = token
        return sampled, logprobs

    return sample
