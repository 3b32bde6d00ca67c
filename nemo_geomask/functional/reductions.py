"""Coefficients that reduce per-token losses to one number.

Every normalisation is expressed as one coefficient c_t for each token: the loss is ``Σ_t c_t ℓ_t``. The denominators
are global counts of the optimiser step, so the losses of microbatches and data-parallel ranks simply add up.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from nemo_geomask.errors import ArgumentError
from nemo_geomask.functional.entry import check_choice, check_layout

__all__ = ["Normalization", "inverse_count", "token_coefficients"]

Normalization = Literal["tokens", "sequences", "documents", "constant"]

_EPSILON = 1e-8  # as in NeMo-RL; the mean over no tokens is then 0 and not 0/0


def inverse_count(count: Tensor) -> Tensor:
    """Return ``1 / (count + 1e-8)``, in the shape of ``count``; finite for a count of 0, and 0 for one that is NaN."""
    return (count + _EPSILON).reciprocal().nan_to_num(0.0)


def token_coefficients(
    normalization: Normalization,
    *,
    mask: Tensor,
    tokens_of_sequence: Tensor | None,
    global_seqs: Tensor,
    global_toks: Tensor,
    constant: float | None = None,
) -> Tensor:
    r"""Return the coefficient c_t of each token's loss.

    ============== ================================= ============================================
    normalization  c_t                               used by
    ============== ================================= ============================================
    ``tokens``     :math:`m_t / N_{tok}`             DAPO, NeMo-RL ``token_level_loss: true``
    ``sequences``  :math:`m_t / (n_i N_{seq})`       GRPO, GSPO, NeMo-RL ``token_level_loss: false``
    ``documents``  :math:`m_t / N_{seq}`             Fast-LLM ``normalize_by_documents``
    ``constant``   :math:`m_t / (C N_{seq})`         Dr. GRPO, arXiv:2503.20783
    ============== ================================= ============================================

    Args:
        normalization: name from the table.
        mask: m_t, token mask times sample mask, any token layout, float32 or float64.
        tokens_of_sequence: n_i, number of trained tokens of the token's own sequence before any mask rejects some,
            broadcastable to ``mask``; needed for ``sequences`` only.
        global_seqs: N_seq, 0-d: valid sequences in the optimiser step, over all microbatches and ranks.
        global_toks: N_tok, 0-d: valid tokens, likewise.
        constant: C, a number of tokens; needed for ``constant`` only.

    Returns: shape and dtype of ``mask``.
    Raises: ArgumentError: an unknown normalisation, ``constant`` without a constant above 0, or ``sequences`` without
    ``tokens_of_sequence``. ShapeError: ``tokens_of_sequence`` does not fit ``mask``.
    """
    check_choice("normalization", normalization, get_args(Normalization))
    check_layout(mask=mask, tokens_of_sequence=tokens_of_sequence)
    if normalization == "tokens":
        return mask * inverse_count(global_toks)
    if normalization == "sequences":
        if tokens_of_sequence is None:
            raise ArgumentError("normalization 'sequences' needs tokens_of_sequence")
        return mask * (inverse_count(tokens_of_sequence) * inverse_count(global_seqs))
    if normalization == "documents":
        return mask * inverse_count(global_seqs)
    if constant is None or not constant > 0:
        raise ArgumentError(f"normalization 'constant' needs a constant above 0, but it is {constant}")
    return mask * (inverse_count(global_seqs) / constant)
