"""Names of the KV-cache inputs and outputs of a decoder graph: grouping by block and renumbering. Strings only.

Known producers (in -> out, one pair per block ``N``)::

    transformers   past_key_values.layers.N.keys | .values     cache.layers.N.keys | .values
                   input.cache.layers.N.keys | .values         output.cache.layers.N.keys | .values
    optimum        past_key_values.N.key | .value              present.N.key | .value
    genai          past_key_values.N.key | .value              present.N.key | .value
    edge-llm       past_key_values_N                           present_key_values_N
    flat torch     past_key_N | past_value_N                   present_key_N | present_value_N

States of recurrent and convolutional mixers stand in the place of keys and values: ``conv_states``,
``recurrent_states``, ``ssm_states`` (or the singular; with ``.0``, ``.1`` behind them where a block has several) for
``keys``, and ``past_conv.N`` with ``present_conv.N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ghostexport.errors import RecipeError

_STATES = r"(?:conv|recurrent|ssm|linear)_states?(?:\.\d+)?"
_INPUT = (
    re.compile(
        rf"^(past_key_values\.layers\.|input\.(?:cache|past_key_values)\.layers\.)(\d+)\.(keys|values|{_STATES})$"
    ),
    re.compile(rf"^(past_key_values\.)(\d+)\.(key|value|decoder\.key|decoder\.value|{_STATES})$"),
    re.compile(r"^(past_key_values_)(\d+)()$"),
    re.compile(r"^(past_|past_key_values_|k_cache_|v_cache_)?(?:key_cache_|value_cache_)(\d+)()$"),
    re.compile(r"^(past_(?:key|value)_)(\d+)()$"),
    re.compile(r"^(past_(?:conv|recurrent|ssm)\.)(\d+)()$"),
    re.compile(r"^(kv_cache\.)(\d+)\.(k|v|key|value)$"),
)
_OUTPUT = (
    re.compile(rf"^((?:output\.)?(?:cache|past_key_values)\.layers\.)(\d+)\.(keys|values|{_STATES})$"),
    re.compile(rf"^(present(?:_key_values)?\.)(\d+)\.(key|value|decoder\.key|decoder\.value|{_STATES})$"),
    re.compile(r"^(present_key_values_)(\d+)()$"),
    re.compile(r"^(present_)?(?:key_cache_|value_cache_)(\d+)()$"),
    re.compile(r"^(present_(?:key|value)_)(\d+)()$"),
    re.compile(r"^(present_(?:conv|recurrent|ssm)\.)(\d+)()$"),
    re.compile(r"^(present_kv_cache\.|kv_cache_out\.)(\d+)\.(k|v|key|value)$"),
)


#: The place of the block's number in a user's pattern; ``{2b+1}`` where the names count tensors, two per block.
_PLACE = re.compile(r"\{(?:(\d+)b(?:\+(\d+))?)?\}")
_STATE = re.compile(rf"{_STATES}$|^(?:past|present)_(?:conv|recurrent|ssm)\.")


@dataclass(frozen=True)
class KVName:
    """One KV input or output.

    Attributes:
        name: as in the graph.
        block: its decoder block, as numbered in the graph.
        template: the name with the place of the number; equal templates play the same role in every block.
    """

    name: str
    block: int
    template: str

    def renumbered(self, block: int) -> str:
        return _PLACE.sub(lambda place: str(_stride(place) * block + int(place[2] or 0)), self.template, count=1)

    @property
    def is_state(self) -> bool:
        """A state of fixed size, of a recurrent or convolutional mixer: no dim counts tokens."""
        return _STATE.search(self.name) is not None

    @property
    def is_recurrent(self) -> bool:
        """A state that models keep in float32 whatever their own dtype."""
        return self.is_state and "conv" not in self.name


def parse_kv_name(name: str, *, output: bool = False, pattern: str | None = None) -> KVName | None:
    """Reads the block number out of a KV name; None when it is not a KV name.

    Args:
        name: a graph input (or output) name.
        output: look for output names.
        pattern: a template of the user's own, such as ``cache_k_{}``, or ``cache_{2b}`` and ``cache_{2b+1}`` where the
            names count tensors; replaces the known ones.

    Raises:
        RecipeError: the pattern has not exactly one place for the number.
    """
    if pattern is not None:
        places = list(_PLACE.finditer(pattern))
        if len(places) != 1 or _stride(places[0]) == 0:
            raise RecipeError(
                f"KV pattern {pattern!r} does not say where the block number is.",
                "Write {} in its place, as in cache_k_{}; or {2b} and {2b+1} where two names count one block.",
            )
        place, (start, stop) = places[0], places[0].span()
        match = re.fullmatch(f"{re.escape(pattern[:start])}(\\d+){re.escape(pattern[stop:])}", name)
        number = int(match[1]) - int(place[2] or 0) if match else -1
        if number < 0 or number % _stride(place):
            return None
        return KVName(name, number // _stride(place), pattern)
    for expression in _OUTPUT if output else _INPUT:
        match = expression.match(name)
        if match:
            start, stop = match.span(2)
            return KVName(name, int(match[2]), f"{name[:start]}{{}}{name[stop:]}")
    return None


def _stride(place: re.Match[str]) -> int:
    return int(place[1] or 1)


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
    return sorted(names, key=lambda k: k.template.rpartition("}")[2] or k.template)
