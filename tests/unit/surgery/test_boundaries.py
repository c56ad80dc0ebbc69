"""Boundaries of random toy decoders are found exactly; what is no decoder is refused."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ghostexport.errors import GhostExportError, SurgeryError
from ghostexport.surgery.body import find_bodies
from ghostexport.surgery.layout import find_layout
from ghostexport.surgery.operation import find_layouts
from tests.unit.surgery.toy import Builder, Toy, build

TOYS = st.builds(
    Toy,
    blocks=st.integers(1, 9),
    parallel=st.booleans(),
    cache=st.booleans(),
    first=st.sampled_from([0, 1]),
    rank=st.sampled_from([2, 3]),
    embeds=st.booleans(),
    casts=st.booleans(),
    qdq=st.sampled_from(["", "int8", "float8_e4m3fn"]),
    positions=st.booleans(),
)
FAST = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FAST
@given(TOYS)
def test_random_decoders_are_found_exactly(toy: Toy) -> None:
    (layout,) = find_layouts(build(toy))
    assert layout.num_blocks == toy.blocks
    assert [len(sums) for sums in layout.sums] == [1 if toy.parallel else 2] * toy.blocks
    assert layout.numbers == tuple(range(toy.first, toy.first + toy.blocks) if toy.cache else range(toy.blocks))
    for k, point in enumerate(layout.points):
        # the residual value after block k feeds the norm of block k + 1 and its sum, nothing else
        assert point.value is not None
        readers = {use.node.op_type for use in point.value.uses()}
        assert readers == ({"MatMul"} if k == toy.blocks and not toy.casts else readers)
        assert readers >= {"Mul", "Div", "Add"} or k == toy.blocks


@FAST
@given(st.integers(1, 30), st.randoms(use_true_random=False), st.booleans())
def test_random_graphs_are_refused(size: int, random: object, cache: bool) -> None:
    """Random wiring of the operators that decoders are made of."""
    b = Builder()
    pool = [b.input("input_ids", ir.DataType.FLOAT, ["batch", "tokens", 8])]
    if cache:
        pool += [b.input(f"past_key_values.{k}.key", ir.DataType.FLOAT, ["batch", "past", 8]) for k in range(2)]
    table = b.weight("w", np.eye(8, dtype=np.float32))
    for _ in range(size):
        kind = random.choice(["Add", "Mul", "MatMul", "Sigmoid"])  # type: ignore[attr-defined]
        first = random.choice(pool)  # type: ignore[attr-defined]
        second = table if kind == "MatMul" else random.choice(pool)  # type: ignore[attr-defined]
        pool.append(b.op(kind, first, *(() if kind == "Sigmoid" else (second,))))
    b.output(pool[-1], "logits", ["batch", "tokens", 8])
    with pytest.raises(SurgeryError) as error:
        find_layouts(b.model())
    assert error.value.remedy is None or error.value.remedy


def test_two_hundred_blocks_take_time_proportional_to_their_number() -> None:
    def seconds(blocks: int) -> float:
        (body,) = find_bodies(build(Toy(blocks=blocks)))
        start = time.perf_counter()
        assert find_layout(body).num_blocks == blocks
        return time.perf_counter() - start

    small = min(seconds(50) for _ in range(3))
    assert min(seconds(200) for _ in range(3)) < 12 * small  # 4 x the nodes; quadratic would be 16 x


def test_names_that_contradict_the_data_flow_are_an_error_with_both_answers() -> None:
    model = build(Toy(blocks=3))
    for position, node in enumerate(model.graph):
        node.name = f"/model/layers.{position % 2}/{position}"
    with pytest.raises(GhostExportError, match=r"3 blocks; by the names"):
        find_layouts(model)


def test_names_in_another_order_are_an_error(tmp_path: Path) -> None:
    model = build(Toy(blocks=3))
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name and (".0." in value.name or ".2." in value.name):
            value.name = value.name.replace(".0.", ".x.").replace(".2.", ".0.").replace(".x.", ".2.")
    with pytest.raises(GhostExportError, match="by the names of the KV inputs before it"):
        find_layouts(model)
