import contextlib
import logging
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ghostexport import exporters
from ghostexport.errors import ExportError, RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.exporters import graph_file
from ghostexport.exporters.simplify import sharpen_scales, simplify, widen_bfloat16
from ghostexport.files import sha256_file
from ghostexport.models.silence import silenced
from tests.tiny import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tiny_decoders


def decoder_like(blocks=(0, 1), outputs=None, logits="logits"):
    """A graph with a decoder's interface: every KV input goes straight to its output through a weight."""
    header = ", ".join(f"float[B,2,P,4] past_{k}_{b}" for b in blocks for k in ("key", "value"))
    footer = ", ".join(
        f"float[B,2,P,4] present_{k}_{b}" for b in (blocks if outputs is None else outputs) for k in ("key", "value")
    )
    body = "\n".join(f"present_{k}_{b} = Mul(past_{k}_{b}, weight)" for b in blocks for k in ("key", "value"))
    table = ", ".join(str(number) for number in range(512))
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        decoder (int64[B,T] input_ids, {header}) => (float[B,T] {logits}, {footer})
        <float[512] table = {{{table}}}, float[4] weight = {{2, 2, 2, 2}}> {{
            {logits} = Cast<to=1>(input_ids)
            {body}
            unused = Identity(table)
        }}"""
    )


def write(model, target):
    return graph_file.write_graph(model, target, producer="transformers", hidden_size=8, num_blocks=2)


def test_auto_takes_the_exporter_of_the_installed_transformers():
    name, reason = exporters.choose_exporter("auto")
    assert name == "transformers"
    assert "transformers 5" in reason


def test_an_exporter_that_is_not_installed_names_the_pip_install():
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'ghostexport\[optimum\]'"):
        exporters.choose_exporter("optimum")


def test_an_unknown_exporter_names_the_nearest():
    with pytest.raises(RecipeError, match="Did you mean 'transformers'"):
        exporters.choose_exporter("transformer")


def test_without_any_exporter_both_remedies_are_named(monkeypatch):
    monkeypatch.setattr(exporters, "available", lambda name: False)
    with pytest.raises(RuntimeUnavailableError) as caught:
        exporters.choose_exporter("auto")
    assert "transformers>=5.23" in str(caught.value)
    assert "ghostexport[optimum]" in str(caught.value)


def test_both_files_are_written_and_described(tmp_path):
    target = tmp_path / "onnx" / "dense.onnx"
    written = write(decoder_like(), target)
    data = tmp_path / "onnx" / "dense.onnx.data"
    assert sorted(path.name for path in target.parent.iterdir()) == ["dense.onnx", "dense.onnx.data"]
    assert (written.graph_sha256, written.data_sha256) == (sha256_file(target), sha256_file(data))
    assert written.bytes == target.stat().st_size + data.stat().st_size
    assert (written.opset, written.dtype, written.producer) == (20, "float32", "transformers")
    table = ir.load(target).graph.initializers["table"].const_value
    assert table.location == "dense.onnx.data"
    np.testing.assert_array_equal(table.numpy(), np.arange(512))


def test_equal_graphs_give_equal_bytes(tmp_path):
    first, second = (write(decoder_like(), tmp_path / name / "dense.onnx") for name in "ab")
    assert (first.graph_sha256, first.data_sha256) == (second.graph_sha256, second.data_sha256)


def test_a_failed_write_leaves_the_old_export_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "dense.onnx"
    write(decoder_like(), target)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(model, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full_disk)
    with pytest.raises(RunFolderError, match="No space left on device"):
        write(decoder_like(), target)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("renames", [0, 1])
def test_a_killed_write_leaves_no_graph_beside_foreign_weights(tmp_path, renames):
    script = f"""
        import os, sys
        from pathlib import Path
        from tests.unit.test_exporters import decoder_like, write
        target = Path(sys.argv[1])
        write(decoder_like(), target)
        real, done = Path.replace, []
        def replace(self, other):
            if len(done) == {renames}:
                os._exit(9)
            done.append(other)
            return real(self, other)
        Path.replace = replace
        write(decoder_like(), target)
    """
    target = tmp_path / "dense.onnx"
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(target)], check=False)
    assert process.returncode == 9
    assert not target.exists()
    write(decoder_like(), target)  # and the next export cleans up
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense.onnx", "dense.onnx.data"]


def test_an_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "onnx").write_text("a file")
    with pytest.raises(RunFolderError, match="Cannot write"):
        write(decoder_like(), tmp_path / "onnx" / "dense.onnx")


def test_the_interface_of_a_full_decoder_is_accepted():
    graph_file.check_interface(decoder_like().graph, {0: 2, 1: 2})


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (decoder_like(logits="scores"), "no logits"),
        (decoder_like(blocks=(0, 2)), r"\{0: 2, 2: 2\} caches by block, the model keeps \{0: 2, 1: 2\}"),
        (decoder_like(outputs=(0,)), "incomplete"),
    ],
)
def test_an_incomplete_decoder_is_refused(model, complaint):
    with pytest.raises(ExportError, match=complaint):
        graph_file.check_interface(model.graph, {0: 2, 1: 2})


def test_what_the_exporter_raises_is_chained(tmp_path, monkeypatch):
    model = tiny("llama", num_hidden_layers=2)

    def boom(*args, **kwargs):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(model.model.layers[1], "forward", boom)
    with pytest.raises(ExportError, match="boom") as caught:
        exporters.export_model(model, tmp_path / "dense.onnx")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "--opset" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_quiet_silences_and_restores(capsys):
    logger = logging.getLogger("noisy.exporter")
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as seen, contextlib.suppress(KeyError):
        warnings.simplefilter("always")
        with silenced("noisy.exporter"):
            sys.stdout.write("progress")
            warnings.warn("drift", stacklevel=1)
            assert not logger.isEnabledFor(logging.WARNING)
            raise KeyError
    assert (capsys.readouterr().out, seen, logger.level) == ("", [], logging.INFO)


def test_simplify_keeps_what_the_graph_computes():
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[N,3] x) => (float[N,3] y) {
            zero = Constant<value = float {0.0}>()
            two = Constant<value = float {2.0}>()
            three = Constant<value = float {3.0}>()
            six = Mul(two, three)
            a = Transpose<perm=[1,0]>(x)
            b = Transpose<perm=[1,0]>(a)
            c = Add(b, zero)
            d = Mul(c, six)
            e = Mul(c, six)
            y = Add(d, e)
        }"""
    )
    before = ir.to_proto(model).SerializeToString()
    simplify(model)
    assert sorted(node.op_type for node in model.graph) == ["Add", "Mul"]
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    (expected,), (actual,) = (
        onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for data in (before, ir.to_proto(model).SerializeToString())
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(actual, 12 * x, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "MambaForCausalLM cannot read several tokens at once after its states"),
        ("jamba", "JambaForCausalLM reads several tokens at once after its states otherwise than as part of the whole"),
        ("zamba2", "Zamba2ForCausalLM reads a token by itself after its states otherwise than as part of the whole"),
        ("qwen3_next", "Qwen3NextForCausalLM loops over tokens outside its operations"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM keeps no keys and values per block in a cache"),
        ("nemotron_h", "block 3 of NemotronHForCausalLM keeps nothing that a graph can carry"),
        ("zaya", "blocks of ZayaForCausalLM read a second value, [2, 4, 32], beside the stream"),
        ("gemma4-per-layer-inputs", "blocks of Gemma4ForCausalLM read a second value, [2, 4, 8], beside the stream"),
        ("dbrx", "DbrxForCausalLM loops over the experts that its tokens hit"),
        ("deepseek_v32", "block 0 of DeepseekV32ForCausalLM keeps indexer_keys, which no graph here carries"),
    ],
)
def test_a_model_that_no_graph_carries_on_is_refused_at_once_and_the_checkpoint_named(tmp_path, name, reason):
    model = tiny_decoders.build(name)
    assert reason in exporters.check(model)
    with pytest.raises(ExportError, match="--to checkpoint"):
        exporters.export_model(model, tmp_path / "dense.onnx")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral"])
def test_nothing_speaks_against_a_decoder_with_plain_caches(name):
    assert exporters.check(tiny(name)) is None


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "bamba", "falcon_h1"])
def test_nothing_speaks_against_states_that_continue(name):
    assert exporters.check(tiny_decoders.build(name)) is None


def test_experts_that_tensorrt_cannot_split_are_refused_for_it_alone():
    model = tiny_decoders.build("jetmoe")
    exporters.require_exportable(model, runtimes=["onnxruntime"])
    with pytest.raises(ExportError, match="--runtime onnxruntime"):
        exporters.require_exportable(model, runtimes=["onnxruntime", "tensorrt-rtx"])
    exporters.require_exportable(tiny_decoders.build("mixtral"), runtimes=["tensorrt-rtx"])


def test_bfloat16_arithmetic_in_float32_is_the_same_bits():
    """Against PyTorch, which rounds once: all operations, magnitudes far apart, ties included."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-12, 12, (20000,)) for _ in range(2))
    for name in ("Add", "Sub", "Mul", "Div"):
        model = ir.from_onnx_text(
            f"""<ir_version: 10, opset_import: ["" : 20]>
            g (float[N] x, float[N] y) => (float[N] z) <bfloat16[N] a, bfloat16[N] b, bfloat16[N] c> {{
                a = Cast<to=16>(x)
                b = Cast<to=16>(y)
                c = {name}(a, b)
                z = Cast<to=1>(c)
            }}"""
        )
        widen_bfloat16(model)
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (actual,) = session.run(None, {"x": x.numpy(), "y": y.numpy()})
        operation = getattr(torch, name.lower())
        expected = operation(x.bfloat16(), y.bfloat16()).float().numpy()
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("heads, dtype", [(24, 16), (96, 16), (128, 16), (192, 16), (64, 16), (128, 10)])
def test_attention_scales_in_half_precision_come_as_a_product(heads, dtype):
    """Two factors of torch.onnx, both sqrt(scale), against the scale itself; another model's scale is left alone."""
    kind = ir.DataType(dtype).numpy()
    root = kind.type(heads**-0.25)
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({str(ir.DataType(dtype)).lower()}[T, D] q, {str(ir.DataType(dtype)).lower()}[D, T] k) => (y) {{
            a = Mul(q, root)
            b = Mul(root, k)
            y = MatMul(a, b)
        }}"""
    )
    constant = ir.Value(name="root", const_value=ir.tensor(root.reshape(()), name="root"))
    model.graph.register_initializer(constant)
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            if value.name == "root":
                node.replace_input_with(index, constant)
    sharpen_scales(model, [0.3])
    assert list(model.graph.initializers) == ["root"]
    sharpen_scales(model, [0.3, heads**-0.5])
    queries, keys, _ = model.graph
    factors = [node.inputs[index].const_value.numpy() for node, index in ((queries, 1), (keys, 0))]
    assert [factor.dtype for factor in factors] == [kind, kind]
    assert float(factors[0]) * float(factors[1]) == pytest.approx(heads**-0.5, rel=1.2e-4)
