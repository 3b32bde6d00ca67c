"""Cases for Fast-LLM, and its own loss, run from a checkout."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.tools.translate.peers.batches import ROWS, RandomBatch
from tests.tools.translate.peers.loading import import_files

MODULES = {
    "fast_llm.functional.utils": "fast_llm/functional/utils.py",
    "fast_llm.functional.entropy_loss": "fast_llm/functional/entropy_loss.py",
    "fast_llm.layers.language_model.loss.policy_gradient": "fast_llm/layers/language_model/loss/policy_gradient.py",
}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "grpo, clip": {"type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.28},
    "gspo": {"type": "gspo"},
    "gspo, clip": {"type": "gspo", "epsilon_low": 0.02, "epsilon_high": 0.03},
}
DIFFERS: dict[str, str] = {}


def _plain(source: str) -> str:
    """Without type parameters, which need Python 3.12."""
    source = re.sub(r"^((?:class|def) \w+)\[[^\]]*\](?=\()", r"\1", source, flags=re.MULTILINE)
    return "from __future__ import annotations\n" + source.replace("[ConfigType]", "")


RUNNABLE = ("type", "epsilon")
"""Beginnings of the settings that ``loss`` takes."""


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]]:
    """Yield a function that returns loss and gradient of Fast-LLM\'s own code."""
    uncompiled = mock.patch.object(torch, "compile", lambda function: function)
    with tempfile.TemporaryDirectory() as folder, uncompiled:
        for path in MODULES.values():
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_plain((root / path).read_text()))
        with import_files(Path(folder), MODULES, placeholder_packages=("fast_llm",)) as modules:
            yield _run(modules["fast_llm.layers.language_model.loss.policy_gradient"])


def _run(peer: Any) -> Callable[[Mapping[str, Any], RandomBatch], tuple[Tensor, Tensor]]:
    def run(settings: Mapping[str, Any], batch: RandomBatch) -> tuple[Tensor, Tensor]:
        tensors = {name: value.detach() for name, value in batch.double().items()}
        low, high = (settings.get(f"epsilon_{end}", 0.2) for end in ("low", "high"))
        trained = tensors["mask"] != 0
        if settings["type"] == "gspo":
            counts = tensors["mask"].sum(1, keepdim=True).expand_as(tensors["mask"])
            rows = torch.arange(ROWS).unsqueeze(1).expand_as(trained)
            seam = (tensors["curr"], trained, tensors["advantages"], tensors["prev"], rows, ROWS, counts)
            value, _, gradient = peer.gspo_segment_seam(*seam, ROWS, 1.0, None, None, low, high, 1.0)
            return value, -gradient
        # A vocabulary of the sampled token, as if of probability 0 in the derivative: that by its log-prob alone.
        target = torch.where(trained, 0, -100)
        softmax = (tensors["curr"].unsqueeze(-1), torch.zeros(*trained.shape, 1), torch.ones(trained.shape), None)
        arguments = (target, tensors["advantages"], tensors["prev"], 1.0, tensors["mask"].sum(), low, high, None, False)
        value, gradient, _ = peer.LanguageModelGRPOLoss.fused_core(*softmax, None, 1.0, arguments)
        return value, gradient.squeeze(-1)

    return run
