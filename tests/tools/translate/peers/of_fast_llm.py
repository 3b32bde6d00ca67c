"""Fast-LLM's own loss."""

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

from tests.tools.translate.peers.loading import files_of
from tests.tools.translate.peers.problems import ROWS, Problem

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


@contextmanager
def loss(root: Path) -> Iterator[Callable[[Mapping[str, Any], Problem], tuple[Tensor, Tensor]]]:
    """What Fast-LLM computes under settings."""
    uncompiled = mock.patch.object(torch, "compile", lambda function: function)
    with tempfile.TemporaryDirectory() as folder, uncompiled:
        for path in MODULES.values():
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_plain((root / path).read_text()))
        with files_of(Path(folder), MODULES, made_up=("fast_llm",)) as modules:
            yield _run(modules["fast_llm.layers.language_model.loss.policy_gradient"])


def _run(own: Any) -> Callable[[Mapping[str, Any], Problem], tuple[Tensor, Tensor]]:
    def run(settings: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
        at = {name: value.detach() for name, value in problem.double().items()}
        low, high = (settings.get(f"epsilon_{end}", 0.2) for end in ("low", "high"))
        trained = at["mask"] != 0
        if settings["type"] == "gspo":
            counts = at["mask"].sum(1, keepdim=True).expand_as(at["mask"])
            rows = torch.arange(ROWS).unsqueeze(1).expand_as(trained)
            seam = (at["curr"], trained, at["advantages"], at["prev"], rows, ROWS, counts)
            value, _, gradient = own.gspo_segment_seam(*seam, ROWS, 1.0, None, None, low, high, 1.0)
            return value, -gradient
        # A vocabulary of the sampled token, as if of probability 0 in the derivative: that by its log-prob alone.
        target = torch.where(trained, 0, -100)
        softmax = (at["curr"].unsqueeze(-1), torch.zeros(*trained.shape, 1), torch.ones(trained.shape), None)
        arguments = (target, at["advantages"], at["prev"], 1.0, at["mask"].sum(), low, high, None, False)
        value, gradient, _ = own.LanguageModelGRPOLoss.fused_core(*softmax, None, 1.0, arguments)
        return value, gradient.squeeze(-1)

    return run
