r"""Training of a policy that is a table, beside the error that the theory of the mismatch predicts.

``python -m tests.evidence.lab.table_policy`` trains the policies, and writes ``docs/evidence/table_policy.json`` and
the figure of ``docs/background/mismatch.md``. A tool finds something with probability 1/2. Each of T tokens is then
drawn from one of two rows of logits, that of the reply, and token 0 is right. The reward is the share of right tokens
if the tool found something. The engine samples :math:`(1 - \varepsilon)\,\pi + \varepsilon\,u` with u uniform over the
tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nemo_geomask import build_loss
from nemo_geomask.tools.lab.lab_recipe import GrpoConfig
from nemo_geomask.tools.lab.lab_report import import_pyplot
from nemo_geomask.tools.lab.rollout import group_advantages
from nemo_geomask.tools.shared.palette import BLUE, GREEN, VERMILION

TOKENS, WRONG_SHARE = 7, 6 / 7
CASES = ((24, 0.002), (24, 0.01), (24, 0.05), (24, 0.15), (96, 0.002), (96, 0.01), (96, 0.03))  # T and ε
_VARIANTS = {"none": {}, "token weight": {"use_importance_sampling_correction": True, "is_correction_level": "token"}}
_GROUPS, _STEPS, _RATE = 32, 3000, 0.5
_ROOT = Path(__file__).parents[3]


def predicted_error(noise: float, length: int) -> float:
    """Return the error at which uncorrected training rests, x = n ε (T − 2) / (2 + ε (T − 2)) with n = 6/7."""
    product = noise * (length - 2)
    return WRONG_SHARE * product / (2 + product)


def trained_error(noise: float, length: int, settings: dict[str, Any], *, steps: int = _STEPS, seed: int = 0) -> float:
    """Train a table by sampled groups of eight; return its error after a lucky call, averaged over the last half."""
    generator = torch.Generator().manual_seed(seed)
    loss = build_loss({"name": "reinforce", "reference_policy_kl_penalty": 0, **settings})
    grpo = GrpoConfig(num_generations_per_prompt=8, use_leave_one_out_baseline=False, normalize_rewards=False)
    count = _GROUPS * 8
    logits = torch.zeros(2, TOKENS, requires_grad=True)
    errors = []
    for step in range(steps):
        policy = logits.detach().softmax(dim=-1)
        engine = (1 - noise) * policy + noise / TOKENS
        found = torch.randint(0, 2, (count,), generator=generator)
        ids = torch.multinomial(engine[found], length, replacement=True, generator=generator)
        rewards = (ids == 0).float().mean(dim=1) * found
        curr = logits.log_softmax(dim=-1)[found[:, None], ids]
        prompt = torch.zeros(count, 1)
        data = {
            "advantages": torch.cat([prompt, group_advantages(rewards, grpo)[:, None].expand(-1, length)], dim=1),
            "prev_logprobs": torch.cat([prompt, curr.detach()], dim=1),
            "generation_logprobs": torch.cat([prompt, engine.log()[found[:, None], ids]], dim=1),
            "token_mask": torch.cat([prompt, torch.ones(count, length)], dim=1),
            "sample_mask": torch.ones(count),
        }
        value, _ = loss(
            next_token_logprobs=curr,
            data=data,
            global_valid_seqs=torch.tensor(count),
            global_valid_toks=torch.tensor(count),  # the sum over a response's tokens, so that T does not slow it
        )
        (gradient,) = torch.autograd.grad(value, logits)
        with torch.no_grad():
            logits -= _RATE * gradient
        if step >= steps // 2:
            errors.append(1 - float(policy[1, 0]))
    return sum(errors) / len(errors)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw predicted and measured errors by ε T into a PNG file."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    products = [10 ** (-2 + step / 40) for step in range(111)]
    for length, style in ((24, "-"), (96, "--")):
        axes.plot(
            products,
            [predicted_error(product / length, length) for product in products],
            style,
            color="0.35",
            label=f"predicted without a correction, T = {length}",
        )
        for name, colour in (("none", VERMILION), ("token weight", GREEN)):
            points = [row for row in rows if row["length"] == length]
            axes.plot(
                [row["noise"] * length for row in points],
                [row[name] for row in points],
                "o" if length == 24 else "s",
                color=colour,
                label=f"trained, {name}, T = {length}",
            )
    axes.axvline(1, color=BLUE, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set(xlabel="ε T: tokens of a response that the trainer would not have sampled", ylabel="share of wrong tokens")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    rows = [
        {
            "length": length,
            "noise": noise,
            "predicted": predicted_error(noise, length),
            **{name: trained_error(noise, length, settings) for name, settings in _VARIANTS.items()},
        }
        for length, noise in CASES
    ]
    path = _ROOT / "docs" / "evidence" / "table_policy.json"
    path.write_text(json.dumps({"steps": _STEPS, "groups": _GROUPS, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(rows, _ROOT / "docs" / "background" / "mismatch.png")


if __name__ == "__main__":
    main()
