"""Python files: a setting has the value that the program gives it, or the line that hides it is named."""

import pytest

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import translate_files

CONFIG = "a = GRPOConfig(loss_type='dapo', epsilon=0.2)\n"
DICT = "c = {'loss_type': 'dapo', 'epsilon': 0.2}\n"

FOLLOWED = {
    "attribute": CONFIG + "a.epsilon = 0.4\nGRPOTrainer(args=a)",
    "item": DICT + "c['epsilon'] = 0.4\nGRPOConfig(**c)",
    "another name of the class": "from trl import GRPOConfig as C\nC(epsilon=0.4)",
    "methods of a trainer": "a = GRPOConfig(epsilon=0.4)\nt = GRPOTrainer(args=a)\nt.train()\nt.save_model('x')",
    "a class for rewards": "LatexExtractionConfig(try_extract_without_anchor=False)\nGRPOConfig(epsilon=0.4)",
    "within a branch": "if x:\n    low = 0.4\n    a = GRPOConfig(epsilon=low)\n    a.beta = 0.0",
    "variables": "low = 0.1\nGRPOConfig(epsilon=low * 4)",
    "a variable of a loop": "for x in y:\n    low = 0.4\nGRPOConfig(epsilon=low)",
    "of two functions": "def f():\n    low = 0.2\ndef g():\n    low = 0.4\n    GRPOConfig(epsilon=low)",
}  # fmt: skip

HIDDEN = {
    "set in a branch": (CONFIG + "if x:\n    a.epsilon = 0.4", 3),
    "deleted in a branch": (DICT + "if x:\n    c.pop('epsilon')\nGRPOConfig(**c)", 3),
    "set when an error is handled": ("low = 0.2\ntry:\n    f()\nexcept E:\n    low = 0.4\nGRPOConfig(epsilon=low)", 5),
    "of a comprehension": ("e = 0.2\nb = [GRPOConfig(epsilon=e) for e in (0.2, 0.4)]", 2),
    "a global variable": ("low = 0.2\ndef f():\n    global low\n    low = 0.4\nf()\nGRPOConfig(epsilon=low)", 3),
    "set after the trainer was made": (CONFIG + "t = GRPOTrainer(args=a)\nt.args.epsilon = 0.4", 3),
    "of each in a list": (CONFIG + "for b in [a]:\n    b.epsilon = 0.4", 2),
    "a name that is computed": (CONFIG + "for k, v in more:\n    setattr(a, k, v)", 3),
    "a function of another file": ("from x import tweak\n" + CONFIG + "tweak(a)", 3),
    "a method that sets": (CONFIG + "a.set_training(0.4)", 2),
    "code in text": (CONFIG + "exec('a.epsilon = 0.4')", 2),
    "a mapping of another file": ("c = {'epsilon': 0.2, **more}\nGRPOConfig(**c)", 1),
}

TRAINER = CONFIG + "t = GRPOTrainer(args=a)\n"

ESCAPED = {
    "by a call of a lambda": CONFIG + "(lambda c: setattr(c, 'epsilon', 0.4))(a)",
    "in a list that is handed on": CONFIG + "from x import tweak\ntweak([a])",
    "by a decorator": CONFIG + "def run(f):\n    f(a)\n@run\ndef tweak(c):\n    c.epsilon = 0.4",
    "by a choice": CONFIG + "c = a if x else b\nc.epsilon = 0.4",
    "as one of several arguments": CONFIG + "def f(*c):\n    c[0].epsilon = 0.4\nf(a)",
    "as a global variable": CONFIG + "def f():\n    global a\n    a.epsilon = 0.4\nf()",
    "by the namespace": CONFIG + "globals()['a'].epsilon = 0.4",
    "to a class of the file": CONFIG + "class H:\n    def __init__(self, c):\n        c.epsilon = 0.4\nH(a)",
    "by another name for the class": "C = GRPOConfig\nGRPOConfig(epsilon=0.2)\nC(epsilon=0.4)",
    "into a subclass": "class My(GRPOConfig):\n    epsilon: float = 0.4\nGRPOTrainer(args=My(loss_type='dapo'))",
    "into a trainer's attribute": TRAINER + "t.epsilon_low = 0.4",
    "into a trainer's variables": TRAINER + "vars(t)['epsilon_low'] = 0.4",
    "into a trainer's method": TRAINER + "t.compute_loss = types.MethodType(new, t)",
    "into the class of a trainer": CONFIG + "GRPOTrainer._compute_loss = f\nGRPOTrainer(args=a)",
    "into another configuration": CONFIG + "ActorConfig(clip_ratio_low=0.4)",
    "attribute by another name": CONFIG + "b = a\nb.epsilon = 0.4",
    "setattr": CONFIG + "setattr(a, 'epsilon', 0.4)",
    "replace": CONFIG + "a = dataclasses.replace(a, epsilon=0.4)",
    "a function of the file": "def tweak(c):\n    c.epsilon = 0.4\n" + CONFIG + "tweak(a)",
    "another configuration": CONFIG + "a = GRPOConfig(loss_type='dapo', epsilon=0.4)",
    "of self": "class T:\n  def f(self):\n    self.a = GRPOConfig()\n  def g(self):\n    self.a.epsilon = 0.4",
    "update": DICT + "c.update({'delta': None}, epsilon=0.4)\nGRPOConfig(**c)",
    "union": DICT + "c |= {'epsilon': 0.4}\nGRPOConfig(**c)",
    "of a dict in a dict": "c = {'g': {'epsilon': 0.2}}\nc['g']['epsilon'] = 0.4\nGRPOConfig(**c['g'])",
    "changed later": "c = dict(epsilon=0.4)\nGRPOConfig(**c)\nc['epsilon'] = 0.9\nc = {'epsilon': 0.9}",
    "variables": "low, high = 0.1, 0.3\nlow *= 4\nGRPOConfig(epsilon=low, epsilon_high=high)",
    "class": "class C:\n    low = 0.4\nGRPOConfig(epsilon=C.low)",
    "functions": "def make(low, beta=0.0):\n    return GRPOConfig(epsilon=low, beta=beta)\n"
    "def main():\n    make(low=0.4)\nif __name__ == '__main__':\n    main()",
}  # fmt: skip


def translated(text, folder):
    file = folder / "train.py"
    file.write_text(text)
    return translate_files([file], "trl")


@pytest.mark.parametrize("text", FOLLOWED.values(), ids=FOLLOWED)
def test_assignments_are_followed_in_order(text, tmp_path):
    translation = translated(text, tmp_path)
    assert translation.loss_fn["ratio_clip_min"] == pytest.approx(0.4)
    assert translation.not_expressed == ()


def test_a_setting_that_is_replaced_by_none_has_no_effect(tmp_path):
    file = "c = dict(epsilon=0.4, delta=5.0)\nc['delta'] = None\nGRPOConfig(**c)"
    assert "ratio_clip_c" not in translated(file, tmp_path).loss_fn


@pytest.mark.parametrize(("text", "line"), HIDDEN.values(), ids=HIDDEN)
def test_what_hides_a_value_is_named_with_its_line(text, line, tmp_path):
    try:
        message = " ".join(translated(text, tmp_path).not_expressed)
    except ConfigError as error:
        message = str(error)
    assert f"(line {line})" in message


@pytest.mark.parametrize("text", ESCAPED.values(), ids=ESCAPED)
def test_a_configuration_that_escapes_is_not_fully_expressed(text, tmp_path):
    try:
        translation = translated(text, tmp_path)
    except ConfigError:
        return
    assert translation.not_expressed or translation.loss_fn["ratio_clip_min"] == pytest.approx(0.4)
