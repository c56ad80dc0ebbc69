"""Every vendor name that the TensorRT code touches exists in each supported release, or stands behind a probe.

The syntax tree is walked once per release with ``hasattr`` probes evaluated against that release's listing, so code
behind a probe that fails there is dead and not checked. Vendor objects are recognised by their variable names.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.runtimes.vendor_listing import RELEASES, is_rtx, listing

PACKAGE = Path(__file__).parents[3] / "ghostexport" / "runtimes" / "nvinfer"
FILES = ("builder.py", "build_config.py", "diagnosis.py", "engine_loading.py", "nv_session.py")
RTX_ONLY = ("flavours.py",)

#: variable (or attribute, without its leading underscore) -> vendor class
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "parser": "OnnxParser",
    "parser_error": "ParserError",
    "cuda_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
    "runtime": "Runtime",
    "runtime_config": "IRuntimeConfig",
    "runtime_cache": "IRuntimeCache",
    "refitter": "Refitter",
    "refit_parser": "OnnxParserRefitter",
    "serialization": "ISerializationConfig",
    "attention_input": "IAttentionInputLayer",
    "attention": "IAttention",
}
MODULE = "trt"
OWN = {"text", "lines", "error", "profiles"}  # attributes of our own subclasses and dataclasses


def terminal(node):
    """``network`` of ``self._network`` or ``network``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_")


def owner(node, names):
    """The vendor class that ``node`` denotes, ``trt`` for the module, or None."""
    if terminal(node) == MODULE:
        return MODULE
    if isinstance(node, ast.Attribute) and terminal(node.value) == MODULE:
        return node.attr
    return CLASSES.get(terminal(node)) if terminal(node) in CLASSES else None


class Walk:
    """Collects what is missing in one release."""

    def __init__(self, names):
        self.names = names
        self.missing = []
        self.touched = set()

    def has(self, kind, attribute):
        return attribute in (self.names if kind == MODULE else self.names.get(kind, ()))

    def truth(self, test):
        """True or False when probes decide it for this release, else None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            values = [self.truth(value) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        if isinstance(test, ast.Call) and terminal(test.func) == "hasattr":
            kind = owner(test.args[0], self.names)
            if kind is not None and isinstance(test.args[1], ast.Constant):
                return self.has(kind, test.args[1].value)
        return None

    def block(self, statements):
        """Walks statements; True when they always leave the block."""
        for statement in statements:
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test)
                self.expression(statement.test)
                left_body = truth is not False and self.block(statement.body)
                left_else = truth is not True and self.block(statement.orelse)
                if (left_body and (truth or left_else)) or (truth is False and left_else):
                    return True
                continue
            nested = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.ExceptHandler):
                    self.block(child.body)
                elif not any(child in block for block in nested):
                    self.expression(child)
            left = [self.block(block) for block in nested if block]
            if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
                return True
            if isinstance(statement, ast.With) and any(left):
                return True
        return False

    def expression(self, node):
        if isinstance(node, ast.IfExp):
            truth = self.truth(node.test)
            self.expression(node.test)
            if truth is not False:
                self.expression(node.body)
            if truth is not True:
                self.expression(node.orelse)
            return
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.expression(value)
                if self.truth(value) is isinstance(node.op, ast.Or):
                    return
            return
        if isinstance(node, ast.Attribute):
            kind = owner(node.value, self.names)
            if kind is not None and node.attr not in OWN and not node.attr.startswith("__"):
                self.touched.add((kind, node.attr))
                if not self.has(kind, node.attr):
                    self.missing.append(f"line {node.lineno}: {kind}.{node.attr}")
        for child in ast.iter_child_nodes(node):
            self.expression(child)


def check(source, release):
    walk = Walk(listing(release))
    walk.block(ast.parse(source).body)
    return walk


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", FILES)
def test_every_vendor_name_exists_or_is_probed(name, release):
    assert check((PACKAGE / name).read_text(), release).missing == []


@pytest.mark.parametrize("name", RTX_ONLY)
def test_the_rtx_file_uses_only_what_rtx_has(name):
    (release,) = filter(is_rtx, RELEASES)
    assert check((PACKAGE / name).read_text(), release).missing == []


def test_all_eight_listings_are_here_and_the_walk_sees_the_code():
    assert len(RELEASES) == 8
    touched = set().union(*(check((PACKAGE / name).read_text(), RELEASES[-1]).touched for name in FILES))
    for expected in (
        ("Builder", "build_serialized_network_to_stream"),
        ("INetworkDefinition", "mark_weights_refittable"),
        ("IExecutionContext", "execute_async_v3"),
        ("Refitter", "set_named_weights"),
        ("OnnxParser", "parse_from_file"),
        (MODULE, "IStreamWriter"),
        ("BuilderFlag", "REFIT_INDIVIDUAL"),
    ):
        assert expected in touched, expected


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("config.set_flag(trt.BuilderFlag.FP16)", 1),
        ("def f(trt):\n if hasattr(trt.BuilderFlag, 'FP16'):\n  trt.BuilderFlag.FP16", 0),
        ("def f(trt):\n if not hasattr(trt.BuilderFlag, 'FP16'):\n  return\n trt.BuilderFlag.FP16", 0),
        ("def f(trt):\n if not hasattr(trt.BuilderFlag, 'TF32'):\n  return\n trt.BuilderFlag.FP16", 1),
        ("x = trt.BuilderFlag.FP16 if hasattr(trt.BuilderFlag, 'FP16') else 0", 0),
        ("x = hasattr(builder, 'platform_has_tf32') and builder.platform_has_tf32", 0),
        ("self._builder.platform_has_fast_fp16", 1),
        ("trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH", 1),
    ],
)
def test_the_walk_finds_what_release_11_removed(source, missing):
    assert len(check(source, "tensorrt-11.4.0.106").missing) == missing


def test_no_precision_flag_and_no_version_comparison_anywhere():
    for path in PACKAGE.glob("*.py"):
        source = path.read_text()
        assert not any(
            word in source for word in ("BuilderFlag.FP16", "BuilderFlag.BF16", "BuilderFlag.INT8", "EXPLICIT_BATCH")
        )
        assert "__version__ <" not in source and "__version__ >" not in source


def overloads(docstring):
    """``(required, names)`` of every signature in a pybind11 docstring, ``self`` left out."""
    found = []
    for match in re.finditer(r"^(?:\d+\. )?\w+\((self: .*)\) -> ", docstring or "", re.MULTILINE):
        depth, parts = 0, [""]
        for character in match.group(1):
            depth += (character in "[(<") - (character in "])>")
            if character == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += character
        arguments = [part.strip() for part in parts[1:]]
        found.append((sum("=" not in a for a in arguments), [a.split(":")[0].strip() for a in arguments]))
    return found


def calls(source):
    """``(class, method, positional, keywords)`` of every call on a vendor object."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = owner(node.func.value, {})
            if kind not in (None, MODULE) and not any(isinstance(a, ast.Starred) for a in node.args):
                yield kind, node.func.attr, len(node.args), {k.arg for k in node.keywords}


def test_calls_fit_the_signatures_of_the_real_rtx_bindings():
    trt = pytest.importorskip("tensorrt_rtx")
    checked = 0
    for name in FILES:
        for kind, method, positional, keywords in calls((PACKAGE / name).read_text()):
            if method == "__init__":
                continue
            signatures = overloads(getattr(getattr(trt, kind), method).__doc__)
            assert signatures, (kind, method)
            assert any(
                required <= positional + len(keywords) <= len(names) and keywords <= set(names)
                for required, names in signatures
            ), (kind, method, positional, keywords, signatures)
            checked += 1
    assert checked > 40


def test_the_rtx_listing_is_that_of_the_installed_bindings():
    trt = pytest.importorskip("tensorrt_rtx")
    release = f"tensorrt_rtx-{trt.__version__}"
    if release not in RELEASES:
        pytest.skip(f"no listing of {release}")
    for kind in {*CLASSES.values(), "BuilderFlag", "ComputeCapability", "HardwareCompatibilityLevel"}:
        real = {name for name in dir(getattr(trt, kind)) if not name.startswith("_")}
        assert real == listing(release)[kind], kind


def test_named_flags_and_levels_are_known_to_some_release():
    from ghostexport.recipe import BuildSection
    from ghostexport.runtimes.nvinfer.build_config import _FLAGS, _member

    for flag in _FLAGS.values():
        assert all(flag in listing(release)["BuilderFlag"] for release in RELEASES)
    levels = BuildSection.model_fields["hardware_compatibility"].annotation.__args__
    for level in levels:
        assert any(_member(level) in listing(release)["HardwareCompatibilityLevel"] for release in RELEASES), level
