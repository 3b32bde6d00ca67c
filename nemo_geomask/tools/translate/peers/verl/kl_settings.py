"""Conversion of verl's KL to the reference policy, in the reward or in the loss."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import Assign, Conversion, PeerSettings, Remark, without_counterpart
from nemo_geomask.tools.translate.peers.verl.setting_names import ACTOR

__all__ = ["convert_kl"]


_KL = {
    **dict.fromkeys(("kl", "k1"), ("k1", "k1")),
    **dict.fromkeys(("kl+", "k1+"), ("k1", "k2")),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), ("k2", "k2")),
    **dict.fromkeys(("low_var_kl", "k3"), ("k3", "k3")),
    **dict.fromkeys(("low_var_kl+", "k3+"), ("k3", "k2")),
}


def convert_kl(settings: PeerSettings) -> Conversion:
    """Convert the KL in the reward (``algorithm.use_kl_in_reward``) or in the loss (``use_kl_loss``)."""
    if settings["algorithm.use_kl_in_reward"]:
        estimator = str(settings["algorithm.kl_penalty"])
        yield Assign("use_kl_in_reward", True)
        yield Assign("reference_policy_kl_penalty", settings.number("algorithm.kl_ctrl.kl_coef"))
        if estimator in _KL:
            yield Assign("reference_policy_kl_type", _KL[estimator][0])
        else:
            yield Remark(f"algorithm.kl_penalty: {estimator} has no counterpart", ("kl_penalty",))
        adaptive = "the coefficient of the KL is constant in this package"
        yield from without_counterpart(settings, {"algorithm.kl_ctrl.type": (("fixed",), adaptive)})
        if settings[ACTOR + "use_kl_loss"]:
            yield Remark(
                "use_kl_loss: this package can't combine a KL in the reward with a KL in the loss", ("use_kl_loss",)
            )
    elif settings[ACTOR + "use_kl_loss"]:
        estimator = str(settings[ACTOR + "kl_loss_type"])
        yield Assign("reference_policy_kl_penalty", settings.number(ACTOR + "kl_loss_coef"))
        if estimator not in _KL:
            yield Remark(
                f"kl_loss_type: {estimator} has no counterpart; values with a counterpart: {', '.join(_KL)}",
                ("kl_loss_type",),
            )
            return
        value, gradient = _KL[estimator]
        yield Assign("reference_policy_kl_type", value)
        yield Assign("reference_policy_kl_gradient", gradient, "verl differentiates the estimate itself")
        if value != "k3":
            yield Assign("kl_input_clamp_value", None)
            yield Assign("kl_output_clamp_value", None)
    else:
        yield Assign("reference_policy_kl_penalty", 0.0)
