"""Settings of the backend that does not train, or that it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule
from nemo_geomask.tools.check.setting_author import nearest_to_user
from nemo_geomask.yaml_text import as_yaml

_MEGATRON_OPTIMIZER = "policy.megatron_cfg.optimizer"
_LOWER_RATES = (f"{_MEGATRON_OPTIMIZER}.min_lr", "policy.megatron_cfg.scheduler.lr_warmup_init")
"""Learning rates that Megatron's scheduler requires to be no larger than the optimiser's."""
_RATES = {True: f"{_MEGATRON_OPTIMIZER}.lr", False: "policy.optimizer.kwargs.lr"}
"""Key of the learning rate under Megatron, and under DTensor."""


_MEGATRON_SETUP = "NeMo-RL models/megatron/setup.py"
_AUTOMODEL_SETUP = "NeMo-RL models/automodel/setup.py"


@rule(
    "GM219",
    "warning",
    f"{_MEGATRON_SETUP} reads `megatron_cfg.optimizer`, {_AUTOMODEL_SETUP.removeprefix('NeMo-RL ')} `optimizer`",
    needs_loss=False,
    applies_to_lab=False,
)
def _learning_rate_of_the_other(facts: RecipeFacts) -> Iterator[Hit]:
    """Learning rate of the backend that does not train."""
    unread, read = _RATES[not facts.uses_megatron], _RATES[facts.uses_megatron]
    ignored, used = facts.number(unread), facts.number(read)
    if (
        facts.uses_megatron == facts.uses_dtensor
        or ignored is None
        or used is None
        or math.isclose(ignored, used, rel_tol=0.01)
    ):
        return
    # Whoever sets the one that is not read, nearer than the other, believes that it is read.
    if nearest_to_user((read, unread), facts) == unread:
        fix = {read: facts.get(unread)}
        for lower in _LOWER_RATES if facts.uses_megatron else ():
            if (facts.number(lower) or 0) > ignored:
                fix[lower] = fix[read]
        yield Hit(
            unread,
            f"{as_yaml(facts.get(unread))}: {'Megatron' if facts.uses_megatron else 'DTensor'} trains, and reads "
            f"{read}: {as_yaml(facts.get(read))} instead",
            fix=fix,
        )


_FAMILY = re.compile(r"qwen|llama|gemma|phi-?\d|mi[sx]tral|glm|gpt-oss|nemotron|deepseek|kimi|minimax|olmo|granite")


@rule("GM224", "warning", "NeMo-RL `get_tokenizer`", needs_loss=False, applies_to_lab=False)
def _tokenizer_of_another_model(facts: RecipeFacts) -> Iterator[Hit]:
    """Tokenizer of another model."""
    model_key, key = "policy.model_name", "policy.tokenizer.name"
    model, tokenizer = facts.get(model_key), facts.get(key)
    if not isinstance(model, str) or not isinstance(tokenizer, str) or model == tokenizer:
        return
    family, other = (set(_FAMILY.findall(name.lower())) for name in (model, tokenizer))
    # Whoever writes both in one file, or the tokenizer last, means the pair, if it can be one.
    is_inherited = nearest_to_user((key, model_key), facts) == model_key
    if is_inherited or (family and other and not family & other):
        yield Hit(
            key,
            f"{tokenizer} is {'inherited' if is_inherited else 'of another family'}, but the recipe sets {model_key}: "
            f"{model}, so ids of one vocabulary go to a model with another",
            fix={key: "${policy.model_name}"},
        )
