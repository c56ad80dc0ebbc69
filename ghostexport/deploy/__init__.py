"""From a run to the folder that a runtime expects: ``ghostexport deploy RUN --variant V --target T -o OUT``.

A target says which operators and weight formats it can hold, and refuses the others with the variant that would fit.
Where its runtime is installed, what was written is run and compared with the verified graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ghostexport.deploy import genai, llama_cpp, model_repository, openvino, plain_checkpoint, remote_code
from ghostexport.deploy.bundle import BASE_CARD, Bundle, write_card, write_sums
from ghostexport.deploy.selftest import Outcome, Runner, check, read_selftest, write_selftest
from ghostexport.errors import RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import atomic_folder
from ghostexport.plan import PrunePlan
from ghostexport.recipe import float_variant
from ghostexport.runfolder import RunFolder
from ghostexport.validation import require_name


@dataclass(frozen=True)
class Target:
    """A runtime to deploy for.

    Attributes:
        refusal: why it cannot hold a variant; None when it can.
        write: writes what is its own into the folder.
        use: how the folder is run, in Markdown.
        package: module that must be importable to run it.
        install: how that is installed.
        run: answers the self-test; None where it cannot be run from here.
        dtype: it computes in, where that is not the variant's.
    """

    refusal: Callable[[Bundle], str | None]
    write: Callable[[Bundle, Path, Execution], None]
    use: str
    package: str
    install: str
    run: Runner | None = None
    dtype: str | None = None


_CODE = "```python\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)\n```"

TARGETS: dict[str, Target] = {
    "checkpoint": Target(
        plain_checkpoint.refusal,
        plain_checkpoint.write,
        "Any loader of Hugging Face checkpoints: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp's converter.",
        "transformers",
        "pip install transformers torch",
        remote_code.run,
    ),
    "transformers": Target(
        remote_code.refusal, remote_code.write, _CODE, "transformers", "pip install transformers torch", remote_code.run
    ),
    "vllm": Target(
        remote_code.refusal,
        remote_code.write,
        "```console\nvllm serve FOLDER --trust-remote-code\n```",
        "transformers",
        "pip install vllm",
        remote_code.run,
    ),
    "genai": Target(
        genai.refusal,
        genai.write,
        "ONNX Runtime GenAI: `onnxruntime_genai.Model(FOLDER)`. `genai_config.cuda.json` and `genai_config.rtx.json` "
        "are for NVIDIA GPUs: put one in the place of `genai_config.json`.",
        "onnxruntime_genai",
        "pip install onnxruntime-genai",
        genai.run,
    ),
    "openvino": Target(
        openvino.refusal,
        openvino.write,
        "`openvino_genai.LLMPipeline(FOLDER, 'CPU')`.",
        "openvino",
        openvino.INSTALL,
        openvino.run,
    ),
    "triton": Target(
        model_repository.refusal,
        model_repository.write,
        "```console\ntritonserver --model-repository FOLDER/model_repository\n```\n`generator` streams token ids.",
        "tritonserver",
        "docker pull nvcr.io/nvidia/tritonserver",
    ),
    "gguf": Target(
        llama_cpp.refusal,
        llama_cpp.write,
        "```console\nllama-cli -m model.q8_0.gguf\n```",
        "xllamacpp",
        "pip install xllamacpp",
        llama_cpp.run,
        "float16",
    ),
}


def deploy(run: Path, target: str, output: Path, variant: str | None = None, execution: Execution | None = None) -> str:
    """Writes a variant of a run as a target's folder, and runs its self-test where the runtime is installed.

    Args:
        run: run folder, verified.
        target: of :data:`TARGETS`.
        output: a new folder.
        variant: None for the first repaired one that the target can hold.
        execution: how to run.

    Returns:
        the outcome of the self-test, or how to get to one, as a sentence.

    Raises:
        RecipeError: unknown target or variant, or the target cannot hold the variant.
        RunFolderError: the run is not verified, or the output exists.
        ParityError: what was written answers otherwise than the verified graph; the folder is removed.
    """
    execution, name = execution or Execution(), require_name(target, TARGETS, "target")
    chosen = TARGETS[name]
    bundle = _bundle(RunFolder(run), chosen, name, variant)
    if output.exists() and any(output.iterdir()):
        raise RunFolderError(f"{output} exists.", "Name a new folder with -o.")
    with atomic_folder(output) as temporary:
        bundle.copy_description(temporary)
        chosen.write(bundle, temporary, execution)
        if (temporary / "README.md").exists():
            (temporary / "README.md").replace(temporary / BASE_CARD)
        write_selftest(bundle, temporary, name)
        write_card(bundle, temporary, name, chosen.use)
        write_sums(temporary)
        return _tested(temporary, chosen, name)


def selftest(folder: Path) -> Outcome:
    """Runs the self-test of a deployed folder.

    Raises:
        RunFolderError: it is no deployed folder, or one of its files is missing or was changed.
        RuntimeUnavailableError: its runtime is not installed, or runs elsewhere.
        ParityError: it answers otherwise than the verified graph.
    """
    name = require_name(str(read_selftest(folder)["target"]), TARGETS, "target")
    target = TARGETS[name]
    if target.run is None:
        raise RuntimeUnavailableError(f"{name} folders are not run from here.", f"See {folder / 'README.md'}.")
    if importlib.util.find_spec(target.package) is None:
        raise RuntimeUnavailableError(f"{name} is not installed here.", target.install)
    return check(folder, target.run, target.dtype)


def _tested(folder: Path, target: Target, name: str) -> str:
    try:
        return f"self-test on {name} {selftest(folder)}"
    except RuntimeUnavailableError as error:
        return f"self-test not run: {error.message} {error.remedy} Then: ghostexport selftest FOLDER"


def _bundle(folder: RunFolder, target: Target, name: str, variant: str | None) -> Bundle:
    names = folder.graphs()
    parity = folder.read_parity()
    if not names or not parity:
        raise RunFolderError(f"{folder.path} has no verified graph.", f"Run: ghostexport verify {folder.path}")
    found = {v: _of(folder, v) for v in names if parity.get(v, {}).get("passed")}
    fitting = [v for v, bundle in found.items() if target.refusal(bundle) is None]
    repaired = [v for v in fitting if v not in ("dense", "pruned")]
    if variant is None and repaired:
        return found[repaired[0]]
    chosen = require_name(variant, found, "variant") if variant else next(iter([v for v in found if v != "dense"]))
    if (reason := target.refusal(found[chosen])) is not None:
        fit = ", ".join(repaired) or "none of this run; recover one with --operator ghost-zero --refit-downstream"
        raise RecipeError(f"{name} cannot hold {chosen}: {reason}.", f"What fits: {fit}.")
    return found[chosen]


def _of(folder: RunFolder, variant: str) -> Bundle:
    plan, dense = folder.read_plan(), float_variant(variant) == "dense"
    return Bundle(
        folder, variant, PrunePlan.from_spans(plan.num_blocks, []) if dense else plan, folder.read_operators(variant)
    )
