"""Moments of a boundary, streamed: what a fit needs of the activations, in memory independent of their number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ghostexport.errors import CalibrationError
from ghostexport.operators import FLOAT16_LIMIT


def require_finite(x: torch.Tensor, point: int) -> None:
    """Checks residual values ``x_l``, ``l = point``, of any shape.

    Raises:
        CalibrationError: NaN or infinity; or float16 values near its range's end.
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not largest < float("inf"):  # NaN compares false
        raise CalibrationError(
            f"The residual stream before block {point} holds NaN or infinity ({x.dtype}).",
            "Use --dtype bfloat16 or float32, and check the model's weights.",
        )
    if x.dtype == torch.float16 and largest > FLOAT16_LIMIT:
        raise CalibrationError(
            f"The residual stream before block {point} reaches {largest:.0f}, too near float16's limit of 65504.",
            "Use --dtype bfloat16 or float32.",
        )


#: Keeps the weight of a token of zero magnitude finite; small beside the mean square of any real residual value.
WEIGHT_FLOOR = 1e-6


def token_weights(post: torch.Tensor) -> torch.Tensor:
    """``w = 1 / (||x_post||^2 / C + 1e-6)`` ``[n]`` float64 of ``post`` ``[n, C]``.

    Squared errors so weighted are relative: what an RMSNorm, which divides each token by its magnitude, lets through.
    """
    return 1 / (post.double().square().mean(1) + WEIGHT_FLOOR)


class BoundaryMoments:
    """The sums that the least-squares fits of ``Delta = X_post - X_pre`` on ``X_pre``, or on any regressors, read.

    Rows are tokens with weights ``w`` (1 unless given); all sums are float64 on the device of the activations.
    ``a + b`` are the moments of the concatenated tokens, so folds and processes add up.

    Attributes:
        gram: ``G = X' diag(w) X`` ``[R, R]``; ``R = C`` for the stream itself.
        cross: ``B = X' diag(w) Delta`` ``[R, C]``.
        sum_x, sum_delta: ``[R]`` and ``[C]``.
        square_delta: ``sum w ||delta||^2``.
        weight: ``sum w``.
        tokens: number of tokens.
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu", regressors: int | None = None) -> None:
        options = {"dtype": torch.float64, "device": device}
        rows = channels if regressors is None else regressors
        self.gram = torch.zeros(rows, rows, **options)  # type: ignore[call-overload]
        self.cross = torch.zeros(rows, channels, **options)  # type: ignore[call-overload]
        self.sum_x = torch.zeros(rows, **options)  # type: ignore[call-overload]
        self.sum_delta = torch.zeros(channels, **options)  # type: ignore[call-overload]
        self.square_delta = 0.0
        self.weight = 0.0
        self.tokens = 0

    def add(self, x: torch.Tensor, post: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Adds tokens.

        Args:
            x: ``X_pre`` ``[n, C]`` of any float dtype.
            post: ``X_post`` ``[n, C]``.
            weights: ``[n]``, non-negative; None for ones.
        """
        self.add_change(x, post.double() - x.double(), weights)

    def add_change(self, x: torch.Tensor, delta: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Adds tokens by their regressors ``[n, R]`` and change ``[n, C]``."""
        x, delta = x.double(), delta.double()
        weighted = x if weights is None else x * weights.double()[:, None]
        self.gram.addmm_(weighted.T, x)
        self.cross.addmm_(weighted.T, delta)
        self.sum_x += weighted.sum(0)
        if weights is None:
            self.sum_delta += delta.sum(0)
            self.square_delta += float(delta.square().sum())
            self.weight += len(x)
        else:
            w = weights.double()
            self.sum_delta += w @ delta
            self.square_delta += float(w @ delta.square().sum(1))
            self.weight += float(w.sum())
        self.tokens += len(x)

    def __add__(self, other: BoundaryMoments) -> BoundaryMoments:
        total = type(self)(self.channels, self.gram.device, len(self.sum_x))
        for name in ("gram", "cross", "sum_x", "sum_delta", "square_delta", "weight", "tokens"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    @property
    def channels(self) -> int:
        return len(self.sum_delta)

    def residual(self, M: torch.Tensor | None, b: torch.Tensor | None = None) -> float:
        """``sum w ||delta - x M - b||^2`` from the moments alone; ``M`` ``[R, C]``, ``b`` ``[C]``, None = zero."""
        total = torch.tensor(self.square_delta, dtype=torch.float64, device=self.gram.device)
        if M is not None:
            M = M.to(self.gram)
            total = total - 2 * (M * self.cross).sum() + (M * (self.gram @ M)).sum()
        if b is not None:
            b = b.to(self.gram)
            total = total - 2 * b @ self.sum_delta + self.weight * b @ b
            total = total if M is None else total + 2 * (self.sum_x @ M) @ b
        return max(0.0, float(total))

    def nmse(self, M: torch.Tensor | None, b: torch.Tensor | None = None) -> float:
        """:meth:`residual` over ``sum w ||delta||^2``: 1 = no operator, 0 = perfect. 0 where the blocks did nothing."""
        return self.residual(M, b) / self.square_delta if self.square_delta else 0.0


class ChannelMoments(BoundaryMoments):
    """The same where every channel is explained by its own regressor alone, ``delta_c ~ x_c v_c``.

    Attributes:
        gram, cross: the diagonals ``[C]`` of the matrices.
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu", regressors: int | None = None) -> None:
        super().__init__(channels, device, 1)
        self.gram = torch.zeros_like(self.sum_delta)
        self.cross = torch.zeros_like(self.sum_delta)

    def add_change(self, x: torch.Tensor, delta: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        x, delta = x.double(), delta.double()
        w = torch.ones_like(x[:, 0]) if weights is None else weights.double()
        self.gram += w @ x.square()
        self.cross += w @ (x * delta)
        self.square_delta += float(w @ delta.square().sum(1))
        self.weight += float(w.sum())
        self.tokens += len(x)

    def residual(self, M: torch.Tensor | None, b: torch.Tensor | None = None) -> float:
        """``sum w ||delta - x v||^2`` for ``M = v`` ``[C]``; no bias."""
        v = torch.zeros_like(self.gram) if M is None else M.to(self.gram)
        return max(0.0, self.square_delta - 2 * float(v @ self.cross) + float(v.square() @ self.gram))


class MagnitudeRatios:
    """Channel-wise magnitude change across a boundary, in the basis ``z = x H`` (LinearPatch).

    Attributes:
        basis: ``H`` ``[C, C]`` float32, or None for the channels themselves.
        sum_ratios: ``[C]``, sum over sequences of ``mean_t |z_post| / mean_t |z_pre|``.
        sum_pre, sum_post: ``[C]``, sums over sequences of ``mean_t |z|``.
        sequences: number of sequences.
    """

    def __init__(self, channels: int, basis: torch.Tensor | None = None, device: torch.device | str = "cpu") -> None:
        self.basis = None if basis is None else basis.to(device)
        self.sum_ratios = torch.zeros(channels, dtype=torch.float64, device=device)
        self.sum_pre = torch.zeros_like(self.sum_ratios)
        self.sum_post = torch.zeros_like(self.sum_ratios)
        self.sequences = 0

    def add(self, x: torch.Tensor, post: torch.Tensor) -> None:
        """Adds one sequence: its real tokens ``[n, C]`` before and after."""
        pre_mean, post_mean = self._mean(x), self._mean(post)
        self.sum_ratios += post_mean / pre_mean
        self.sum_pre += pre_mean
        self.sum_post += post_mean
        self.sequences += 1

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        z = x.float() if self.basis is None else x.float() @ self.basis
        return z.abs().mean(0, dtype=torch.float64)

    @property
    def mean_of_ratios(self) -> torch.Tensor:
        """``d`` ``[C]``: mean over sequences of the ratio (LinearPatch as published in code)."""
        return self.sum_ratios / self.sequences

    @property
    def ratio_of_means(self) -> torch.Tensor:
        """``d`` ``[C]``: ratio of the means over all sequences (LinearPatch as defined in the paper)."""
        return self.sum_post / self.sum_pre


@dataclass
class TokenSample:
    """Every ``stride``-th token, kept as float32 on the CPU: at most ``limit`` of ``total``.

    Means over tokens of something that is not quadratic (a relative error) cannot come from moments; a sample of fixed
    size gives them in bounded memory.
    """

    total: int
    limit: int = 4096

    def __post_init__(self) -> None:
        self.stride = max(1, -(-self.total // self.limit))
        self._seen = self._count = 0
        self._columns: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, post: torch.Tensor, *others: torch.Tensor) -> None:
        """Offers tokens ``[n, C]`` before and after, and whatever else is known of them ``[n, ...]``."""
        chosen = [values[-self._seen % self.stride :: self.stride] for values in (x, post, *others)]
        self._seen += len(x)
        if not self._columns:  # once: small tensors kept between large passing ones would fragment the heap
            rows = -(-self.total // self.stride)
            self._columns = [torch.empty(rows, *values.shape[1:], dtype=torch.float32) for values in chosen]
        for column, values in zip(self._columns, chosen, strict=True):
            column[self._count : self._count + len(values)] = values
        self._count += len(chosen[0])

    @property
    def columns(self) -> list[torch.Tensor]:
        """The kept tokens ``[n, ...]`` of every argument of :meth:`add`; setting them replaces the sample."""
        return [column[: self._count] for column in self._columns]

    @columns.setter
    def columns(self, columns: list[torch.Tensor]) -> None:
        self._columns, self._count = columns, len(columns[0]) if columns else 0

    def column(self, index: int) -> torch.Tensor:
        """The kept tokens ``[n, ...]`` of the ``index``-th argument of :meth:`add`."""
        return self.columns[index]

    @property
    def pre(self) -> torch.Tensor:
        """``[n, C]``"""
        return self.column(0)

    @property
    def post(self) -> torch.Tensor:
        """``[n, C]``"""
        return self.column(1)
