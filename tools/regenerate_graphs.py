"""Makes the fixtures in tests/fixtures/ and the reviewed text graphs in graphs/.

    python tools/regenerate_graphs.py                      all fixtures of this environment, then the text graphs
    python tools/regenerate_graphs.py NAME ...             only these fixtures
    python tools/regenerate_graphs.py --text               only the text graphs, from the fixtures at hand
    OPTIMUM_PYTHON=/venv/bin/python python tools/...       where optimum-onnx is installed (it pins an old transformers)
    EDGE_LLM=FOLDER python tools/...                       FOLDER: from `pip install --no-deps --target FOLDER
                                                           tensorrt-edgellm` (its own pins are other versions)

Pinned producers: transformers 5.24.0 + torch 2.13.0, optimum-onnx 0.1.0 + transformers 4.57.6,
onnxruntime-genai 0.18.0, tensorrt-edgellm 0.11.0 on the transformers and torch above.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import onnx_ir as ir  # noqa: E402
import torch  # noqa: E402

from ghostexport.exporters.transformers import sample_inputs  # noqa: E402
from ghostexport.onnxfile import strip_metadata  # noqa: E402
from tests.golden.regenerate import write_golden  # noqa: E402
from tests.surgery_cases import FIXTURES, fixture_model  # noqa: E402

FOLDER = ROOT / "tests" / "fixtures"


def main(arguments: list[str]) -> None:
    names = [a for a in arguments if a in FIXTURES]
    if unknown := set(arguments) - set(names) - {"--text"}:
        sys.exit(f"unknown fixture: {', '.join(sorted(unknown))}; known: {', '.join(FIXTURES)}")
    if "--text" not in arguments:
        for name in names or FIXTURES:
            make(name)
    write_golden(ROOT / "graphs")


def make(name: str) -> None:
    """Exports one fixture into ``tests/fixtures/<name>/model.onnx``, its weights inside."""
    fixture = FIXTURES[name]
    producer, _, way = fixture.producer.partition(" ")
    with tempfile.TemporaryDirectory() as temporary:
        model = EXPORTERS[producer](name, way, Path(temporary))
        strip_metadata(model)
        for graph in (model.graph, *model.graph.subgraphs()):
            for value in graph.initializers.values():
                tensor = value.const_value
                if isinstance(tensor, ir.ExternalTensor):
                    value.const_value = ir.TensorProtoTensor(ir.to_proto(_inside(tensor)))
        target = FOLDER / name / "model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        data = ir.to_proto(model).SerializeToString(deterministic=True)
    if str(ROOT).encode() in data or b"/home/" in data or len(data) >= 1_000_000:
        sys.exit(f"{name}: {len(data)} bytes, or a machine path inside")
    target.write_bytes(data)
    print(f"{name}: {len(data) / 1e3:.0f} kB")


def _inside(tensor: ir.ExternalTensor) -> ir.Tensor:
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def transformers(name: str, way: str, folder: Path) -> ir.Model:
    from ghostexport.exporters import export_model

    model = fixture_model(name)
    if way.startswith("ort_fusions="):
        return fused_for_onnxruntime(model, way.removeprefix("ort_fusions="))
    export_model(model, folder / "model.onnx", opset=23 if way == "opset 23" else 20)
    return ir.load(folder / "model.onnx")


def fused_for_onnxruntime(model: Any, provider: str) -> ir.Model:
    """As transformers' exporter hands it out, with its own names: only the fusions are asked for."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic=True, opset_version=20, ort_fusions=provider)
    program: ir.Model = OnnxExporter().export(model, sample_inputs(model), config=config).program
    return program


def optimum(name: str, way: str, folder: Path) -> ir.Model:
    """In its own environment: it needs transformers < 4.58."""
    python = os.environ.get("OPTIMUM_PYTHON")
    if python is None:
        sys.exit("set OPTIMUM_PYTHON to a python with optimum-onnx")
    save_checkpoint(fixture_model(name), folder / "checkpoint")
    command = [python, "-m", "optimum.exporters.onnx", "--model", str(folder / "checkpoint"), "--task"]
    subprocess.run([*command, "text-generation-with-past", str(folder / "onnx")], check=True)
    return ir.load(folder / "onnx" / "model.onnx")


def genai(name: str, way: str, folder: Path) -> ir.Model:
    save_checkpoint(fixture_model(name), folder / "checkpoint")
    provider = "cuda" if way == "fp16" else "cpu"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "checkpoint")]
    extra = ["--extra_options", "int4_block_size=16"] if way == "int4" else []
    subprocess.run(
        [*command, "-o", str(folder / "onnx"), "-p", way, "-e", provider, "-c", str(folder / "cache"), *extra],
        check=True,
    )
    return ir.load(folder / "onnx" / "model.onnx")


def edge_llm(name: str, way: str, folder: Path) -> ir.Model:
    """TensorRT Edge-LLM's checkpoint exporter, float16; it runs without a GPU and writes the embedding elsewhere."""
    package = os.environ.get("EDGE_LLM")
    if package is None:
        sys.exit("set EDGE_LLM to the folder that holds the package tensorrt_edgellm")
    checkpoint = folder / "checkpoint"
    save_checkpoint(fixture_model(name), checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    script = (
        "import sys; from tensorrt_edgellm import AutoModel, export_onnx; "
        "export_onnx(AutoModel.from_pretrained(sys.argv[1]), sys.argv[2], model_dir=sys.argv[1])"
    )
    command = [sys.executable, "-c", script, str(checkpoint), str(folder / "onnx" / "model.onnx")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": package})
    return ir.load(folder / "onnx" / "model.onnx")


def torch_dynamo(name: str, way: str, folder: Path) -> ir.Model:
    """torch's exporter without a cache: tokens in, logits out."""
    model = fixture_model(name)
    model.config.use_cache = False

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    dims = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("tokens", min=2)},)
    program = torch.onnx.export(
        Plain().eval(),
        (torch.randint(3, 90, (2, 5)),),
        dynamo=True,
        opset_version=20,
        dynamic_shapes=dims,
        input_names=["input_ids"],
        output_names=["logits"],
    )
    assert program is not None
    return program.model


def save_checkpoint(model: Any, folder: Path) -> None:
    """Weights, configuration and a one-word-per-token tokenizer: what checkpoint-reading exporters ask for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0").save_pretrained(
        folder
    )


EXPORTERS = {
    "transformers": transformers,
    "optimum": optimum,
    "genai": genai,
    "edge-llm": edge_llm,
    "torch": torch_dynamo,
}

if __name__ == "__main__":
    main(sys.argv[1:])
