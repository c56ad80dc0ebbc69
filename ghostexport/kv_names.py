"""Names of the KV-cache inputs and outputs of a decoder graph: grouping by block and renumbering. Strings only.

Known producers (in -> out, one pair per block ``N``)::

    transformers   past_key_values.layers.N.keys | .values     cache.layers.N.keys | .values
                   input.cache.layers.N.keys | .values         output.cache.layers.N.keys | .values
    optimum        past_key_values.N.key | .value              present.N.key | .value
    genai          past_key_values.N.key | .value              present.N.key | .value
    edge-llm       past_key_values_N                           present_key_values_N
    flat torch     past_key_N | past_value_N                   present_key_N | present_value_N
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_INPUT = (
    re.compile(r"^(past_key_values\.layers\.|input\.(?:cache|past_key_values)\.layers\.)(\d+)\.(keys|values)$"),
    re.compile(r"^(past_key_values\.)(\d+)\.(key|value|decoder\.key|decoder\.value)$"),
    re.compile(r"^(past_key_values_)(\d+)()$"),
    re.compile(r"^(past_|past_key_values_|k_cache_|v_cache_)?(?:key_cache_|value_cache_)(\d+)()$"),
    re.compile(r"^(past_(?:key|value)_)(\d+)()$"),
    re.compile(r"^(kv_cache\.)(\d+)\.(k|v|key|value)$"),
)
_OUTPUT = (
    re.compile(r"^((?:output\.)?(?:cache|past_key_values)\.layers\.)(\d+)\.(keys|values)$"),
    re.compile(r"^(present(?:_key_values)?\.)(\d+)\.(key|value|decoder\.key|decoder\.value)$"),
    re.compile(r"^(present_key_values_)(\d+)()$"),
    re.compile(r"^(present_)?(?:key_cache_|value_cache_)(\d+)()$"),
    re.compile(r"^(present_(?:key|value)_)(\d+)()$"),
    re.compile(r"^(present_kv_cache\.|kv_cache_out\.)(\d+)\.(k|v|key|value)$"),
)


@dataclass(frozen=True)
class KVName:
    """One KV input or output.

    Attributes:
        name: as in the graph.
        block: its decoder block, as numbered in the graph.
        template: the name with ``{}`` in the number's place; equal templates play the same role in every block.
    """

    name: str
    block: int
    template: str

    def renumbered(self, block: int) -> str:
        return self.template.format(block)


def parse_kv_name(name: str, *, output: bool = False, pattern: str | None = None) -> KVName | None:
    """Reads the block number out of a KV name; None when it is not a KV name.

    Args:
        name: a graph input (or output) name.
        output: look for output names.
        pattern: a template of the user's own with one ``{}``, such as ``cache_k_{}``; replaces the known ones.
    """
    if pattern is not None:
        head, _, tail = pattern.partition("{}")
        expressions: Iterable[re.Pattern[str]] = (re.compile(f"^{re.escape(head)}(\\d+){re.escape(tail)}$"),)
        group = 1
    else:
        expressions, group = (_OUTPUT if output else _INPUT), 2
    for expression in expressions:
        match = expression.match(name)
        if match:
            start, stop = match.span(group)
            head, tail = (part.replace("{", "{{").replace("}", "}}") for part in (name[:start], name[stop:]))
            return KVName(name, int(match.group(group)), f"{head}{{}}{tail}")
    return None


def group_by_block(names: Iterable[KVName]) -> dict[int, tuple[KVName, ...]]:
    """KV names by block, blocks ascending, names in given order."""
    groups: dict[int, list[KVName]] = {}
    for name in names:
        groups.setdefault(name.block, []).append(name)
    return {block: tuple(groups[block]) for block in sorted(groups)}


def pair_kv(inputs: Iterable[str], outputs: Iterable[str]) -> list[tuple[str, str]]:
    """``(past input, present output)`` pairs of a graph, in input order.

    Pairing is by block and, inside a block, by position (key before value in every known producer).

    Raises:
        ValueError: inputs and outputs do not pair up.
    """
    past = group_by_block(k for k in map(parse_kv_name, inputs) if k)
    present = group_by_block(k for k in (parse_kv_name(n, output=True) for n in outputs) if k)
    if past.keys() != present.keys() or any(len(past[b]) != len(present[b]) for b in past):
        raise ValueError(f"KV inputs of blocks {sorted(past)} do not pair with KV outputs of blocks {sorted(present)}")
    pairs = {i.name: o.name for b in past for i, o in zip(_by_role(past[b]), _by_role(present[b]), strict=True)}
    return [(name, pairs[name]) for name in (k.name for k in map(parse_kv_name, inputs) if k)]


def _by_role(names: tuple[KVName, ...]) -> list[KVName]:
    # "key" sorts before "value" and "k" before "v", whatever order the graph lists them in
    return sorted(names, key=lambda k: k.template.rsplit(".", 1)[-1] if "." in k.template else k.template)
