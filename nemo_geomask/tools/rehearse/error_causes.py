"""Known errors of NeMo-RL's workers, each with the setting that is likely behind it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence

MEMORY = "this machine's memory"

CAUSES: Sequence[tuple[str, str, str]] = (
    # A pattern that is searched in the error and its tracebacks, the settings that are the likely cause, and what to
    # do. The first pattern that matches decides. A traceback has lines of code, so no pattern is a name that they have.
    (
        r"WorkerError|can't receive the loss|No module named 'nemo_geomask'",
        "PYTHONPATH, or the workers' environments",
        "the workers can't import nemo_geomask, or another version of it; see Workers in docs/reference/nemo_rl.md",
    ),
    (
        r"BatchVetoError",
        "loss_fn.batch_veto",
        "every batch was vetoed: widen its bounds, or look at geomask/mismatch_k3 for why the engines differ",
    ),
    (
        r"NonFiniteError",
        "loss_fn.nonfinite",
        "a log-prob at a trained token is NaN or infinite, and nonfinite: raise was chosen",
    ),
    (
        r"longer than the maximum model length|maximum context length",
        "policy.generation.vllm_cfg.max_model_len, policy.max_total_sequence_length",
        "a prompt with its response must fit",
    ),
    (
        r"No module named 'flash_attn|the package flash_attn",
        "policy.sequence_packing.enabled",
        "packed rows need flash attention, which is not installed here",
    ),
    (r"No module named 'megatron", "policy.megatron_cfg.enabled", "put Megatron-Bridge and Megatron-LM on PYTHONPATH"),
    (r"No module named 'nemo_automodel", "policy.dtensor_cfg._v2", "put Automodel on PYTHONPATH, or set _v2: false"),
    (
        r"does not recognize this architecture|has no model type|are not supported for now",
        "policy.model_name",
        "transformers or vLLM here doesn't have the architecture",
    ),
    (r"is not registered in ENV_REGISTRY", "data.default.env_name", "the environment is not known to NeMo-RL"),
    (r"KeyError: '(\w+)'", r"\1", "NeMo-RL reads this key, which the recipe does not have"),
    (
        r"running low on memory",
        MEMORY,
        "Ray ended workers because the machine's memory ran out: end other processes, or rehearse with fewer --ranks",
    ),
    (
        r"actor died unexpectedly|Worker unexpectedly exits|connection error code|EngineDeadError|SIGKILL|status -9",
        MEMORY,
        "a worker's process was killed from outside: by the kernel for want of memory (dmesg says so), by a job's "
        "limits, or by hand; or it crashed in native code, and the log has its last words",
    ),
)


def likely_cause(
    text: str, error: str = "", settings: Mapping[str, object] | None = None
) -> tuple[str | None, str | None]:
    """Return the setting that is likely behind an error, and what to do.

    Args:
        error: the line of the error itself. A setting whose last part it names, or whose text value it quotes, takes
            precedence over the patterns.

    Returns:
        The setting and the way out, or None for the way out if the error itself says it; twice None if no cause is
        known.
    """
    settings = settings or {}
    module = plugin_module(str(settings.get("loss_fn.name", "")))
    if module and re.search(rf'File "[^"]*\b{module.replace(".", "/")}(/__init__)?\.py"', text):
        return "loss_fn.name", f"the plugin's own code, in {module}, is in the traceback"
    named = (key for key in settings if _is_word(key.rpartition(".")[2], error))
    quoted = (key for key, value in settings.items() if isinstance(value, str) and _is_word(value, error))
    for keys, fix in ((named, None), (quoted, "the error has its value")):
        # A key that the error names in full takes precedence over the section that contains it.
        key = max(keys, key=lambda key: len(key) if key in error else 0, default=None)
        if key is not None:
            return key, fix
    matches = ((re.search(pattern, text), setting, fix) for pattern, setting, fix in CAUSES)
    return next(((match.expand(setting), fix) for match, setting, fix in matches if match), (None, None))


def plugin_module(loss_name: str) -> str:
    """Return the module of a plugin's loss, by its ``module:attribute`` or its entry point; empty if it is ours."""
    module, colon, _ = loss_name.partition(":")
    if not colon:
        entries = importlib.metadata.entry_points(group="nemo_geomask.losses", name=loss_name)
        module = next((entry.module for entry in entries), "")
    return "" if module.partition(".")[0] == "nemo_geomask" else module


def _is_word(word: str, text: str) -> bool:
    """Return True if the text contains the word; an ordinary word such as ``name`` is no evidence and never counts."""
    return bool(re.search(r"\w[_./]\w", word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text))
