"""The losses once more: float64, one Python loop over sequences and one over tokens, written from the papers.

Nothing here is shared with the library but the configuration object that is read. Values that no gradient flows through
are Python floats; log π_θ of each token is a float64 scalar of its own, and autograd differentiates what the loops
build from it. Token masks are 0/1; sample masks may be fractional.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# Of the bins of |Δ|: half octaves from 2^-13 to 8.
EDGES = [2.0 ** (power / 2) for power in range(-26, 7)]
LIMIT = 40.0  # exponents above saturate: float32 overflows at 88.7, and the product of two ratios must fit


@dataclass
class Answer:
    """What the oracle says of one batch; nested lists are [B][T-1]."""

    loss: float = 0.0
    grad: list[list[float]] = field(default_factory=list)
    grad_unfiltered: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    weights: list[list[float]] = field(default_factory=list)
    sequence_weights: list[float] = field(default_factory=list)
    kept: list[list[bool]] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)
    margin: float = math.inf
    """Smallest distance of a compared number to its bound; float32 may decide otherwise where it is tiny."""


@dataclass(frozen=True)
class Rule:
    label: str
    log_ratio: str
    level: str
    statistic: str
    low: float
    high: float
    when: str
    share: float | None = None
    mean: float | None = None
    cppo: Any = None

    @property
    def by_token(self) -> bool:
        return self.level in ("token", "mean_size") or self.level.startswith(("prefix", "turn"))


def rules(masks: Any) -> list[Rule]:
    """Presets spelled out; bounds as logarithms for ratios."""

    def log(bound: float | None, default: float) -> float:
        return default if not bound else math.log(bound)

    out: list[Rule] = []
    for mask in masks:
        preset = getattr(mask, "preset", None)
        if preset == "opsm":
            rule = ("opsm", mask.log_ratio, "sequence_mean", "ratio", -mask.delta, math.inf, "negative_advantage")
        elif preset == "cppo":
            bounds = (-(mask.delta_low or mask.delta), mask.delta, "pushing", None, None, mask)
            rule = ("cppo", mask.log_ratio, "prefix_excess", "prob_diff", *bounds)
        elif preset == "vaco":
            rule = ("vaco", mask.log_ratio, "mean_size", mask.statistic, -mask.delta, mask.delta, "pushing")
        elif preset in ("dppo_tv", "dppo_kl"):
            statistic = {"dppo_tv": "prob_diff", "dppo_kl": "binary_kl"}[preset]
            low = -(mask.delta_low or mask.delta)
            rule = (preset, mask.log_ratio, "token", statistic, low, mask.delta, "pushing")
        elif preset == "m2po":
            rule = ("m2po", "mismatch", "token", "k2", -math.inf, math.inf, "always", None, mask.tau / 2)
        elif preset == "kpop":
            rule = ("kpop", "mismatch", "token", "binary_kl_max", -mask.max, mask.max, "always")
        elif preset == "trust_region":
            rule = ("trust_region", "mismatch", mask.level, mask.statistic, -math.inf, mask.max, "always")
        elif preset is not None:
            level = {"geometric": "sequence_mean", "product": "sequence", "icepop": "token", "veto": "sequence_max"}
            bounds = (log(mask.min, -math.inf), log(mask.max, math.inf))
            rule = (preset, "mismatch", level[preset], "ratio", *bounds, "always")
        elif mask.drop_at_most or mask.until_mean:
            everything = (-math.inf, math.inf, mask.when, mask.drop_at_most, mask.until_mean)
            rule = ("mask", mask.log_ratio, mask.level, mask.statistic, *everything)
        elif mask.statistic == "ratio":
            bounds = (log(mask.min, -math.inf), log(mask.max, math.inf))
            rule = ("mask", mask.log_ratio, mask.level, "ratio", *bounds, mask.when)
        else:
            bounds = (mask.min or -math.inf, math.inf if mask.max is None else mask.max)
            rule = ("mask", mask.log_ratio, mask.level, mask.statistic, *bounds, mask.when)
        wanted = mask.label or rule[0]
        label, number = wanted, 1
        while label in [r.label for r in out]:
            number += 1
            label = f"{wanted}_{number}"
        out.append(Rule(label, *rule[1:]))
    return out


def exp(x: float) -> float:
    return math.exp(min(x, LIMIT))


def binary(statistic: str, p: float, q: float) -> float:
    """Distances of {token, any other} under p and under q, by their definitions."""

    def kl(a: float, b: float) -> float:
        a, b = min(a, 1 - 1e-6), min(b, 1 - 1e-6)
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    p, q = min(p, 1.0), min(q, 1.0)
    if statistic == "prob_diff":
        return p - q
    size = {"binary_kl": kl(q, p), "binary_kl_reverse": kl(p, q), "binary_kl_max": max(kl(q, p), kl(p, q))}
    return math.copysign(size[statistic], p - q) if p != q else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def number(x: Any) -> float:
    """The value of a 0-d tensor or a float, off the graph."""
    return x.item() if isinstance(x, torch.Tensor) else float(x)


def estimate(kind: str, x: float, ratio: float = 1.0) -> float:
    """KL estimators for x = log p − log q, in floats."""
    return {"k1": x, "k2": x * x / 2, "k3": exp(-x) - 1 + x, "k4": ratio * x}[kind]


def evaluate(
    config: Any,
    curr: torch.Tensor,
    data: Mapping[str, torch.Tensor],
    seqs: float,
    toks: float,
    options: Mapping[str, float] | None = None,
) -> Answer:
    """Loss, gradient and metrics of one microbatch under the settings in force."""
    return _Evaluation(config, curr, data, float(seqs), float(toks), dict(options or {})).answer


class _Evaluation:
    def __init__(self, config, curr, data, seqs, toks, options) -> None:
        self.c, self.seqs, self.toks, self.options = config, seqs, toks, options
        self.answer = Answer()
        self.metrics: dict[str, float] = {}
        self.beta = 0.0 if config.use_kl_in_reward else config.reference_policy_kl_penalty
        self.rules = rules(config.masks)
        self.anchor = config.ratio_anchor
        # Under the generation engine's anchor π_old is there only where something else asks for it.
        asked = config.batch_veto or config.denominator == "kept" or config.use_kl_in_reward
        asked = asked or any(rule.log_ratio in ("mismatch", "policy") for rule in self.rules)
        asked = asked or config.kl_ratio_anchor == "prev"
        self.interpolates = config.proximal_policy == "interpolated"
        self.reads_prev = not (config.force_on_policy_ratio or self.interpolates) and bool(
            self.anchor == "prev" or asked
        )
        self.knows_prev = self.reads_prev or config.force_on_policy_ratio or self.interpolates
        self.level = config.is_correction_level or ("sequence" if config.sequence_level_importance_ratios else "token")
        # Pools over sequences before the surrogate, so the tokens' own ratios are reported beside.
        self.by_sequence = config.name in ("gspo", "gspo_token", "gmpo", "vespo", "topr") or (
            config.name == "clipped_pg" and config.sequence_level_importance_ratios
        )
        self.truncation = config.truncated_importance_sampling_type
        if config.truncated_importance_sampling_ratio is None:
            self.truncation = None
        self.normalization = config.loss_normalization or ("tokens" if config.token_level_loss else "sequences")
        self.read(curr, data)
        self.rules = [self.spend(rule) for rule in self.rules]
        self.declare()
        self.run()

    # ------------------------------------------------------------------ input

    def read(self, curr, data) -> None:
        config = self.c
        self.rows, self.width = curr.shape
        columns = {"gen": "generation_logprobs", "adv": "advantages"}
        if self.reads_prev:
            columns["prev"] = "prev_logprobs"
        if self.interpolates:
            columns["sampled_version"] = "token_weight_versions"
        self.sees_ref = "reference_policy_logprobs" in data
        if self.sees_ref:
            columns["ref"] = "reference_policy_logprobs"
        unfiltered = data.get("curr_logprobs_unfiltered") if self.beta else None
        self.sample = [number(value) for value in data["sample_mask"]]
        self.rewards = None
        if config.positive_example_nll_weight and "rewards" in data:
            self.rewards = [number(value) for value in data["rewards"]]
        self.tokens: list[list[dict[str, Any]]] = []
        self.declared: list[int] = []  # n_i, before anything is dropped
        names = ("curr", "advantages", *(name for name in ("gen", "prev") if name in columns))
        names += ("ref",) if self.beta else ()
        names += ("sampled_version",) if self.interpolates else ()
        bad = dict.fromkeys(names, 0)
        dropped = 0
        for i in range(self.rows):
            row = []
            for t in range(self.width):
                # Column t + 1 of the data speaks of the token whose log-prob stands at position t.
                if not float(data["token_mask"][i, t + 1]):
                    continue
                leaf = torch.tensor(float(curr[i, t]), dtype=torch.float64, requires_grad=True)
                token = {name: float(data[key][i, t + 1]) for name, key in columns.items()}
                token |= {"i": i, "t": t, "curr": leaf, "c": number(leaf)}
                token["kl_curr"] = leaf
                if unfiltered is not None:
                    value = float(unfiltered[i, t])
                    token["kl_curr"] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
                if not self.reads_prev:
                    token["prev"] = token["c"]
                if self.interpolates:
                    lag = float(data["training_weight_version"][i]) - token["sampled_version"]
                    share = (lag - 1) / lag if lag > 0 else 0.0
                    token["prev"] = token["gen"] + share * (token["c"] - token["gen"])
                row.append(token)
            self.declared.append(len(row))
            for token in row:
                # A turn ends at a column that isn't trained, whatever values are dropped.
                members = data.get("turn_mask", data["token_mask"])
                token["turn"] = sum(not float(value) for value in members[i, : token["t"] + 1])
            if not self.sample[i]:
                row = []
            good = []
            for token in row:
                keys = {"curr": "c", "advantages": "adv"}
                wrong = [name for name in names if not math.isfinite(token[keys.get(name, name)])]
                for name in wrong:
                    bad[name] += 1
                if not wrong:
                    good.append(token)
            if len(good) < len(row) and config.nonfinite == "raise":
                raise ArithmeticError("non-finite")
            if len(good) < len(row) and config.nonfinite == "drop_sequence":
                dropped += 1
                good = []
                self.sample[i] = 0.0
            self.tokens.append(good)
        self.valid_samples = sum(number(value) for value in data["sample_mask"])
        self.metrics |= {f"geomask/nonfinite_{name}": count for name, count in bad.items()}
        self.metrics["geomask/dropped_sequences"] = dropped
        # Here masks and counts are valid; tests/losses/test_bad_inputs.py has those that are not.
        self.metrics |= {f"geomask/invalid_{name}": 0.0 for name in ("token_mask", "sample_mask", "counts")}

    # ---------------------------------------------------------------- helpers

    def near(self, value: float, bound: float) -> None:
        """Remember how close a decision was."""
        if math.isfinite(bound):
            self.answer.margin = min(self.answer.margin, abs(value - bound))

    def side(self, value: float, low: float, high: float) -> int:
        self.near(value, low)
        self.near(value, high)
        return -1 if value < low else 1 if value > high else 0

    def clip(self, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        side = self.side(number(x), low, high)
        return x if side == 0 else x.new_tensor(low if side < 0 else high)

    def add_token(self, name: str, token: dict[str, Any], value: float) -> None:
        self.metrics[name] += self.sample[token["i"]] * value / self.toks if self.toks else 0.0

    def add_sequence(self, name: str, i: int, value: float) -> None:
        self.metrics[name] += self.sample[i] * value / self.seqs if self.seqs else 0.0

    def declare(self) -> None:
        names = ["probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error"]
        names += ["js_divergence_error", "approx_entropy", "kl_penalty", "positive_nll_loss"]
        own = ["saturated_ratio", "clip_fraction_low", "clip_fraction_high", "kept_tokens"]
        if self.knows_prev:
            names.append("sampling_importance_ratio")
            own += ["weight_raw_mean", "weight_raw_sq", "weight_mean", "weight_sq", "weight_live", "saturated_weight"]
            own += ["mismatch_abs", "mismatch_k1", "mismatch_k3", "policy_abs", "policy_k3"]
        own += ["total_abs", "total_k1", "total_k3", "positive_logprobs", "zero_gen_logprobs"]
        own += [
            f"{'mismatch' if self.knows_prev else 'total'}_{name}"
            for name in ("max", *(f"bin_{at:02}" for at in range(34)))
        ]
        if self.sees_ref:
            own += ["reference_k1", "reference_k3", "reference_k1_sequence"]
        if self.by_sequence:
            own.append("token_ratio")
        if self.c.ratio_clip_c is not None:
            own.append("dual_clip_fraction")
        for rule in self.rules:
            own += [f"mask/{rule.label}/removed{which}" for which in ("", "_low", "_high")]
        names += [f"geomask/{name}" for name in own]
        if self.truncation:
            names.append("is_oob_ratio")
        self.metrics |= dict.fromkeys(names, 0.0)
        for name in ("probs_ratio", "probs_ratio_clamped"):
            self.metrics |= {f"{name}_min": math.inf, f"{name}_max": -math.inf}
        self.metrics["num_valid_samples"] = self.valid_samples

    # ---------------------------------------------------------------- the loss

    def run(self) -> None:
        answer = self.answer
        shape = [[0.0] * self.width for _ in range(self.rows)]
        for name in ("weights", "kl", "grad", "grad_unfiltered"):
            setattr(answer, name, [list(row) for row in shape])
        answer.kept = [[False] * self.width for _ in range(self.rows)]
        total = torch.zeros((), dtype=torch.float64)
        corrections = [self.correction(i, row) for i, row in enumerate(self.tokens)]
        divisor = self.weight_mean(corrections) if self.c.is_correction_batch_normalize else 1.0
        config_keeps_all = self.c.kl_tokens == "trained"
        for i, row in enumerate(self.tokens):
            weights = [weight / divisor for weight in corrections[i]]
            kept = self.verdict(i, row)
            losses = self.surrogate(row)
            for token, weight, keep, loss in zip(row, weights, kept, losses, strict=True):
                answer.weights[i][token["t"]] = weight
                answer.kept[i][token["t"]] = keep
                coefficient = self.coefficient(i)
                if keep:
                    total = total + coefficient * weight * loss
                total = total + coefficient * token.get("penalty", 0.0)
                if self.beta and (keep or config_keeps_all):
                    kl = self.kl(token)
                    answer.kl[i][token["t"]] = number(kl)
                    self.metrics["kl_penalty"] += coefficient * number(kl)
                    total = total + coefficient * self.beta * kl
                self.diagnose(token, keep)
        total = total + self.positive_nll()
        self.differentiate(total)
        answer.loss = self.metrics["loss"] = number(total)
        answer.metrics = self.metrics

    def coefficient(self, i: int) -> float:
        sample = self.sample[i]
        if self.normalization == "tokens":
            return sample / self.toks if self.toks else 0.0
        if not self.seqs:
            return 0.0
        if self.normalization == "sequences":
            return sample / (self.declared[i] * self.seqs)
        if self.normalization == "documents":
            return sample / self.seqs
        return sample / (self.c.loss_normalization_constant * self.seqs)

    def differentiate(self, total: torch.Tensor) -> None:
        tokens = [token for row in self.tokens for token in row]
        if not total.requires_grad:
            return
        leaves = [token["curr"] for token in tokens]
        others = [token["kl_curr"] for token in tokens if token["kl_curr"] is not token["curr"]]
        grads = torch.autograd.grad(total, [*leaves, *others], allow_unused=True)
        for token, grad in zip(tokens, grads[: len(leaves)], strict=True):
            self.answer.grad[token["i"]][token["t"]] = 0.0 if grad is None else number(grad)
        for token, grad in zip(tokens, grads[len(leaves) :] if others else [None] * len(tokens), strict=True):
            self.answer.grad_unfiltered[token["i"]][token["t"]] = 0.0 if grad is None else number(grad)

    # --------------------------------------------------------------- the parts

    def correction(self, i: int, row: list[dict[str, Any]]) -> list[float]:
        """Truncated weights of a sequence's tokens, and what is reported of them."""
        config = self.c
        if not self.knows_prev:
            return [1.0] * len(row)
        low = config.truncated_importance_sampling_ratio_min or 0.0
        high = config.truncated_importance_sampling_ratio
        deltas = [token["prev"] - token["gen"] for token in row]
        mean = sum(deltas) / len(deltas) if row else 0.0
        if self.level == "token":
            logs = deltas
        elif self.level in ("turn", "turn_mean"):
            logs = self.over_turns(self.level, row, deltas)
        elif self.level == "sequence":
            logs = [self.sample[i] * sum(deltas)]
        else:
            logs = [mean]
        raw, used, out = [exp(x) for x in logs], [], []
        outside = False
        if self.truncation == "seq-mask-tis" and row:
            outside = self.side(mean, math.log(low) if low else -math.inf, math.log(high)) != 0
            self.add_sequence("is_oob_ratio", i, float(outside))
        for x, w in zip(logs, raw, strict=True):
            side = 0
            if self.truncation in ("tis", "icepop"):
                side = self.side(x, math.log(low) if low else -math.inf, math.log(high))
            if self.truncation == "tis":
                w = min(max(w, low), high)
            elif side or outside:
                w = 0.0
            used.append(w)
            out.append(side != 0)
        by_token = self.has_token_weights
        self.metrics["geomask/saturated_weight"] += sum(x > LIMIT for x in logs)
        for k, (before, after) in enumerate(zip(raw, used, strict=True)):
            for name, value in (
                ("sampling_importance_ratio", after),
                ("geomask/weight_raw_mean", before),
                ("geomask/weight_raw_sq", before**2),
                ("geomask/weight_mean", after),
                ("geomask/weight_sq", after**2),
                ("geomask/weight_live", 1.0),
            ):
                if by_token:
                    self.add_token(name, row[k], value)
                else:
                    self.add_sequence(name, i, value)
        if self.truncation in ("tis", "icepop"):
            for k, token in enumerate(row):
                self.add_token("is_oob_ratio", token, float(out[k if by_token else 0]))
        if not by_token:
            self.answer.sequence_weights.append(used[0])
        if not config.use_importance_sampling_correction or self.anchor == "gen":
            return [1.0] * len(row)
        return used if by_token else used * len(row)

    def weight_mean(self, corrections: list[list[float]]) -> float:
        """Over tokens or, where a sequence has one weight, over sequences."""
        total = count = 0.0
        for i, weights in enumerate(corrections):
            for weight in weights if self.has_token_weights else weights[:1]:
                total += self.sample[i] * weight
                count += self.sample[i]
        return total / count

    @property
    def has_token_weights(self) -> bool:
        return self.level in ("token", "turn", "turn_mean")

    def over_turns(self, level: str, row: list[dict[str, Any]], values: list[float]) -> list[float]:
        """The sum or mean of each token's turn."""
        found = []
        for token in row:
            turn = [value for other, value in zip(row, values, strict=True) if other["turn"] == token["turn"]]
            found.append(sum(turn) if level == "turn" else mean(turn))
        return found

    def judged(self, rule: Rule, row: list[dict[str, Any]]) -> list[float]:
        """What a rule compares: one value a token, of which each counts, or one of the sequence."""
        values = []
        for token in row:
            one, other = {
                "mismatch": (token["prev"], token["gen"]),
                "policy": (token["c"], token["prev"]),
                "total": (token["c"], token["gen"]),
            }[rule.log_ratio]
            x = one - other
            if rule.statistic in ("ratio", "k2", "k3", "ratio_diff", "ratio_abs"):
                of = {"ratio": x, "k2": x * x / 2, "k3": exp(x) - 1 - x, "ratio_diff": exp(x) - 1}
                values.append((of | {"ratio_abs": exp(abs(x))})[rule.statistic])
            else:
                values.append(binary(rule.statistic, math.exp(one), math.exp(other)))
        if rule.level in ("token", "sequence_max"):
            return values
        if rule.level == "mean_size":
            # 2603.01365: the sequence's mean distance, on the side to which the token's own probability is off.
            distance = sum(abs(value) for value in values) / len(values)
            return [distance if value > 0 else -distance if value < 0 else 0.0 for value in values]
        if rule.level.startswith("turn"):
            return self.over_turns(rule.level, row, values)
        if rule.level.startswith("sequence"):
            return [mean(values) if rule.level == "sequence_mean" else sum(values)]
        if rule.cppo is not None:
            return self.excess(rule.cppo, values)
        pool = {"prefix_sum": sum, "prefix_mean": mean, "prefix_min": min, "prefix_max": max}[rule.level]
        return [pool(values[: k + 1]) for k in range(len(values))]

    def excess(self, cppo: Any, distances: list[float]) -> list[float]:
        """2606.10968: each token's share of the trust region and what its prefix has used of it."""
        count = len(distances)
        ordered = sorted(abs(distance) for distance in distances)
        at = cppo.budget_quantile * (count - 1)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        usual = low + (at - math.floor(at)) * (high - low)
        budget = min(max(cppo.budget_scale * usual, cppo.budget_min), 5 * cppo.budget_min)
        found, used, weights = [], 0.0, 0.0
        for t, distance in enumerate(distances, start=1):
            weight = cppo.weight_min + (1 - cppo.weight_min) * ((count - t) / (count - 1) if count > 1 else 1.0)
            used += weight * abs(distance)
            found.append(math.copysign(max(weight * abs(distance), used - budget * weights), distance))
            weights += weight
        return found

    def spend(self, rule: Rule) -> Rule:
        """The rule with the bound that its budget allows: the largest go, one after another, equal ones together."""
        if rule.share is None and rule.mean is None:
            return rule
        sizes: list[float] = []
        for row in self.tokens:
            found = [abs(value) for value in (self.judged(rule, row) if row else [])]
            sizes += found if rule.by_token or not found else [max(found)]
        gone, rest = math.inf, sorted(sizes)
        while rest:
            least = [size for size in rest if size < rest[-1]]
            enough = len(sizes) - len(least) > rule.share * len(sizes) + 1e-9 if rule.share else mean(rest) <= rule.mean
            if enough:
                break
            gone, rest = rest[-1], least
        bound = (rest[-1] + gone) / 2 if rest else -1.0
        return replace(rule, low=-bound, high=bound)

    def verdict(self, i: int, row: list[dict[str, Any]]) -> list[bool]:
        kept = [True] * len(row)
        if not row:
            return kept
        mean_advantage = sum(token["adv"] for token in row) / len(row)
        for rule in self.rules:
            values = self.judged(rule, row)

            def applies(advantage: float, side: int, when: str = rule.when) -> bool:
                return {
                    "always": True,
                    "negative_advantage": advantage < 0,
                    "positive_advantage": advantage > 0,
                    "pushing": advantage * side > 0,
                }[when]

            name = f"geomask/mask/{rule.label}/removed"
            if rule.by_token:
                for k, (token, value) in enumerate(zip(row, values, strict=True)):
                    side = self.side(value, rule.low, rule.high)
                    side = side if applies(token["adv"], side) else 0
                    kept[k] = kept[k] and side == 0
                    for which, hit in (("", side != 0), ("_low", side < 0), ("_high", side > 0)):
                        self.add_token(name + which, token, float(hit))
                continue
            if rule.level == "sequence_max":
                found = {self.side(value, rule.low, rule.high) for value in values}
                sides = [side for side in sorted(found) if side and applies(mean_advantage, side)]
                side = sides[0] if sides else 0
            else:
                side = self.side(values[0], rule.low, rule.high)
            if not applies(mean_advantage, side):
                side = 0
            for which, hit in (("", side != 0), ("_low", side < 0), ("_high", side > 0)):
                self.add_sequence(name + which, i, float(hit))
            if side:
                kept = [False] * len(row)
        return kept

    def surrogate(self, row: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Per-token losses of one sequence; reports its ratios and clips."""
        if not row:
            return []
        name = self.c.name
        if name == "clipped_pg":
            name = "cispo" if self.c.use_cispo else "ppo"
        return {
            "ppo": self.ppo,
            "reinforce": self.reinforce,
            "gspo": self.gspo,
            "gspo_token": self.gspo_token,
            "gmpo": self.gmpo,
            "cispo": self.cispo,
            "sapo": self.sapo,
            "dppo": self.dppo,
            "ipo": self.ipo,
            "vespo": self.vespo,
            "topr": self.topr,
            "dro": self.dro,
        }[name](row)

    def log_ratio(self, token: dict[str, Any]) -> torch.Tensor:
        return token["curr"] - token[self.anchor]

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) if number(x) <= LIMIT else x.new_tensor(math.exp(LIMIT))

    def report(self, token, ratio, clamped, side: int = 0, dual: bool = False) -> None:
        for name, value in (("probs_ratio", number(ratio)), ("probs_ratio_clamped", number(clamped))):
            self.add_token(name, token, value)
            self.metrics[f"{name}_min"] = min(self.metrics[f"{name}_min"], value)
            self.metrics[f"{name}_max"] = max(self.metrics[f"{name}_max"], value)
        self.add_token("geomask/clip_fraction_low", token, float(side < 0))
        self.add_token("geomask/clip_fraction_high", token, float(side > 0))
        if self.c.ratio_clip_c is not None:
            self.add_token("geomask/dual_clip_fraction", token, float(dual))

    def pessimistic(self, token, ratio: torch.Tensor, advantage: float) -> torch.Tensor:
        """min(r·A, clip(r)·A) as a loss, then the dual clip: (PPO eq. 7; 1912.09729 eq. 5)."""
        low, high = 1 - self.c.ratio_clip_min, 1 + self.c.ratio_clip_max
        clamped = self.clip(ratio, low, high)
        plain, bound = ratio * advantage, clamped * advantage
        clips = number(bound) < number(plain)
        objective = bound if clips else plain
        dual = False
        if self.c.ratio_clip_c is not None and advantage < 0:
            self.near(number(ratio), self.c.ratio_clip_c)
            worst = self.c.ratio_clip_c * advantage
            dual = number(objective) < worst
            if dual:
                objective = ratio.new_tensor(worst)
        side = 0 if not clips else (1 if number(ratio) > high else -1)
        self.report(token, ratio, clamped, side, dual)
        return -objective

    def ppo(self, row) -> list[torch.Tensor]:
        config = self.c
        if config.force_on_policy_ratio:
            return [self.pessimistic(k, self.exp(k["curr"] - k["c"]), k["adv"]) for k in row]
        if config.disable_ppo_ratio:
            return self.reinforce(row)
        if config.sequence_level_importance_ratios:
            ratio = self.exp(self.mean(row))
            return [self.pessimistic(token, ratio, token["adv"]) for token in row]
        return [self.pessimistic(token, self.exp(self.log_ratio(token)), token["adv"]) for token in row]

    def reinforce(self, row) -> list[torch.Tensor]:
        for token in row:
            self.report(token, token["c"], token["c"])
        return [-token["adv"] * token["curr"] for token in row]

    def mean(self, row) -> torch.Tensor:
        return sum(self.log_ratio(token) for token in row) / len(row)

    def gspo(self, row) -> list[torch.Tensor]:
        """2507.18071 eq. 5 and 7: one ratio and one advantage a sequence."""
        ratio = self.exp(self.mean(row))
        advantage = sum(token["adv"] for token in row) / len(row)
        return [self.pessimistic(token, ratio, advantage) for token in row]

    def gspo_token(self, row) -> list[torch.Tensor]:
        """Eq. 13 and 14: the sequence's ratio in value, the token's in gradient."""
        s = exp(number(self.mean(row)))
        return [self.pessimistic(k, s * torch.exp(k["curr"] - k["c"]), k["adv"]) for k in row]

    def gmpo(self, row) -> list[torch.Tensor]:
        """2507.20673 eq. 4: geometric mean of token ratios, each clipped in the advantage's direction."""
        low = math.log(1 - self.c.ratio_clip_min) if self.c.ratio_clip_min < 1 else -math.inf
        high = math.log(1 + self.c.ratio_clip_max)
        exponent = torch.zeros((), dtype=torch.float64)
        for token in row:
            x = self.log_ratio(token)
            kept = x
            if token["adv"] > 0:
                self.near(number(x), high)
                kept = x if number(x) <= high else x.new_tensor(high)
            elif token["adv"] < 0:
                self.near(number(x), low)
                kept = x if number(x) >= low else x.new_tensor(low)
            side = 0 if number(kept) == number(x) else (1 if number(x) > number(kept) else -1)
            self.report(token, exp(number(x)), exp(number(kept)), side)
            exponent = exponent + kept / len(row)
        advantage = sum(token["adv"] for token in row) / len(row)
        loss = -advantage * self.exp(exponent)
        return [loss for _ in row]

    def cispo(self, row) -> list[torch.Tensor]:
        """2506.13585 eq. 4 and 5: REINFORCE under a clipped, detached weight."""
        out = []
        for token in row:
            ratio = exp(number(self.log_ratio(token)))
            low, high = 1 - self.c.ratio_clip_min, 1 + self.c.ratio_clip_max
            side = self.side(ratio, low, high)
            clamped = min(max(ratio, low), high)
            self.report(token, ratio, clamped, side)
            out.append(-clamped * token["adv"] * token["curr"])
        return out

    def sapo(self, row) -> list[torch.Tensor]:
        """2511.20347 eq. 5 and 6."""
        out = []
        for token in row:
            ratio = self.exp(self.log_ratio(token))
            tau = self.options.get("tau_pos", 1.0) if token["adv"] > 0 else self.options.get("tau_neg", 1.05)
            gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            self.report(token, ratio, ratio)
            out.append(-gate * token["adv"])
        return out

    def dppo(self, row) -> list[torch.Tensor]:
        """2602.04879: REINFORCE under the ratio up to a cap; the mask is among the rules."""
        out = []
        for token in row:
            ratio = exp(number(self.log_ratio(token)))
            cap = self.options["cap"]
            self.near(ratio, cap)
            self.report(token, ratio, min(ratio, cap), int(ratio > cap))
            out.append(-min(ratio, cap) * token["adv"] * token["curr"])
        return out

    def ipo(self, row) -> list[torch.Tensor]:
        """prime-rl: the ratio times the advantage; the squared log-ratio of every trained token."""
        out = []
        for token in row:
            ratio = self.exp(self.log_ratio(token))
            self.report(token, ratio, ratio)
            token["penalty"] = self.options["kl_tau"] * self.log_ratio(token) ** 2
            out.append(-ratio * token["adv"])
        return out

    def vespo(self, row) -> list[torch.Tensor]:
        """2602.10693: φ(W) = e^λ W^k e^(-λW) of the whole sequence's ratio."""
        log_w = sum(number(self.log_ratio(token)) for token in row)
        w, out = exp(log_w), []
        for token in row:
            sign = "pos" if token["adv"] >= 0 else "neg"
            k, rate = self.options[f"k_{sign}"], self.options[f"lambda_{sign}"]
            phi = math.exp(rate + k * log_w - rate * w)
            self.report(token, w, w)
            out.append(-phi * token["adv"] * token["curr"])
        return out

    def topr(self, row) -> list[torch.Tensor]:
        """2503.14286: no weight where A > 0, else the whole sequence's ratio up to 1."""
        w, out = exp(sum(number(self.log_ratio(token)) for token in row)), []
        for token in row:
            self.report(token, w, w)
            out.append(-(1.0 if token["adv"] > 0 else min(w, 1.0)) * token["adv"] * token["curr"])
        return out

    def dro(self, row) -> list[torch.Tensor]:
        """As in verl."""
        out = []
        for token in row:
            x = self.log_ratio(token)
            self.report(token, exp(number(x)), exp(number(x)))
            out.append(-(token["adv"] * token["curr"] - self.options["beta"] / 2 * x**2))
        return out

    def kl(self, token) -> torch.Tensor:
        """The KL term of one token; see docs/background/kl.md."""
        config, curr = self.c, token["kl_curr"]
        importance = config.use_on_policy_kl_approximation
        free = True
        x = curr - token["ref"]
        if config.kl_input_clamp_value is not None:
            bound = config.kl_input_clamp_value
            free = self.side(number(x), -bound, bound) == 0
            x = self.clip(x, -bound, bound)

        def weighted(kind: str, score: bool) -> torch.Tensor:
            base = 0.0
            if importance:
                base = number(curr) - token[config.kl_ratio_anchor]
            elif kind == "k4":
                base = number(curr) - token[self.anchor]
            weight = torch.tensor(exp(base), dtype=torch.float64)
            if free and base <= LIMIT and (score or kind == "k4"):
                weight = weight * torch.exp(curr - number(curr))
            value = {"k1": x, "k2": x * x / 2, "k3": self.exp(-x) - 1 + x, "k4": x}[kind] * weight
            if config.kl_output_clamp_value is not None:
                value = self.clip(value, -config.kl_output_clamp_value, config.kl_output_clamp_value)
            return value

        value = weighted(config.reference_policy_kl_type, True)
        if config.reference_policy_kl_gradient is None:
            return value
        trained = weighted(config.reference_policy_kl_gradient, False)
        return number(value) + trained - number(trained)

    def positive_nll(self) -> torch.Tensor:
        config = self.c
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        own = config.positive_example_nll_normalization == "loss"
        for i, row in enumerate(self.tokens):
            if self.rewards is not None and self.rewards[i] > 0:
                for token in row:
                    total = total - (self.coefficient(i) if own else self.sample[i]) * token["curr"]
                    count += self.sample[i]
        if count and not own:
            total = total / count
        self.metrics["positive_nll_loss"] = number(total)
        return config.positive_example_nll_weight * total

    def diagnose(self, token, keep: bool) -> None:
        kind = self.c.reference_policy_kl_type
        mismatch, policy = token["prev"] - token["gen"], token["c"] - token["prev"]
        own = "mismatch" if self.knows_prev else "total"
        p, q = token["prev"], token["gen"]
        # Jensen-Shannon by its definition, M = (P + Q)/2, both halves by k3.
        top = max(p, q)
        mixture = top + math.log((math.exp(p - top) + math.exp(q - top)) / 2)
        halves = [math.exp(lp - mixture) - (lp - mixture) - 1 for lp in (p, q)]
        for name, value in {
            "token_mult_prob_error": exp(abs(mismatch)),
            "gen_kl_error": estimate(kind, -mismatch),
            "policy_kl_error": estimate(kind, mismatch, exp(mismatch)),
            "js_divergence_error": sum(halves) / 2,
            "approx_entropy": -exp(token["c"] - q) * token["c"],
            f"geomask/{own}_abs": abs(mismatch),
            f"geomask/{own}_k1": -mismatch,
            f"geomask/{own}_k3": exp(mismatch) - 1 - mismatch,
            "geomask/kept_tokens": float(keep),
        }.items():
            self.add_token(name, token, value)
        self.metrics[f"geomask/{own}_max"] = max(self.metrics[f"geomask/{own}_max"], abs(mismatch))
        # The difference as float32 has it: an edge is not a decision whose margin counts.
        size = abs(float(torch.tensor(p, dtype=torch.float32) - torch.tensor(q, dtype=torch.float32)))
        self.add_token(f"geomask/{own}_bin_{sum(size >= edge for edge in EDGES):02}", token, 1.0)
        total = token["c"] - token["gen"]
        if self.knows_prev:
            for name, value in {"abs": abs(total), "k1": -total, "k3": exp(total) - 1 - total}.items():
                self.add_token(f"geomask/total_{name}", token, value)
        highest = max(token["c"], token["prev"], token["gen"])
        self.metrics["geomask/positive_logprobs"] += self.side(highest, -math.inf, 1e-3) > 0
        self.add_token("geomask/zero_gen_logprobs", token, float(token["gen"] == 0))
        if self.sees_ref:
            x = number(token["kl_curr"]) - token["ref"]
            x = x if math.isfinite(x) else 0.0
            self.add_token("geomask/reference_k1", token, x)
            self.add_token("geomask/reference_k3", token, exp(-x) - 1 + x)
            self.add_sequence("geomask/reference_k1_sequence", token["i"], x)
        if self.by_sequence:
            ratio = exp(token["c"] - token[self.anchor])
            self.add_token("geomask/token_ratio", token, ratio)
        if self.knows_prev:
            self.add_token("geomask/policy_abs", token, abs(policy))
            self.add_token("geomask/policy_k3", token, exp(policy) - 1 - policy)
        self.metrics["geomask/saturated_ratio"] += token["c"] - token[self.anchor] > LIMIT
