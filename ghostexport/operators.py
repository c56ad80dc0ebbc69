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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ghostexport.errors import RecipeError, RecoveryError, RunFolderError
from ghostexport.plan import Boundary, PrunePlan

FORMAT = "ghostexport.operators/1"

#: Half of float16's largest number: beyond it the next addition to the stream may overflow.
FLOAT16_LIMIT = 3e4

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
        network: ``(W1 [C, F], b1 [F], W2 [F, C], b2 [C])`` with ``y = relu(x W1 + b1) W2 + b2`` instead of the map.
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
    network: tuple[FloatArray, FloatArray, FloatArray, FloatArray] | None = None
    bias: FloatArray | None = None
    folds: tuple[WeightFold, ...] = ()
    site: Site = "boundary"
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sum(form is not None for form in self._forms) > 1:
            raise ValueError("an operator has one form: delta, factors, diagonal, scale or network")
        if self.scale is not None and (self.bias is not None or not 0 < self.scale < float("inf")):
            raise ValueError("a scale is positive and finite, and has no bias")
        if self.network is not None and self.bias is not None:
            raise ValueError("a network has biases of its own")

    @property
    def _forms(self) -> tuple[Any, ...]:
        return (self.delta, self.factors, self.diagonal, self.scale, self.network)

    @property
    def adds_nodes(self) -> bool:
        """Whether anything is spliced into the graph (folds alone add nothing)."""
        return any(a is not None for a in (self.delta, self.factors, self.diagonal, self.network, self.bias))

    @property
    def matrix(self) -> FloatArray | None:
        """``M`` as a dense ``[C, C]`` matrix; None without a linear part, and for a scale, which has no C."""
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
        outer = self.factors or self.network
        return None if outer is None else int(outer[0].shape[0])

    @property
    def num_parameters(self) -> int:
        """Numbers added to the model (folds replace weights and count zero)."""
        arrays = [self.delta, self.diagonal, self.bias, *(self.factors or ()), *(self.network or ())]
        return sum(array.size for array in arrays if array is not None)

    def apply(self, x: FloatArray) -> FloatArray:
        """``x + x @ M (+ b)`` for ``x`` ``(..., C)`` in the precision of the operands."""
        y = x
        if self.network is not None:
            W1, b1, W2, b2 = self.network
            result: FloatArray = np.maximum(x @ W1 + b1, 0) @ W2 + b2
            return result
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

    def dtype_in(self, stream: str) -> tuple[str, str]:
        """The dtype that the operators compute in, inside a graph whose residual stream is ``stream``, and the reason.

        ``x`` and ``x M`` are un-normalised: in float16 they may overflow where the model itself does not. Then the
        operator becomes a float32 island. Bounds come from the held-out pass (``fit["largest_x"]`` and so on).

        Raises:
            RecoveryError: what the operator adds to a float16 stream exceeds the range itself.
        """
        reached = {key: max((o.fit.get(key, 0.0) for o in self.operators), default=0.0) for key in _LARGEST}
        if stream != "float16":
            return stream, "the stream's own dtype"
        if reached["largest_y"] > FLOAT16_LIMIT:
            raise RecoveryError(
                f"{self.name}: the repaired stream reaches {reached['largest_y']:.0f}, near float16's limit of 65504.",
                "Use --dtype bfloat16 or float32.",
            )
        worst = max(reached["largest_x"], reached["largest_change"])
        if worst > FLOAT16_LIMIT:
            return "float32", f"|x| or |x M| reaches {worst:.0f}, too near float16's limit: a float32 island"
        return "float16", f"|x| and |x M| stay below {worst:.0f}"

    @property
    def adds_nodes(self) -> bool:
        """Whether anything is spliced at some boundary (or nothing is removed): False = a plain smaller model."""
        return not self.operators or any(operator.adds_nodes for operator in self.operators)

    def without_folds(self) -> OperatorSet:
        """What is left to insert into a model whose weights hold all that the operators replace and scale."""
        return replace(self, operators=tuple(replace(o, folds=(), scale=None) for o in self.operators))

    def tensors(self) -> dict[str, FloatArray]:
        """All arrays by their file key, in deterministic order (see :func:`save_operators`)."""
        tensors: dict[str, FloatArray] = {}
        for b, operator in enumerate(self.operators):
            named = {"delta": operator.delta, "diagonal": operator.diagonal, "bias": operator.bias}
            if operator.factors is not None:
                named |= {"factor_u": operator.factors[0], "factor_v": operator.factors[1]}
            named |= dict(zip(_NETWORK, operator.network or (), strict=False))
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


_LARGEST = ("largest_x", "largest_change", "largest_y")

_NETWORK = ("network_w1", "network_b1", "network_w2", "network_b2")
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
    network = (
        (own["network_w1"], own["network_b1"], own["network_w2"], own["network_b2"]) if _NETWORK[0] in own else None
    )
    return Operator(
        boundary,
        entry["kind"],
        delta=own.get("delta"),
        factors=factors,
        diagonal=own.get("diagonal"),
        network=network,
        scale=float(own["scale"][0]) if "scale" in own else None,
        bias=own.get("bias"),
        folds=tuple(sorted(folds, key=lambda f: (f.block, f.role))),
        site=entry["site"],
        fit=entry["fit"],
    )
