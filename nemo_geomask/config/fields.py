"""Fields of the ``loss_fn:`` block, each validated on its own; ``conflicts`` checks them against each other.

Every field of NeMo-RL's ``ClippedPGLossConfig`` (v0.6.0, v0.7.0, main of August 2026) keeps its name, default and
meaning; this package adds fields of its own. ``docs/reference/loss_reference.md`` and the JSON Schema are generated
from each field's description, formula and source.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, SerializeAsAny, field_validator

from nemo_geomask.config.corrections import LEVELS, TRUNCATIONS
from nemo_geomask.config.presets import MaskSpec, validate_masks
from nemo_geomask.config.strict import StrictModel

CorrectionLevel = Annotated[str, LEVELS]
KLType = Literal["k1", "k2", "k3", "k4"]
Normalization = Literal["tokens", "sequences", "documents", "constant"]
TruncationType = Annotated[str, TRUNCATIONS]

_NEMO_RL = "NeMo-RL"

PULL_REQUEST_KEYS = {
    "loss_mode": ("4069", "name, or for dppo_binary_tv masks: [{preset: dppo_tv, delta: …}]"),
    "sapo_enabled": ("2464", "name: sapo"),
    "actor_loss_type": ("2455", "name: sapo, or for ppo_clip name: clipped_pg"),
    "sapo_tau_pos": ("2464", "options: {tau_pos: …}"),
    "sapo_tau_neg": ("2464", "options: {tau_neg: …}"),
    "metrics_level": ("3751", "metrics: full, or for minimal metrics: nemo_rl"),
    "enable_torch_compile": ("3751", "compile"),
    "seq_logprob_error_in_loss": (
        "4171",
        "the threshold as max of a mask, {log_ratio: total, level: sequence_mean, statistic: ratio_abs, max: 2}, and "
        "in a loop of your own denominator: kept_in_loss",
    ),
}
"""Settings that open NeMo-RL pull requests add: by key, the number of the request and what to write here instead."""


def _field(default: Any, description: str, *, formula: str = "", source: str = _NEMO_RL, **limits: Any) -> Any:
    extra: dict[str, JsonValue] = {"source": source, **({"formula": formula} if formula else {})}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class BatchVeto(StrictModel):
    """``loss_fn.batch_veto``: no update on a batch whose engines disagree too much."""

    estimator: Literal["k1", "k3"] = Field(
        default="k3",
        description="Estimator of KL(μ ‖ π_old) from the sampled tokens: k1 is the mean of gen − prev, k3 the mean of "
        "e^(prev − gen) − 1 − (prev − gen).",
    )
    max: float = Field(gt=0, description="Largest estimate, in absolute value, of a batch that is trained on.")
    max_in_a_row: int = Field(
        default=10, ge=1, description="Number of batches in a row that may be vetoed; one more ends the run."
    )


class Recording(StrictModel):
    """``loss_fn.record``: write what each step was trained on to Parquet files."""

    dir: str = Field(min_length=1, description="Directory of the run's records; the training process writes to it.")
    fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of each step's sequences, or prompts, to record; the number is rounded up.",
    )
    by: Literal["sequence", "group"] = Field(
        default="sequence",
        description="`sequence`: choose single sequences; `group`: choose prompts, with all their sequences.",
    )
    every: int = Field(
        default=1, ge=1, description="Distance in steps between recorded steps; the first step is always recorded."
    )
    entropy: bool = Field(
        default=False,
        description="Record the entropy at each token; NeMo-RL needs `logprob_backend: geomask` or `geomask_linear`.",
    )


class LossFields(StrictModel):
    """The fields of a ``loss_fn:`` block; :class:`~.loss_settings.LossSettings` adds what is derived from them."""

    name: str = _field(
        "clipped_pg",
        "Objective: an entry point in group `nemo_geomask.losses`, or `module:attribute`.",
        source="this package",
    )
    options: dict[str, Any] = _field(
        {},
        "Settings of the chosen objective; the table of objectives lists them.",
        source="this package",
    )

    # --- loss type
    disable_ppo_ratio: bool = _field(
        False, "REINFORCE/RLOO: drop the ratio and the clip.", source="NeMo-RL; arXiv:2402.14740"
    )
    token_level_loss: bool = _field(
        True,
        "true: mean over the step's tokens; false: mean over sequences of each sequence's mean.",
        formula="Σ m·ℓ / N_tok, or Σ_i (Σ_t m·ℓ / n_i) / N_seq",
    )
    loss_normalization: Normalization | None = _field(
        None,
        "Denominator of the loss. null: `tokens` or `sequences`, by `token_level_loss`. `documents`: sum over tokens "
        "divided by the sequences in the step. `constant`: the same divided by `loss_normalization_constant`.",
        formula="tokens 1/N_tok; sequences 1/(n_i·N_seq); documents 1/N_seq; constant 1/(C·N_seq)",
        source="Fast-LLM PR 502 (`normalize_by_documents`); Dr. GRPO arXiv:2503.20783",
    )
    loss_normalization_constant: float | None = _field(
        None,
        "C of `loss_normalization: constant`, in tokens; usually the longest response allowed.",
        source="Dr. GRPO arXiv:2503.20783",
        gt=0,
    )
    sequence_level_importance_ratios: bool = _field(
        False,
        "GSPO's ratio: one for each sequence. Needs a sequence-level loss.",
        source="NeMo-RL; arXiv:2507.18071 eq. 7",
    )

    ratio_anchor: Literal["prev", "gen"] = _field(
        "prev",
        "Log-probs that the policy ratio is taken against. `gen`: those of the generation engine; the ratio then "
        "contains the mismatch, the weight is 1, and `prev_logprobs` are not needed unless `batch_veto`, `denominator: "
        "kept`, `use_kl_in_reward` or a mask on `mismatch` or `policy` reads them.",
        formula="prev: r = π_θ/π_old; gen: r = π_θ/μ",
        source="verl `bypass_mode`; DPPO arXiv:2602.04879",
    )

    proximal_policy: Literal["recomputed", "interpolated"] = _field(
        "recomputed",
        "π_old. `recomputed`: `prev_logprobs`. `interpolated`: between the policy that sampled the token and the "
        "current one, by the token's lag; no forward pass computes `prev_logprobs`. It reads `token_weight_versions` "
        "[B, T] and `training_weight_version` [B]; docs/reference/nemo_rl.md says where NeMo-RL has them.",
        formula="prev = gen + α·(curr − gen), without gradient; α = max(0, (v − 1 − v_t)/(v − v_t)), 0 for v_t ≥ v",
        source="A-3PO, arXiv:2512.06547; AReaL `prox_logp_method: loglinear`",
    )

    audit_fraction: float = _field(
        0.0,
        "Fraction of each batch's sequences whose `prev_logprobs` are computed although the loss does not need them, "
        "so that metrics show mismatch and staleness (`geomask/audit/…`). The sequences are chosen by a hash of step "
        "and row; their number is rounded up to one that divides evenly among the workers.",
        source="this package",
        ge=0,
        le=1,
    )

    # --- clipping
    ratio_clip_min: float = _field(0.2, "Distance of the lower clip bound from 1.", ge=0)
    ratio_clip_max: float = _field(0.2, "Distance of the upper clip bound from 1.", ge=0)
    ratio_clip_c: float | None = _field(
        None,
        "Dual clip: bound on the ratio where the advantage is negative. null: off.",
        source="NeMo-RL; arXiv:1912.09729",
        gt=1,
    )

    # --- KL to the reference
    reference_policy_kl_penalty: float = _field(0.01, "β, weight of the KL term. 0: no reference needed.", ge=0)
    reference_policy_kl_type: KLType = _field(
        "k3",
        "Estimator of the KL's value, also used for `gen_kl_error` and `policy_kl_error`.",
        formula="x = curr − ref: k1 x; k2 x²/2; k3 e^(−x) − 1 + x; k4 r·x with the token's policy ratio r",
        source="NeMo-RL; http://joschu.net/blog/kl-approx.html; k4: open-instruct",
    )
    reference_policy_kl_gradient: KLType | None = _field(
        None,
        "Estimator whose derivative is the KL term's gradient. null: as in NeMo-RL, the derivative of the value "
        "estimator with the score-function term. See docs/background/kl.md for which are unbiased.",
        source="this package; arXiv:2506.09477",
    )
    kl_input_clamp_value: float | None = _field(20.0, "Bound on |curr − ref| inside the estimator. null: none.", gt=0)
    kl_output_clamp_value: float | None = _field(
        10.0, "Bound on the weighted estimate, in absolute value. null: none.", gt=0
    )
    use_kl_in_reward: bool = _field(
        False, "NeMo-RL subtracts the KL penalty from the reward; the loss then has no KL term."
    )
    use_on_policy_kl_approximation: bool = _field(
        False, "Weight the KL estimate by the ratio to the generation engine.", formula="w = exp(curr − gen)"
    )
    kl_ratio_anchor: Literal["gen", "prev"] = _field(
        "gen",
        "Policy that the weight of `use_on_policy_kl_approximation` is taken against. With k3 and no "
        "`reference_policy_kl_gradient`, all of w·k3 is differentiated: an unbiased gradient of the KL.",
        formula="gen: w = exp(curr − gen); prev: w = exp(curr − prev)",
        source="TRL `use_bias_correction_kl`, slime `use_unbiased_kl`",
    )
    kl_tokens: Literal["trained", "kept"] = _field(
        "trained",
        "Tokens of the KL term: all that train, or those that the masks in the loss keep.",
        source="prime-rl PR 2458; slime",
    )

    # --- importance-sampling correction
    use_importance_sampling_correction: bool = _field(
        False,
        "Multiply the surrogate by the weight against the train/generation mismatch. Under `ratio_anchor: gen` the "
        "ratio corrects the mismatch whatever the value; NeMo-RL requires `true` in asynchronous training and with FP8 "
        "generation.",
    )
    is_correction_level: CorrectionLevel | None = _field(
        None,
        "Level of that weight, independent of the ratio's level. null: `sequence` under "
        "`sequence_level_importance_ratios`, else `token`. `masks_only`: the weight is 1 and the masks alone act, "
        "where NeMo-RL requires `use_importance_sampling_correction: true`.",
        formula="token exp(Δ_t); turn exp(Σ Δ) over the contiguous run of trained tokens, turn_mean exp(mean Δ); "
        "sequence exp(Σ_t Δ_t); sequence_mean exp(mean_t Δ_t); Δ = prev − gen",
        source="NeMo-RL PR 2269; turn: ROLL `train_infer_corrections.py`, SORL arXiv:2511.20718",
    )
    is_correction_batch_normalize: bool = _field(
        False,
        "Divide the weight, after truncation, by its mean over the rollout batch: over the trained tokens, or at "
        "sequence levels over the trained sequences. The mean is taken before the step, so it is one number for all "
        "ranks, microbatches and optimiser steps on the batch.",
        formula="w ← w / mean(w)",
        source="verl `rollout_is_batch_normalize`; slime `tis_batch_normalize`",
    )
    truncated_importance_sampling_type: TruncationType | None = _field(
        None,
        "`tis` clamps the weight to [min, ratio]; `icepop` zeroes it outside; `seq-mask-tis` zeroes sequences whose "
        "geometric-mean ratio is outside and leaves token weights as they are.",
        formula="tis clamp(w, min, max); icepop w·1[min ≤ w ≤ max]; seq-mask-tis w_t·1[min ≤ exp(mean Δ) ≤ max]",
    )
    truncated_importance_sampling_ratio: float | None = _field(
        None, "Upper bound of the truncation, on the weight itself.", gt=0
    )
    truncated_importance_sampling_ratio_min: float | None = _field(
        None, "Lower bound of the truncation. null: 0 for `tis`; the other types need it.", ge=0
    )

    # --- rejection
    drop_filtered_tokens: bool = _field(
        False,
        "For recipes that sample with top-k or top-p: leave a token out where the training engine's own filter removed "
        "it, which NeMo-RL writes as a log-prob of exactly 0, beside an unsure sampler (gen < −0.001). "
        "`curr_logprobs_keep_mask` of the batch, if there is one, is applied in any case. Such tokens have no weight, "
        "mask, statistic, KL or surrogate; the denominators count them.",
        source="NeMo-RL PRs 3551, 3778, 4154",
    )
    masks: tuple[SerializeAsAny[MaskSpec], ...] = _field(
        (),
        "Rejection masks: a token trains if every mask keeps it. They act on the surrogate only. See "
        "docs/reference/masks.md.",
        source="this package",
    )
    denominator: Literal["original", "kept", "kept_in_loss"] = _field(
        "original",
        "Tokens and sequences that the loss is a mean over. `original`: all trained ones. `kept`: those that the masks "
        "on the mismatch keep; these masks are then applied before the step, to the token and sample masks, so that "
        "what they remove is also left out of counts, pooled ratios, KL and metrics. `kept_in_loss`: the tokens that "
        "all masks keep, also those on `curr`. The loss knows their number K after the last microbatch, so a training "
        "loop of your own multiplies the step's gradient by G/K, `nemo_geomask.metrics.kept_factor`.",
        formula="original: N counts all trained tokens; kept: N counts those kept; kept_in_loss: ∇L · G/K",
        source="mlcommons/training issue 905; kept_in_loss: NeMo-RL PR 4171",
    )
    max_token_lag: int | None = _field(
        None,
        "τ, in updates: tokens sampled more than τ updates ago are left out of everything, the denominators included, "
        "by the pre-step pass. It reads `token_weight_versions` [B, T] and `training_weight_version` [B], which a "
        "training loop of your own adds to the batch.",
        formula="train on t if v − v_t ≤ τ",
        source="xtuner PR 2003; slime and miles `--mask-offpolicy-in-partial-rollout`",
        ge=0,
    )
    batch_veto: BatchVeto | None = _field(
        None,
        "`{estimator, max, max_in_a_row}`: skip the update of a batch whose mismatch KL exceeds `max`: no gradient, no "
        "optimiser step. More than `max_in_a_row` (10) vetoes in a row end the run.",
        formula="|mean_t k(prev − gen)| ≤ max; k1: gen − prev; k3: e^(prev − gen) − 1 − (prev − gen)",
        source="When Speed Kills Stability (2025): skip above 0.1",
    )
    nonfinite: Literal["drop_sequence", "drop_token", "raise"] = _field(
        "drop_sequence",
        "What to do about a NaN or infinite log-prob (`curr`, `gen`, `prev`, `ref`) or advantage at a trained token. "
        "Metrics count them in any case. `raise` reads the counts back from the device at every call.",
        source="this package",
    )

    # --- on-policy and further objectives
    force_on_policy_ratio: bool = _field(
        False, "Use `curr` in place of `prev`: ratio 1. Needs exactly one update for each rollout.", formula="r = 1"
    )
    use_cispo: bool = _field(False, "CISPO within `clipped_pg`.", source="NeMo-RL; arXiv:2506.13585")
    positive_example_nll_weight: float = _field(
        0.0,
        "VAPO: weight of the NLL of sequences with positive reward.",
        formula="λ · mean over their tokens of −log π, with this weight λ",
        source="NeMo-RL; arXiv:2504.05118 eq. 10",
        ge=0,
    )
    positive_example_nll_normalization: Literal["microbatch", "loss"] = _field(
        "microbatch",
        "`microbatch`: divide by the microbatch's count as NeMo-RL does, so that the loss depends on how the batch is "
        "split. `loss`: divide by the denominator of the loss.",
        source="this package",
    )

    # --- how it runs
    compile: Literal["auto"] | bool = _field(
        "auto",
        "Compile the loss and its metrics into one graph with `torch.compile`. `auto`: on a GPU, if a compiler works; "
        "the log has one line with the choice.",
        source="this package",
    )
    metrics: Literal["full", "nemo_rl"] = _field(
        "full", "Metrics that a call reports. `nemo_rl`: only those of NeMo-RL's class.", source="this package"
    )
    compare_ranks: bool = _field(
        True,
        "Compare settings and packed rows among the ranks that share sequences (context parallelism), by a small "
        "collective in each call, and raise if they differ. All ranks must have the same value.",
        source="this package",
    )
    record: Recording | None = _field(
        None,
        "`{dir, fraction, by, every, entropy}`: write what steps are trained on to Parquet files, see "
        "docs/reference/records.md. Sequences, or prompts with `by: group`, are chosen by a hash of the step's number "
        "and their own.",
        source="this package",
    )
    logprob_backend: Literal["nemo_rl", "geomask", "geomask_linear", "mcore", "te"] = _field(
        "nemo_rl",
        "Code that computes the log-probs in NeMo-RL's workers. `nemo_rl`: NeMo-RL, which passes them to the loss. "
        "With the others the loss takes the logits, and a packed microbatch is one call: `geomask` uses this package's "
        "kernels, `mcore` and `te` those of megatron-core and transformer-engine, for comparison; `geomask_linear` "
        "takes hidden states and never forms the matrix of logits.",
        source="this package",
    )

    @classmethod
    def _explain_unknown_key(cls, key: str, guess: str | None) -> str:
        if key in PULL_REQUEST_KEYS:
            number, replacement = PULL_REQUEST_KEYS[key]
            return f"NeMo-RL PR {number} has it; here write {replacement}"
        hint = super()._explain_unknown_key(key, guess)
        return f"{hint} (nemo-geomask translate knows the names of other systems)"

    @field_validator("masks", mode="wrap")
    @classmethod
    def _validate_masks(cls, masks: Any, _: Any) -> Any:
        return validate_masks(masks)
