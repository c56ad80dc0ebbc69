"""``prune-and-comp``: one scale for the stream, folded into weights: no node, no parameter (Prune&Comp, 2507.18212).

::

    alpha = mean over channels and sequences of  mean_t |x_post| / mean_t |x_pre|          y = alpha x

The published code multiplies embeddings and output projections before the cut. Here the output projections behind the
cut are divided instead (:mod:`ghostexport.models.variants`): the same function wherever every block reads the stream
through a norm, without touching embeddings that a head is tied to.
"""

from __future__ import annotations

import torch

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models import LoadedModel, drop_blocks, insert_operators, probe_tokens
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.linearpatch import scales
from ghostexport.recovery.passes import BoundaryStatistics

#: The fold differs from the inserted scale by the epsilon of the norms alone.
FOLD_TOLERANCE = 2e-2


def fit_scale(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """The mean of LinearPatch's channel scales.

    Raises:
        RecoveryError: a channel is zero before the cut, so its ratio is not finite.
    """
    alpha = float(scales(statistics.ratios["identity"], section).mean())
    return Operator(statistics.boundary, "prune-and-comp", scale=alpha)


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
