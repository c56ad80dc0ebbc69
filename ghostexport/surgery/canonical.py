"""Canonical form of a freshly exported graph: no machine paths, integer dims as integers, four named symbols.

The dynamo exporter writes a stack trace with absolute paths on every node, writes static KV dims as the strings
``"2"`` and ``"16"`` (TensorRT would read them as dynamic), and gives every KV input a length symbol of its own.
Canonical names::

    input_ids       [batch, tokens]              past KV      [batch, heads, past, head_dim]
    attention_mask  [batch, past + tokens]       present KV   [batch, heads, past + tokens, head_dim]
    position_ids    [batch, tokens]              logits       [batch, tokens, vocabulary]
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from ghostexport.kv_names import parse_kv_name

BATCH, TOKENS, PAST = "batch", "tokens", "past"
TOTAL = f"{PAST} + {TOKENS}"

# name_scopes, namespace and folded_from tell where a node or weight came from; these only repeat or leak.
_NOISE = (
    "pkg.torch.onnx.stack_trace",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.export.ExportedProgram.graph_signature",
    "pkg.torch.export.ExportedProgram.range_constraints",
    "pkg.torch.export.graph_signature.InputSpec.kind",
    "pkg.torch.export.graph_signature.InputSpec.persistent",
    "pkg.torch.export.graph_signature.OutputSpec.kind",
    "pkg.torch.onnx.original_node_name",
)
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def canonicalise(model: ir.Model) -> ir.Model:
    """Brings a fresh export into canonical form, in place, and returns it.

    Ensures:
        no stack traces or exporter internals in any ``metadata_props`` or doc string; every dim is an integer or a
        symbolic expression, never a number in quotes; batch, tokens, past and total lengths carry one name each in
        inputs, outputs and intermediate values.
    """
    strip_metadata(model)
    renames = _symbol_names(model.graph)
    for value in _values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([_canonical_dim(dim, renames) for dim in value.shape])
    for value in model.graph.outputs:
        if parse_kv_name(value.name or "", output=True) and value.shape is not None and len(value.shape) == 4:
            value.shape = ir.Shape([TOTAL if _is_total(dim) else dim for dim in value.shape])
    return model


def strip_metadata(model: ir.Model) -> None:
    """Removes stack traces (absolute paths) and exporter internals; keeps name scopes and weight origins."""
    graphs = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.graph.subgraphs()]
        _strip(function.metadata_props)
    _strip(model.metadata_props)
    for graph in graphs:
        _strip(graph.metadata_props)
        for node in graph:
            _strip(node.metadata_props)
            node.doc_string = None
        for value in _values(graph):
            _strip(value.metadata_props)


def _strip(properties: dict[str, str]) -> None:
    for key in _NOISE:
        properties.pop(key, None)


def _symbol_names(graph: ir.Graph) -> dict[str, str]:
    """Canonical names of the exporter's symbols, read off the graph inputs."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        if value.shape is None:
            continue
        if parse_kv_name(value.name or ""):
            # 4-D, dim 0 = batch; whatever else is symbolic is the cache length
            expected = [BATCH] + [PAST] * (len(value.shape) - 1)
        elif value.name == "attention_mask" and len(value.shape) == 2:
            expected = [BATCH, TOTAL]
        else:
            expected = [BATCH, TOKENS][: len(value.shape)]
        for dim, name in zip(value.shape, expected, strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value and _SYMBOL.fullmatch(dim.value):
                names.setdefault(dim.value, name)
    return names


def _canonical_dim(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    text = dim.value.strip()
    if text.lstrip("-").isdigit():
        return int(text)
    if text in names:
        return names[text]
    renamed = _SYMBOL.sub(lambda match: _operand(names.get(match.group(), match.group())), text)
    terms = sorted(term.strip() for term in renamed.split("+"))
    return TOTAL if terms == [PAST, TOKENS] else renamed


def _operand(name: str) -> str:
    return f"({name})" if " " in name else name


def _is_total(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value not in (BATCH, TOKENS, PAST, None)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
