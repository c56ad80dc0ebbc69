"""Rescaling across the cut: LinearPatch's channel magnitudes (2505.24680) and Prune&Comp's one scale (2507.18212).

::

    z = x H            H orthonormal Hadamard (linearpatch-rotate) or I (linearpatch-diag)
    d = mean over sequences of  mean_t |z_post| / mean_t |z_pre|        (as coded; ``--ratio ratio-of-means``, as in the
                                                                         paper: both means over all sequences first)
    W = H diag(d) H'   M = W - I = H diag(d - 1) H'

    prune-and-comp     y = alpha x       alpha = mean of d over channels, H = I: folded into weights, no node

Prune&Comp's code multiplies embeddings and output projections before the cut. Here the output projections behind the
cut are divided instead (:mod:`ghostexport.models.variants`): the same function wherever every block reads the stream
through a norm, without touching embeddings that a head is tied to.
"""

from __future__ import annotations

import torch

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models import LoadedModel, drop_blocks, insert_operators, probe_tokens
from ghostexport.moments import MagnitudeRatios
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.gathering import Gathered

#: The fold differs from the inserted scale by the epsilon of the norms alone.
FOLD_TOLERANCE = 2e-2


def fit_diag(gathered: Gathered, section: RecoverSection) -> Operator:
    """Rescales the channels themselves; stored as a diagonal of ``C`` numbers.

    Raises:
        RecoveryError: a channel is zero before the cut, so its ratio is not finite.
    """
    d = scales(gathered.ratios["identity"], section)
    return Operator(gathered.boundary, "linearpatch-diag", diagonal=(d - 1).float().cpu().numpy())


def fit_rotate(gathered: Gathered, section: RecoverSection) -> Operator:
    """Rescales the Hadamard coefficients; a dense symmetric ``[C, C]`` delta.

    Raises:
        RecoveryError: a coefficient is zero before the cut, so its ratio is not finite.
    """
    ratios = gathered.ratios["hadamard"]
    assert ratios.basis is not None
    H = ratios.basis.double()
    M = (H * (scales(ratios, section) - 1)) @ H.T
    return Operator(gathered.boundary, "linearpatch-rotate", delta=M.float().cpu().numpy())


def fit_scale(gathered: Gathered, section: RecoverSection) -> Operator:
    """The mean of LinearPatch's channel scales.

    Raises:
        RecoveryError: a channel is zero before the cut, so its ratio is not finite.
    """
    alpha = float(scales(gathered.ratios["identity"], section).mean())
    return Operator(gathered.boundary, "prune-and-comp", scale=alpha)


def scales(ratios: MagnitudeRatios, section: RecoverSection) -> torch.Tensor:
    """``d`` ``[C]`` by the recipe's kind of ratio.

    Raises:
        RecoveryError: a channel is zero before the cut.
    """
    d = ratios.mean_of_ratios if section.ratio == "mean-of-ratios" else ratios.ratio_of_means
    dead = int((~torch.isfinite(d)).sum())
    if dead:
        raise RecoveryError(
            f"{dead} channels are zero before the cut in some sequence: LinearPatch divides by their magnitude.",
            "Use ghost, or longer calibration sequences.",
        )
    return d


def require_scalable(loaded: LoadedModel, plan: PrunePlan) -> None:
    """Compares the fold of a scale of 2 with the same scale inserted, on a few tokens.

    Raises:
        RecoveryError: they differ: blocks behind a cut read the raw stream (OLMo 2), or cannot be scaled.
    """
    pruned = drop_blocks(loaded.model, plan)
    boundaries = plan.boundaries
    inserted = (Operator(b, "scale", diagonal=torch.ones(loaded.hidden_size).numpy()) for b in boundaries)
    folded = (Operator(b, "scale", scale=2.0) for b in boundaries)
    logits = []
    try:
        for operators in (inserted, folded):
            model = insert_operators(pruned, OperatorSet("scale", tuple(operators), plan))
            with torch.no_grad():
                logits.append(model(input_ids=probe_tokens(model), use_cache=False).logits.float())
    except ModelLayoutError as error:
        raise RecoveryError(f"prune-and-comp does not apply to this model: {error.message}", error.remedy) from error
    if (logits[0] - logits[1]).abs().max() > FOLD_TOLERANCE * logits[0].abs().max():
        raise RecoveryError(
            f"prune-and-comp does not apply to {type(loaded.model).__name__}: its blocks read the stream without a "
            "norm, so its magnitude cannot be changed by scaling weights.",
            "Use linearpatch-diag or ghost.",
        )
