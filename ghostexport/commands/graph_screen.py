"""What the command line draws of one graph or one engine: in words and units; raw fields as JSON on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ghostexport.commands.screen import out, print_json

if TYPE_CHECKING:
    from ghostexport.quantization.writer import QuantizationReport, QuantizedLinear
    from ghostexport.surgery import GraphReport, SurgeryReport


def print_surgery(report: SurgeryReport, as_json: bool = False) -> None:
    """Prints what surgery did, one row per cut."""
    if as_json:
        print_json(report.to_json())
        return
    table = Table()
    for column in ("cut", "stream in", "stream out", "rewired", "nodes removed", "nodes added", "initializers added"):
        table.add_column(column)
    for cut in report.boundaries:
        start, stop = cut.span
        rewired, added, weights = (
            ", ".join(names) for names in (cut.consumers_rewired, cut.nodes_added, cut.initializers_added)
        )
        table.add_row(
            f"[{start}, {stop})", cut.stream_in, cut.stream_out, rewired, str(cut.nodes_removed), added, weights
        )
    out.print(table)
    out.print(
        f"blocks {report.blocks_before} -> {report.blocks_after}, nodes {report.nodes_before} -> {report.nodes_after}, "
        f"weights {report.weight_bytes_before / 1e6:.1f} -> {report.weight_bytes_after / 1e6:.1f} MB, "
        f"{len(report.kv_inputs_removed)} KV inputs removed, {len(report.kv_renamed)} names renumbered",
    )
    out.print(f"{report.path.name}: {report.bytes_written:,} bytes written")


def print_quantization(report: QuantizationReport, as_json: bool = False) -> None:
    """Prints what was quantised: a row per block size and form, the worst weights, the bytes."""
    if as_json:
        print_json(report.to_json())
        return
    table = Table()
    for column in ("weights", "form", "block", "mean error", "largest error", "MB"):
        table.add_column(column)
    groups: dict[tuple[str | None, int | None, str], list[QuantizedLinear]] = {}
    for linear in report.linears:
        groups.setdefault((linear.form, linear.block, linear.reason), []).append(linear)
    for (form, block, reason), rows in groups.items():
        errors = [row.relative_error for row in rows]
        shown = [f"{sum(errors) / len(rows):.3f}", f"{max(errors):.3f}"] if form else ["", ""]
        what = f"{len(rows)}" + (f" ({reason})" if reason else "")
        table.add_row(what, form or "float", str(block or ""), *shown, f"{sum(row.bytes for row in rows) / 1e6:.1f}")
    out.print(table)
    turned = [row.output_error for row in report.linears if row.output_error]
    if turned:
        before, after = (sum(errors) / len(turned) for errors in zip(*turned, strict=True))
        out.print(f"gptq: mean error of the outputs on the calibration text {before:.3f} -> {after:.3f}")
    out.print(f"{report.output}: {report.summary}, opset {report.opset_before} -> {report.opset_after}")


def print_graph(report: GraphReport, as_json: bool) -> None:
    """Prints what surgery sees in a graph."""
    if as_json:
        print_json(report.to_json())
        return
    opsets = ", ".join(f"{domain or 'opset'} {version}" for domain, version in report.opset.items())
    out.print(f"{report.path}: made by {report.producer}, {opsets}, {report.nodes:,} nodes")
    if report.quantised:
        out.print("quantised weights: " + ", ".join(f"{n} {op}" for op, n in report.quantised.items()))
    if report.blocker is not None:
        out.print(f"Surgery refuses it: {report.blocker}")
        return
    dense = f" of {report.dense_blocks}" if report.dense_blocks not in (None, report.num_blocks) else ""
    dtype = "float32" if report.dtype == "float" else report.dtype
    out.print(f"{report.num_blocks}{dense} blocks on a residual stream of {report.hidden_size} channels, {dtype}")
    out.print(f"KV cache: in {', '.join(report.kv_inputs) or 'none'}; out {', '.join(report.kv_outputs) or 'none'}")
    for cut in report.cuts:
        span = f"blocks [{cut['removed'][0]}, {cut['removed'][1]})" if cut["removed"] else "some blocks"
        folded = f", folded into {', '.join(cut['folded'])}" if cut["folded"] else ""
        there = "nothing" if cut["operator"] == "none" else f"{cut['operator']} ({cut['dtype'] or 'no nodes'})"
        out.print(f"cut {cut['boundary']}: {span} gone, {there} in their place{folded}")
    if report.weights_replaced:
        out.print(f"{len(report.weights_replaced)} weights replaced: {', '.join(report.weights_replaced)}")
    for name, blocks in report.shared_initializers.items():
        out.print(f"shared weight {name}: blocks {', '.join(map(str, blocks))} (-1: before the first)")
    for remark in report.remarks:
        out.print(f"note: {remark}")
    for block in report.blocks:
        dense, number = ("?" if block[key] is None else block[key] for key in ("dense_block", "kv_number"))
        where = "" if dense == number == block["block"] else f" (dense {dense}, KV {number})"
        out.print(f"block {block['block']}{where}: {block['stream_in']} -> {block['stream_out']}")


def print_engine(sidecar: Path, as_json: bool = False) -> None:
    """Prints one engine by what stands beside it: what it is, what it takes, how it was built."""
    facts = json.loads(sidecar.read_text(encoding="utf-8"))
    if as_json:
        print_json(facts)
        return
    if "runtime" not in facts:
        out.print(f"{sidecar} describes no engine; its fields: ghostexport show {sidecar} --json")
        return
    sizes = f"{facts['plan_bytes'] / 1e6:.1f} MB from {facts['weight_bytes'] / 1e6:.1f} MB of weights"
    out.print(f"{sidecar.with_name(facts['path'])}: {facts['variant']} on {facts['runtime']} {facts['version']}")
    out.print(f"{sizes}, built in {facts['build_seconds']:.1f} s")
    device = facts["device"]
    capability = ", ".join(facts["flags"].get("compute_capability") or ())
    providers = ", ".join(facts["flags"].get("providers") or device.get("providers") or ())
    where = capability or device.get("name") or providers
    out.print(f"for: {where or 'any GPU that the runtime knows'}")
    if facts["profiles"]:
        table = Table("profile", "batch", "tokens", "past", "tuned for")
        for name, profile in facts["profiles"].items():
            table.add_row(name, *_ranges(profile, facts["inputs"]))
        out.print(table)
    else:
        out.print("takes any batch, tokens and past")
    if operators := facts["extra"].get("operator_weights"):
        out.print(f"operator weights (ghostexport swap): {', '.join(operators)}")
    out.print(f"graph: {facts['extra'].get('graph', 'unknown')}   all fields: ghostexport show {sidecar} --json")


def _ranges(profile: Mapping[str, Any], inputs: list[dict[str, Any]]) -> list[str]:
    """Batch, tokens and past of one profile, each from least to most, and what it is tuned for."""
    found: dict[str, tuple[int, int, int]] = {}
    for tensor in inputs:
        for role, *range_ in zip(tensor["dims"], *profile.get(tensor["name"], ((), (), ())), strict=False):
            if isinstance(role, str):
                found.setdefault(role, tuple(range_))
    roles = [found.get(role) for role in ("batch", "tokens", "past")]
    shown = ["" if r is None else f"{r[0]}" if r[0] == r[2] else f"{r[0]} to {r[2]}" for r in roles]
    return [*shown, " x ".join(str(r[1]) for r in roles if r is not None)]
