"""Outputs of an ``If`` whose branches are decoders: remove those of pruned blocks."""

from __future__ import annotations

import onnx_ir as ir


def prune_if_outputs(model: ir.Model, names: set[str]) -> None:
    """Drops graph outputs ``names`` from the model and from the ``If`` that makes them.

    Requires:
        the branch graphs have lost the outputs at the same positions already.
    """
    graph = model.graph
    node = next(value.producer() for value in graph.outputs if value.name in names)
    assert node is not None
    kept = [value for value in node.outputs if value.name not in names]
    attributes = list(node.attributes.values())
    condition = node.inputs[0]
    replacement = ir.Node(node.domain, node.op_type, [condition], attributes, num_outputs=len(kept), name=node.name)
    replacement.metadata_props.update(node.metadata_props)
    graph.insert_before(node, replacement)
    for old, new in zip(kept, replacement.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        for use in old.uses():
            use.node.replace_input_with(use.idx, new)
    twins = dict(zip(kept, replacement.outputs, strict=True))
    graph.outputs[:] = [twins.get(value, value) for value in graph.outputs if value.name not in names]
    graph.remove(node, safe=True)
