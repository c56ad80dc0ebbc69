"""Boundary statistics of made-up tokens: a known map, noise, and a few massive tokens that obey another map."""

from __future__ import annotations

import torch

from ghostexport.plan import PrunePlan
from ghostexport.recovery.gathering import Gathered, Request
from ghostexport.recovery.last_block import LastBlock

C, INNER, SEQUENCES, LENGTH = 12, 20, 8, 60


class Planted:
    """Tokens ``x_s = x_mid + h V0`` and ``x_e``; every 50th token is a thousand times larger and moves otherwise."""

    def __init__(self, seed: int = 0, noise: float = 0.1, folds: int = 1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        shape = (SEQUENCES, LENGTH)
        self.mid = self.normal(*shape, C) * torch.logspace(-1, 1, C).double()
        self.inner = self.normal(*shape, INNER)
        self.V0 = self.normal(INNER, C) / INNER**0.5
        massive = torch.zeros(shape, dtype=torch.bool)
        massive.view(-1)[::50] = True
        self.mid[massive] *= 1000
        self.pre = self.mid + self.inner @ self.V0
        self.W, self.V = torch.eye(C).double() + 0.3 * self.normal(C, C), self.V0 + 0.3 * self.normal(INNER, C)
        self.post = self.mid @ self.W + self.inner @ self.V + noise * self.normal(*shape, C)
        self.post[massive] = self.pre[massive] @ (torch.eye(C).double() + self.normal(C, C))
        self.mask = torch.ones(shape, dtype=torch.bool)
        self.mask[2, 40:] = False
        self.boundary = PrunePlan.from_spans(6, [[2, 4]]).boundaries[0]
        request = Request(needs=frozenset({"weighted", "last-block"}), folds=folds)
        tokens = int(self.mask.sum())
        self.statistics = Gathered(self.boundary, request, C, tokens, torch.device("cpu"))
        for start in range(0, SEQUENCES, 3):
            rows = slice(start, start + 3)
            last = LastBlock(self.mid[rows], self.inner[rows], self.V0)
            sequences = range(start, min(start + 3, SEQUENCES))
            self.statistics.add(sequences, self.mask[rows], self.pre[rows], self.post[rows], last)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def rows(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The real tokens ``[n, ...]`` of each tensor."""
        return [value[self.mask] for value in values]

    @property
    def weights(self) -> torch.Tensor:
        """``1 / (||x_e||^2 / C + 1e-6)`` of the real tokens ``[n]``."""
        (post,) = self.rows(self.post)
        return 1 / (post.square().sum(1) / C + 1e-6)


def least_squares(A: torch.Tensor, Y: torch.Tensor, w: torch.Tensor | None = None, ridge: float = 0.0) -> torch.Tensor:
    """``argmin sum w ||a X - y||^2 + ridge ||X||^2`` by one dense float64 QR, no normal equations."""
    root = torch.ones(len(A), dtype=A.dtype) if w is None else w.sqrt()
    rows = torch.cat([A * root[:, None], ridge**0.5 * torch.eye(A.shape[1], dtype=A.dtype)])
    return torch.linalg.lstsq(rows, torch.cat([Y * root[:, None], torch.zeros(A.shape[1], Y.shape[1]).to(Y)])).solution
