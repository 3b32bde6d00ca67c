"""Diagnosis of a rehearsal's records by limits that were measured on healthy tiny models.

:mod:`nemo_geomask.tools.diagnose` judges runs of real models over many steps: its limits on the size of a mismatch are
theirs, and most of its detectors need hundreds of tokens in several ranges of probability. A rehearsal has a few
hundred tokens of a random model. Here the size of the mismatch is judged by limits that were measured on rehearsals
(:data:`HEALTHY`). Faults that show in single log-probs (missing, NaN, above 0, shifted) are those of ``diagnose``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.errors import GeomaskError
from nemo_geomask.records.record_schema import require_arrow
from nemo_geomask.tools.diagnose import UNSURE_LOGPROB, diagnose, find_run, survey_run


@dataclass(frozen=True)
class HealthyLimits:
    """Largest mismatch that a healthy tiny model shows."""

    # median of |Δ| / (1 − p) over tokens, with Δ = trainer's − sampler's log-prob, and p the sampler's probability of
    # the token: about the size of the noise on a logit
    noise: float
    far: float  # share of tokens where it exceeds ``far_noise``
    # noise above which a token counts as far apart; a token that is routed to other experts may be
    far_noise: float = 0.5


HEALTHY: Mapping[tuple[str, bool], HealthyLimits] = {
    # By the lower precision of trainer and sampler, and whether the model has experts. Measured on NeMo-RL main of
    # August 2026 with DTensor v1, on CPUs, three steps a rehearsal; noise and far of each healthy one:
    # Qwen3 0.021 and 0 (v0.7.0 the same), another seed and 4 prompts 0.020 and 0, TP 2 0.023 and 0, clipped_pg 0.023
    # and 0, with validation 0.018 and 0, Llama 0.028 and 0.
    ("bfloat16", False): HealthyLimits(noise=0.06, far=0.05),
    # Qwen3 MoE 0.022 and 0.011, another seed and 4 prompts 0.023 and 0.004, the recipe's own masks 0.024 and 0.005,
    # asynchronous 0.020 and 0.005, over the data plane 0.022 and 0.011. Megatron's were not
    # measured; their gen_kl_error is up to 10 times higher, which a few tokens make.
    ("bfloat16", True): HealthyLimits(noise=0.08, far=0.15),
    # Qwen3 1.2e-6 and 0.
    ("float32", False): HealthyLimits(noise=1e-4, far=0.02),
    # Qwen3 MoE 1.2e-6 and 0.
    ("float32", True): HealthyLimits(noise=1e-4, far=0.02),
    # An fp8 KV cache beside weights in bfloat16, with Megatron, one rehearsal each: Qwen3 0.12 and 0.026, Qwen3 MoE
    # 0.16 and 0.11. So a top-p of 0.8 in the sampler alone may stay unnoticed beside such a cache.
    ("fp8 cache", False): HealthyLimits(noise=0.3, far=0.1),
    ("fp8 cache", True): HealthyLimits(noise=0.4, far=0.25),
}
"""Limits by precision and kind of model: two to three times the largest noise measured in bfloat16, more in float32.

The planted mistakes are far beyond them, in bfloat16: a temperature of 0.6 in the sampler has noise 0.99 and far 0.74,
top-p 0.8 has 0.26 and 0.12, log-probs shifted by a token have 1.5 and 0.76.
"""

MIN_TOKENS = 24
"""Trained tokens below which the size of the mismatch is not judged."""
NONFINITE = "log-probs that are NaN or infinite"
_FAULTS: Mapping[str, tuple[str, str, str]] = {
    # By the id of a cause of `diagnose` that needs neither many tokens nor a real model: fault, setting and way out.
    "nonfinite": (
        NONFINITE,
        "policy.precision",
        "find the overflow; loss_fn.nonfinite decides what the loss does with such sequences",
    ),
    "positive_logprobs": (
        "log-probs above 0, which no distribution has",
        "policy.generation.vllm_cfg.logprobs_mode",
        "set processed_logprobs; the sampler returns logits",
    ),
    "shifted": (
        "log-probs shifted by one token against the other engine's",
        "policy.generation",
        "column t of prev_logprobs and generation_logprobs must hold token t: look at padding, BOS and packing",
    ),
    "zero_logprobs": (
        "log-probs of exactly 0 from one engine where the other one is unsure",
        "policy.generation",
        "have the sampler return a log-prob for each token that it samples",
    ),
}
# A temperature in one engine alone makes |tilt| at least this large.
_MIN_TILT = 0.4
# A filter such as top-p in the sampler alone: at most this share of tokens is likelier to the trainer, and at least
# that share less likely.
_MAX_ABOVE, _MIN_BELOW = 0.03, 0.25
# Share of tokens that one engine's top-p or top-k may leave out and the other's not: ten times the 0.4 % that were
# measured at top-p 0.95 on a random Nemotron-H, whose distributions are flat.
_MAX_OUTSIDE = 0.04


@dataclass(frozen=True)
class Mismatch:
    """Mismatch between trainer and sampler in a rehearsal's records."""

    limits: HealthyLimits  # what is healthy
    tokens: int = 0  # trained tokens with log-probs of both
    noise: float = 0.0  # as in :class:`HealthyLimits`
    far: float = 0.0  # as in :class:`HealthyLimits`
    k3: float = 0.0  # mean of exp(Δ) − 1 − Δ, nats a token
    # share of tokens that the trainer finds likelier than the sampler by more than the healthy noise
    above: float = 0.0
    below: float = 0.0  # share of tokens that the trainer finds less likely by more than the healthy noise
    # share of tokens with a log-prob of exactly 0 from one engine where the other is unsure, if both filter by top-p
    # or top-k. The other measures are without them.
    outside: float = 0.0
    tilt: float = 0.0  # correlation of Δ with the trainer's log-prob over tokens
    cause: str = ""  # fault in a phrase; empty if there is none
    details: str = ""  # what the fault shows in
    setting: str = ""  # the setting that is likely behind it
    fix: str = ""  # the way out
    since: int | None = None  # first step that shows the fault; None if it is that of all steps
    unjudged: str = ""  # why there is no verdict; empty if there is one

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.unjudged:
            return f"not judged: {self.unjudged}"
        if self.cause:
            return f"{self.cause}: {self.details}"
        outside = (
            f"; the top-p or top-k of one engine alone leaves out {self.outside:.2%} of the sampled tokens. NeMo-RL "
            "sets their log-prob to 0, which biases weights and masks over sequences (GM104)"
        )
        return f"healthy: {self.size}{outside if self.outside else ''}"

    @property
    def size(self) -> str:
        """The mismatch beside what is healthy."""
        return (
            f"noise of a typical token {self.noise:.2g} (healthy tiny models: up to {self.limits.noise:g}), "
            f"{self.far:.1%} of {self.tokens} tokens far apart (up to {self.limits.far:.0%}), "
            f"k3 {self.k3:.2g} nats a token"
        )


def healthy_limits(
    trainer: str, sampler: str, *, experts: bool, temperature: float = 1.0, fp8_cache: bool = False
) -> HealthyLimits:
    """Return the limits for a trainer's and a sampler's precision.

    Args:
        temperature: ``policy.generation.temperature``. Both engines divide their logits by it, and the noise on the
            logits with them. The limits were measured at 1, so they are divided, too, unless it is no temperature.
        fp8_cache: True if the sampler has an fp8 KV cache beside weights in bfloat16.
    """
    both_exact = trainer == sampler == "float32"
    limits = HEALTHY["fp8 cache" if fp8_cache else "float32" if both_exact else "bfloat16", experts]
    if temperature <= 0:
        return limits
    return replace(limits, noise=limits.noise / temperature, far_noise=limits.far_noise / temperature)


def has_experts(model: Path) -> bool:
    """Return True if the model in a folder is a mixture of experts."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return False
    return any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def check_mismatch(folder: Path, limits: HealthyLimits, *, is_filtered: bool = False) -> Mismatch:
    """Diagnose the records in a folder.

    Args:
        folder: ``loss_fn.record.dir`` of the rehearsal, or its ``logger.log_dir``, where NeMo-RL logs the same
            log-probs.
        is_filtered: True if the recipe samples with top-p or top-k. NeMo-RL's trainer then filters as well, and sets
            the log-prob of a token outside its own filter to 0 (``mask_out_neg_inf_logprobs``).
    """
    try:
        run = find_run(folder)
        detections = diagnose(survey_run(run)).detections
        measured = _measure(run.paths(), limits, is_filtered=is_filtered)
    except GeomaskError as error:
        return Mismatch(limits, unjudged=str(error))
    explains_zeros = is_filtered or _looks_filtered(measured)
    for name, (cause, setting, fix) in _FAULTS.items():
        if detections[name].is_shown and not (name == "zero_logprobs" and explains_zeros):
            details, steps = detections[name].description, detections[name].steps
            fault = replace(measured, cause=cause, details=details, setting=setting, fix=fix)
            return replace(fault, since=min(steps, default=None))
    if measured.tokens < MIN_TOKENS:
        unjudged = f"only {measured.tokens} trained tokens have log-probs of both engines; {MIN_TOKENS} are needed"
        return replace(measured, unjudged=unjudged)
    if measured.outside > _MAX_OUTSIDE:
        return replace(
            measured,
            cause="top-p or top-k leaves out other tokens in the trainer than in the sampler",
            details=f"{measured.outside:.1%} of the sampled tokens have a log-prob of exactly 0 from one engine only",
            setting="policy.generation.top_p, policy.generation.top_k",
            fix="set 1.0 and null, or look for why the engines' distributions differ (temperature, precision, weights)",
        )
    if measured.noise <= limits.noise and measured.far <= limits.far:
        return measured
    return _explain(measured)


def _looks_filtered(measured: Mismatch) -> bool:
    """Return True if many tokens are less likely to the trainer and hardly any is likelier, as after top-p or top-k.

    Where such a filter of the sampler alone leaves a single token, the sampler's log-prob of it is 0.
    """
    return measured.above <= _MAX_ABOVE and measured.below >= _MIN_BELOW


def _measure(files: Sequence[Path], limits: HealthyLimits, *, is_filtered: bool) -> Mismatch:
    """Measure the mismatch over all trained tokens of some records."""
    np: Any = importlib.import_module("numpy")
    parts = [_logprobs(path) for path in files]
    gen, trainer = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    # A filter that leaves a single token gives it a log-prob of 0. NeMo-RL's trainer gives 0 to a token outside, too.
    has_one_zero = ((trainer == 0) & (gen < UNSURE_LOGPROB)) | ((gen == 0) & (trainer < UNSURE_LOGPROB))
    is_outside = has_one_zero & is_filtered
    outside = float(is_outside.mean()) if len(gen) else 0.0
    gen, trainer = gen[~is_outside], trainer[~is_outside]
    delta = trainer - gen
    if not len(delta):
        return Mismatch(limits, outside=outside)
    noise = np.abs(delta) / np.maximum(1 - np.exp(np.minimum(gen, 0.0)), 1e-3)
    is_large = noise > limits.noise
    spread = float(np.std(delta) * np.std(trainer))
    return Mismatch(
        limits,
        tokens=len(delta),
        noise=float(np.median(noise)),
        far=float((noise > limits.far_noise).mean()),
        k3=float((np.expm1(np.minimum(delta, 40.0)) - delta).mean()),
        above=float((is_large & (delta > 0)).mean()),
        below=float((is_large & (delta < 0)).mean()),
        outside=outside,
        tilt=float(np.mean((delta - delta.mean()) * (trainer - trainer.mean()))) / spread if spread else 0.0,
    )


def _logprobs(path: Path) -> tuple[Any, Any]:
    """Return the log-probs of sampler and trainer at the trained tokens of a record, where both are finite."""
    np: Any = importlib.import_module("numpy")
    columns = _read_log(path) if path.suffix == ".jsonl" else _read_record(path)
    gen: list[float] = []
    trainer: list[float] = []
    for index, mask in enumerate(columns["mask"]):
        # NeMo-RL leaves π_old at 0 if the loss does not need it. Before the first update, π_θ has the same values.
        prev, sampled = columns["prev"][index], columns["gen"][index]
        scored = prev if prev is not None and any(prev) else columns["curr"][index]
        if scored is None or sampled is None:
            continue
        for is_trained, sampled_logprob, scored_logprob in zip(mask, sampled, scored, strict=True):
            if is_trained and sampled_logprob is not None and scored_logprob is not None:
                gen.append(sampled_logprob)
                trainer.append(scored_logprob)
    pairs = np.array([gen, trainer], dtype=float)
    finite = pairs[:, np.isfinite(pairs).all(axis=0)]
    return finite[0], finite[1]


def _read_record(path: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = (
        require_arrow("pyarrow.parquet").read_table(path, columns=["mask", "gen", "prev", "curr"]).to_pydict()
    )
    return columns


def _read_log(path: Path) -> dict[str, list[Any]]:
    """Read ``train_data_step{N}.jsonl``, whose lines hold one or more sequences each."""
    columns: dict[str, list[Any]] = {"mask": [], "gen": [], "prev": [], "curr": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        for name, key in (("mask", "token_loss_mask"), ("gen", "generation_logprobs"), ("prev", "prev_logprobs")):
            columns[name] += fields[key]
        columns["curr"] += [None] * len(fields["token_loss_mask"])
    return columns


def _explain(measured: Mismatch) -> Mismatch:
    """Return the measurement with the likely cause of a mismatch that is larger than a healthy one."""
    sides = f"{measured.below:.0%} of the tokens are less likely to the trainer and {measured.above:.0%} likelier"
    if _looks_filtered(measured):
        return replace(
            measured,
            cause="log-probs renormalised by top-p or top-k in the sampler only",
            details=f"{sides}; {measured.size}",
            setting="policy.generation.top_p, policy.generation.top_k",
            fix="set 1.0 and null, or have the trainer filter its logits as the sampler does",
        )
    if abs(measured.tilt) >= _MIN_TILT:
        shape = "sharper" if measured.tilt < 0 else "flatter"
        return replace(
            measured,
            cause="another temperature in the sampler than in the trainer",
            details=(
                f"the sampler's distribution is {shape}: Δ and the log-prob correlate by {measured.tilt:.2f}; "
                f"{measured.size}"
            ),
            setting="policy.generation.temperature",
            fix="it must reach both engines, and vllm_cfg.logprobs_mode must be processed_logprobs",
        )
    return replace(
        measured,
        cause="a larger mismatch between sampler and trainer than a healthy tiny model has",
        details=f"{measured.size}; {sides}",
        setting="policy.precision, policy.generation",
        fix="run nemo-geomask diagnose on the records; compare precision, weights and positions of both engines",
    )
