"""Operators: what is put at a boundary so that the pruned model behaves like the dense one. NumPy and safetensors only.

Row vectors everywhere, ``x`` of shape ``(B, T, C)``::

    y = x + x @ M (+ b)          M = delta [C, C], or U @ V of rank r, or diag(d)

``M`` is stored, never ``W = I + M``: in half precision the identity would swallow M's digits exactly where ``|x|`` is
largest. A *folded* operator adds nothing at the boundary; it replaces weights of surviving blocks instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ghostexport.errors import RecipeError, RecoveryError, RunFolderError
from ghostexport.new_weights import NewWeight, from_file, to_file
from ghostexport.plan import Boundary, PrunePlan

FORMAT = "ghostexport.operators/1"

#: Of files with new weights of kept blocks, which a reader of the first format would leave out.
FORMAT_WEIGHTS = "ghostexport.operators/2"

#: Half of float16's largest number: beyond it the next addition to the stream may overflow.
FLOAT16_LIMIT = 3e4

FloatArray = NDArray[Any]
FoldRole = Literal["attention_output", "mlp_output", "attention_gain", "mlp_gain"]
Site = Literal["boundary", "mid"]

_NETWORK = ("network_w1", "network_b1", "network_w2", "network_b2")


@dataclass(frozen=True, eq=False)
class WeightFold:
    """A new weight for one linear layer of a surviving block, in right-multiply form; or a norm's gain, rescaled.

    Attributes:
        block: index of the block in the *dense* model.
        role: ``attention_output`` (o_proj: [C_ctx, C]) or ``mlp_output`` (down_proj: [I, C]); ``attention_gain`` or
            ``mlp_gain`` of the norm between such a projection and the residual sum (Gemma 2, OLMo 2).
        weight: ``[in, C]``: the layer computes ``h @ weight (+ bias)``; an ``nn.Linear`` holds its transpose. Of a gain
            ``[C]``, what it is multiplied by: models keep a gain as ``w`` or as ``1 + w``, graphs as either or folded.
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
    def arrays(self) -> dict[str, FloatArray]:
        """What is spliced at the boundary, by its key in the operator file and its name in the graph."""
        named = {"delta": self.delta, "diagonal": self.diagonal, "bias": self.bias}
        if self.factors is not None:
            named |= dict(zip(("factor_u", "factor_v"), self.factors, strict=True))
        if self.network is not None:
            named |= dict(zip(_NETWORK, self.network, strict=True))
        return {key: array for key, array in named.items() if array is not None}

    @property
    def adds_nodes(self) -> bool:
        """Whether anything is spliced into the graph (folds alone add nothing)."""
        return bool(self.arrays)

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
        return sum(array.size for array in self.arrays.values())

    @property
    def last_folds(self) -> tuple[WeightFold, ...]:
        """The folds of the last kept block's MLP output projection."""
        last = self.boundary.span.start - 1
        return tuple(fold for fold in self.folds if fold.block == last and fold.role == "mlp_output")

    @property
    def reaches_inside(self) -> bool:
        """Whether its effect at the boundary depends on the inside of the last kept block."""
        return self.site == "mid" or bool(self.last_folds)

    def apply(self, x: Any, last: Any = None) -> Any:
        """What it makes of ``x`` ``(..., C)``, NumPy or torch: ``x + x @ M (+ b)`` in the precision of the operands.

        Args:
            x: the residual stream at the boundary; torch tensors make the operator's numbers their own dtype.
            last: where it :attr:`reaches_inside`, the last kept block's ``mid`` (what ``M`` reads at that site),
                ``inner`` ``h``, ``weight`` ``V0``, ``bias`` and ``multiplier``: a new ``V`` adds ``h (V - V0)``.
                Without it ``M`` reads ``x``.
        """
        own = {key: _like(x, array) for key, array in self.arrays.items()}
        if self.scale is not None:
            return x * self.scale
        if self.network is not None:
            return network(x, own)
        y = x
        for fold in self.last_folds:
            y = y + last.multiplier * (_like(x, last.inner) @ (_like(x, fold.weight) - _like(x, last.weight)))
            if fold.bias is not None:
                y = y + last.multiplier * _like(x, fold.bias)
                y = y if last.bias is None else y - last.multiplier * _like(x, last.bias)
        inside = self.site == "mid" and last is not None
        change = linear(_like(x, last.mid) if inside else y, own)
        y = y if change is None else y + change
        return y if self.bias is None else y + own["bias"]


def linear(x: Any, arrays: Mapping[str, Any]) -> Any:
    """``x @ M`` for ``x`` ``(..., C)`` from ``arrays`` of its own library (:attr:`Operator.arrays`); None without M."""
    if "delta" in arrays:
        return x @ arrays["delta"]
    if "factor_u" in arrays:
        return (x @ arrays["factor_u"]) @ arrays["factor_v"]
    return x * arrays["diagonal"] if "diagonal" in arrays else None


def network(x: Any, arrays: Mapping[str, Any]) -> Any:
    """``relu(x W1 + b1) W2 + b2`` from ``arrays`` of the library of ``x``."""
    W1, b1, W2, b2 = (arrays[key] for key in _NETWORK)
    return (x @ W1 + b1).clip(0) @ W2 + b2


def _like(x: Any, values: Any) -> Any:
    """``values`` for a sum with ``x``: as they are with NumPy, on the device and in the dtype of a torch tensor."""
    if isinstance(x, np.ndarray):
        return values
    return x.new_tensor(values) if isinstance(values, np.ndarray) else values.to(x)


@dataclass(frozen=True, eq=False)
class OperatorSet:
    """The operators of one variant, one per boundary, in boundary order.

    Attributes:
        name: the variant's name, such as ``ghost``.
        operators: in boundary order.
        plan: the plan they repair.
        calibration_sha256: fingerprint of the calibration set they were fitted on.
        weights: new values of any parameters of the kept blocks, and of those around the blocks, by their name in the
            *dense* model. They hold what folds would: an operator that replaces one of them has no folds.
    """

    name: str
    operators: tuple[Operator, ...]
    plan: PrunePlan
    calibration_sha256: str = ""
    weights: Mapping[str, NewWeight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if [o.boundary for o in self.operators] != list(self.plan.boundaries):
            raise ValueError("an operator set has exactly one operator per boundary of its plan, in order")

    def require_plan(self, plan: PrunePlan) -> None:
        """Raises RecipeError when the operators were fitted for another plan."""
        if self.plan.sha256 != plan.sha256:
            raise RecipeError(
                f"The operators {self.name!r} were fitted for {self.plan}, not for {plan}.",
                "Use the plan stored in the operator file, or recover again.",
            )

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
        return replace(self, operators=tuple(replace(o, folds=(), scale=None) for o in self.operators), weights={})

    def with_fit(self, figures: Iterable[Mapping[str, Any]]) -> OperatorSet:
        """The set with further figures in the ``fit`` of each operator, in boundary order."""
        operators = (replace(o, fit={**o.fit, **more}) for o, more in zip(self.operators, figures, strict=True))
        return replace(self, operators=tuple(operators))

    def tensors(self) -> dict[str, FloatArray]:
        """All arrays by their file key, in deterministic order (see :func:`save_operators`)."""
        tensors: dict[str, FloatArray] = {}
        for b, operator in enumerate(self.operators):
            named: dict[str, FloatArray | None] = dict(operator.arrays)
            if operator.scale is not None:
                named["scale"] = np.array([operator.scale], np.float64)
            for fold in operator.folds:
                named[f"fold.{fold.block}.{fold.role}.weight"] = fold.weight
                named[f"fold.{fold.block}.{fold.role}.bias"] = fold.bias
            tensors |= {f"ghost.{b}.{key}": np.ascontiguousarray(a) for key, a in named.items() if a is not None}
        return tensors

    @property
    def header(self) -> dict[str, Any]:
        """All but arrays and weights, JSON-ready: what a file says of itself, and a graph of its operators."""
        ops = self.operators
        own = [{"boundary": o.boundary.index, "kind": o.kind, "site": o.site, "fit": dict(o.fit)} for o in ops]
        return {
            "format": FORMAT,
            "name": self.name,
            "plan": self.plan.to_json() | {"scores": {}},
            "plan_sha256": self.plan.sha256,
            "calibration_sha256": self.calibration_sha256,
            "operators": own,
        }

    def to_bytes(self) -> bytes:
        """The safetensors file: equal content gives equal bytes."""
        tensors, entries = to_file(self.weights)
        header = self.header | ({"format": FORMAT_WEIGHTS, "weights": entries} if entries else {})
        return save(self.tensors() | tensors, {"ghostexport": json.dumps(header, sort_keys=True)})

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()


def load_operators(path: Path) -> OperatorSet:
    """Reads an operator file; the one validation gate of the format.

    Raises:
        RunFolderError: the file is missing, truncated, of another format, or inconsistent with its own header.
    """
    header, tensors = _read(path)
    try:
        return parse_operators(header, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecipeError) as error:
        raise RunFolderError(f"{path} contradicts its own header: {error}", _REMAKE) from error


def read_fits(path: Path) -> list[dict[str, Any]]:
    """Figures of the fit at every cut, from the header alone; raises as :func:`load_operators`."""
    return [dict(entry["fit"]) for entry in _read(path, arrays=False)[0]["operators"]]


def _read(path: Path, arrays: bool = True) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("ghostexport", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()} if arrays else {}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise RunFolderError(f"Operator file {path} does not exist.", "Make it with: ghostexport recover RUN") from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise RunFolderError(f"Operator file {path} is not a readable safetensors file: {error}", _REMAKE) from error
    if header.get("format") not in (FORMAT, FORMAT_WEIGHTS):
        raise RunFolderError(f"{path} is not an operator file of format {FORMAT}.", _REMAKE)
    return header, tensors


def parse_operators(header: Mapping[str, Any], tensors: Mapping[str, FloatArray]) -> OperatorSet:
    """The set of an :attr:`OperatorSet.header` and of its arrays by key; KeyError and others where they contradict."""
    plan = PrunePlan.from_json(header["plan"])
    entries = enumerate(header["operators"])
    operators = tuple(_read_operator(b, plan.boundaries[b], entry, tensors) for b, entry in entries)
    weights = from_file(tensors, header.get("weights", ()))
    return OperatorSet(header["name"], operators, plan, header["calibration_sha256"], weights)


_LARGEST = ("largest_x", "largest_change", "largest_y")
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
    W1, b1, W2, b2 = (own.get(key, np.empty(0)) for key in _NETWORK)
    return Operator(
        boundary,
        entry["kind"],
        delta=own.get("delta"),
        factors=factors,
        diagonal=own.get("diagonal"),
        network=(W1, b1, W2, b2) if W1.size else None,
        scale=float(own["scale"][0]) if "scale" in own else None,
        bias=own.get("bias"),
        folds=tuple(sorted(folds, key=lambda f: (f.block, f.role))),
        site=entry["site"],
        fit=entry["fit"],
    )
