"""Operators: what is put at a boundary so that the pruned model behaves like the dense one. NumPy and safetensors only.

Row vectors everywhere, ``x`` of shape ``(B, T, C)``::

    y = x + x @ M (+ b)          M = delta [C, C], or U @ V of rank r, or diag(d)

``M`` is stored, never ``W = I + M``: in half precision the identity would swallow M's digits exactly where ``|x|`` is
largest. A *folded* operator adds nothing at the boundary; it replaces weights of surviving blocks instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ghostexport.errors import RecipeError, RunFolderError
from ghostexport.plan import Boundary, PrunePlan

FORMAT = "ghostexport.operators/1"

FloatArray = NDArray[Any]
FoldRole = Literal["attention_output", "mlp_output"]
Site = Literal["boundary", "mid"]


@dataclass(frozen=True, eq=False)
class WeightFold:
    """A new weight for one linear layer of a surviving block, in right-multiply form.

    Attributes:
        block: index of the block in the *dense* model.
        role: ``attention_output`` (o_proj: [C_ctx, C]) or ``mlp_output`` (down_proj: [I, C]).
        weight: ``[in, C]``: the layer computes ``h @ weight (+ bias)``; an ``nn.Linear`` holds its transpose.
        bias: ``[C]`` or None to keep the layer's own.
    """

    block: int
    role: FoldRole
    weight: FloatArray
    bias: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Operator:
    """The recovery map of one boundary. At most one of ``delta``, ``factors``, ``diagonal`` and ``scale`` is set.

    Attributes:
        boundary: where it acts.
        kind: ``ghost``, ``linearpatch-rotate``, ...
        delta: ``M`` ``[C, C]``.
        factors: ``(U [C, r], V [r, C])`` with ``M = U @ V``.
        diagonal: ``d [C]`` with ``M = diag(d)``; emitted as ``Mul``.
        scale: ``alpha`` with ``M = (alpha - 1) I``, folded into the weights behind the cut: no node.
        bias: ``b [C]``.
        folds: weight replacements that belong to this boundary's repair.
        site: ``boundary`` (x is the residual stream at the cut) or ``mid`` (x is the stream between attention and
            MLP of the last kept block before the cut, to whose result the MLP output is then added).
        fit: figures of the fit (NMSE, condition number, ...), JSON-ready.
    """

    boundary: Boundary
    kind: str
    delta: FloatArray | None = None
    factors: tuple[FloatArray, FloatArray] | None = None
    diagonal: FloatArray | None = None
    scale: float | None = None
    bias: FloatArray | None = None
    folds: tuple[WeightFold, ...] = ()
    site: Site = "boundary"
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.delta, self.factors, self.diagonal, self.scale)) > 1:
            raise ValueError("an operator has one form: delta, factors, diagonal or scale")
        if self.scale is not None and (self.bias is not None or not 0 < self.scale < float("inf")):
            raise ValueError("a scale is positive and finite, and has no bias")

    @property
    def adds_nodes(self) -> bool:
        """Whether anything is spliced into the graph (folds alone add nothing)."""
        return any(a is not None for a in (self.delta, self.factors, self.diagonal, self.bias))

    @property
    def matrix(self) -> FloatArray | None:
        """``M`` as a dense ``[C, C]`` matrix; None when the operator has no linear part, or only a scale."""
        if self.diagonal is not None:
            return np.diag(self.diagonal)
        if self.factors is not None:
            return self.factors[0] @ self.factors[1]
        return self.delta

    @property
    def hidden_size(self) -> int | None:
        """``C``; None when only weights are folded."""
        for array in (self.delta, self.diagonal, self.bias):
            if array is not None:
                return int(array.shape[-1])
        return None if self.factors is None else int(self.factors[0].shape[0])

    @property
    def num_parameters(self) -> int:
        """Numbers added to the model (folds replace weights and count zero)."""
        arrays = [self.delta, self.diagonal, self.bias, *(self.factors or ())]
        return sum(array.size for array in arrays if array is not None)

    def apply(self, x: FloatArray) -> FloatArray:
        """``x + x @ M (+ b)`` for ``x`` ``(..., C)`` in the precision of the operands."""
        y = x
        if self.scale is not None:
            y = x * np.asarray(self.scale, x.dtype)
        elif self.diagonal is not None:
            y = x + x * self.diagonal
        elif self.factors is not None:
            y = x + (x @ self.factors[0]) @ self.factors[1]
        elif self.delta is not None:
            y = x + x @ self.delta
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, eq=False)
class OperatorSet:
    """The operators of one variant, one per boundary, in boundary order.

    Attributes:
        name: the variant's name, such as ``ghost``.
        operators: in boundary order.
        plan: the plan they repair.
        calibration_sha256: fingerprint of the calibration set they were fitted on.
    """

    name: str
    operators: tuple[Operator, ...]
    plan: PrunePlan
    calibration_sha256: str = ""

    def __post_init__(self) -> None:
        if [o.boundary for o in self.operators] != list(self.plan.boundaries):
            raise ValueError("an operator set has exactly one operator per boundary of its plan, in order")

    @property
    def num_parameters(self) -> int:
        return sum(operator.num_parameters for operator in self.operators)

    @property
    def adds_nodes(self) -> bool:
        """Whether anything is spliced at some boundary (or nothing is removed): False = a plain smaller model."""
        return not self.operators or any(operator.adds_nodes for operator in self.operators)

    def tensors(self) -> dict[str, FloatArray]:
        """All arrays by their file key, in deterministic order (see :func:`save_operators`)."""
        tensors: dict[str, FloatArray] = {}
        for b, operator in enumerate(self.operators):
            named = {"delta": operator.delta, "diagonal": operator.diagonal, "bias": operator.bias}
            if operator.factors is not None:
                named |= {"factor_u": operator.factors[0], "factor_v": operator.factors[1]}
            if operator.scale is not None:
                named["scale"] = np.array([operator.scale], np.float64)
            for fold in operator.folds:
                named[f"fold.{fold.block}.{fold.role}.weight"] = fold.weight
                named[f"fold.{fold.block}.{fold.role}.bias"] = fold.bias
            tensors |= {f"ghost.{b}.{key}": np.ascontiguousarray(a) for key, a in named.items() if a is not None}
        return tensors

    def to_bytes(self) -> bytes:
        """The safetensors file: equal content gives equal bytes."""
        header = {
            "format": FORMAT,
            "name": self.name,
            "plan": self.plan.to_json() | {"scores": {}},
            "plan_sha256": self.plan.sha256,
            "calibration_sha256": self.calibration_sha256,
            "operators": [
                {"boundary": o.boundary.index, "kind": o.kind, "site": o.site, "fit": dict(o.fit)}
                for o in self.operators
            ],
        }
        return save(self.tensors(), {"ghostexport": json.dumps(header, sort_keys=True)})

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()


def load_operators(path: Path) -> OperatorSet:
    """Reads an operator file; the one validation gate of the format.

    Raises:
        RunFolderError: the file is missing, truncated, of another format, or inconsistent with its own header.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("ghostexport", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise RunFolderError(f"Operator file {path} does not exist.", "Make it with: ghostexport recover RUN") from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise RunFolderError(f"Operator file {path} is not a readable safetensors file: {error}", _REMAKE) from error
    if header.get("format") != FORMAT:
        raise RunFolderError(f"{path} is not an operator file of format {FORMAT}.", _REMAKE)
    try:
        plan = PrunePlan.from_json(header["plan"])
        operators = tuple(
            _read_operator(b, plan.boundaries[b], entry, tensors) for b, entry in enumerate(header["operators"])
        )
        return OperatorSet(header["name"], operators, plan, header["calibration_sha256"])
    except (KeyError, IndexError, ValueError, RecipeError) as error:
        raise RunFolderError(f"{path} contradicts its own header: {error}", _REMAKE) from error


_REMAKE = "The file was truncated or edited; make it again with: ghostexport recover RUN"


def _read_operator(b: int, boundary: Boundary, entry: Mapping[str, Any], tensors: Mapping[str, FloatArray]) -> Operator:
    prefix = f"ghost.{b}."
    own = {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}
    folds = []
    for key in sorted(own):
        if key.startswith("fold.") and key.endswith(".weight"):
            _, block, role, _ = key.split(".")
            folds.append(WeightFold(int(block), role, own[key], own.get(key.removesuffix("weight") + "bias")))  # type: ignore[arg-type]
    factors = (own["factor_u"], own["factor_v"]) if "factor_u" in own else None
    return Operator(
        boundary,
        entry["kind"],
        delta=own.get("delta"),
        factors=factors,
        diagonal=own.get("diagonal"),
        scale=float(own["scale"][0]) if "scale" in own else None,
        bias=own.get("bias"),
        folds=tuple(sorted(folds, key=lambda f: (f.block, f.role))),
        site=entry["site"],
        fit=entry["fit"],
    )
