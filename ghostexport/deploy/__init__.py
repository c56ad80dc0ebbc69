"""From a run to the folder that a runtime expects: ``ghostexport deploy RUN --variant V --target T -o OUT``.

A target says which operators and weight formats it can hold, and refuses the others with the variant that would fit.
Where its runtime is installed, what was written is run and compared with the verified graph.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ghostexport.deploy import (
    edge_llm,
    engine_folder,
    genai,
    llama_cpp,
    model_repository,
    openvino,
    plain_checkpoint,
    remote_code,
    vllm,
)
from ghostexport.deploy.bundle import BASE_CARD, Bundle, write_card, write_sums
from ghostexport.deploy.selftest import Outcome, Runner, check, read_selftest, write_selftest
from ghostexport.errors import RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import atomic_folder
from ghostexport.plan import PrunePlan
from ghostexport.quantization.targets import HOLDS
from ghostexport.recipe import float_variant, is_repaired
from ghostexport.runfolder import RunFolder
from ghostexport.validation import require_name


@dataclass(frozen=True)
class Target:
    """A runtime to deploy for.

    Attributes:
        refusal: why it cannot hold a variant whose format it holds; None when it can.
        write: writes what is its own into the folder.
        use: how the folder is run, in Markdown, or what says it of a variant.
        package: module that must be importable to run it.
        install: how that is installed.
        run: answers the self-test; None where it cannot be run from here.
        dtype: it computes in, where that is not the variant's.
        context: tokens that it holds of a variant, where that is fewer than the model's positions.
        forms: of quantised weights that it holds, beside float ones.
        otherwise: arguments of ``ghostexport`` that make a variant it holds; ``{run}`` is the run folder.
    """

    refusal: Callable[[Bundle], str | None]
    write: Callable[[Bundle, Path, Execution], None]
    use: str | Callable[[Bundle], str]
    package: str
    install: str
    run: Runner | None = None
    dtype: str | None = None
    context: Callable[[Bundle], int | None] = lambda bundle: None
    forms: tuple[str, ...] = ()
    otherwise: str = "verify {run} --operator ghost-zero+refit"

    def why_not(self, bundle: Bundle) -> str | None:
        """Why it cannot hold a variant; None when it can."""
        if bundle.form is not None and bundle.form not in self.forms:
            return f"it holds {', '.join(('float', *self.forms))} weights, not {bundle.form}"
        return self.refusal(bundle)


def _engine(runtime: str, package: str) -> Target:
    return Target(
        partial(engine_folder.refusal, runtime=runtime),
        partial(engine_folder.write, runtime=runtime),
        partial(engine_folder.use, runtime=runtime),
        package,
        f"pip install {package} cuda-python",
        engine_folder.run,
        "float16",  # float32 engines compute in TF32, whose mantissa is as long
        partial(engine_folder.context_of, runtime=runtime),
        HOLDS[runtime],
        f"build engine {{run}} --runtime {runtime}",
    )


def _anything(bundle: Bundle) -> None:
    """Refuses nothing."""


_CODE = "```python\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)\n```"

TARGETS: dict[str, Target] = {
    "checkpoint": Target(
        plain_checkpoint.refusal,
        plain_checkpoint.write,
        "Any loader of Hugging Face checkpoints: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp's converter.",
        "transformers",
        remote_code.INSTALL,
        remote_code.run,
    ),
    "transformers": Target(_anything, remote_code.write, _CODE, "transformers", remote_code.INSTALL, remote_code.run),
    "vllm": Target(
        _anything,
        remote_code.write,
        "```console\nvllm serve FOLDER --trust-remote-code\n```\n"
        "It computes float32 weights in bfloat16, unless told `--dtype float32`.",
        "vllm",
        vllm.INSTALL,
        vllm.run,
    ),
    "genai": Target(
        genai.refusal,
        genai.write,
        genai.use,
        "onnxruntime_genai",
        "pip install onnxruntime-genai==0.18.0",
        genai.run,
        forms=HOLDS["onnxruntime"],
    ),
    "openvino": Target(
        openvino.refusal,
        openvino.write,
        "`openvino_genai.LLMPipeline(FOLDER, 'CPU')`.",
        "openvino",
        openvino.INSTALL,
        openvino.run,
        forms=("int8", "int4"),
    ),
    "triton": Target(
        model_repository.refusal,
        model_repository.write,
        "```console\ntritonserver --model-repository FOLDER/model_repository\n```\n`generator` streams token ids.",
        "tritonclient",
        model_repository.INSTALL,
        model_repository.run,
        forms=HOLDS["onnxruntime"],
    ),
    "tensorrt": _engine("tensorrt", "tensorrt"),
    "tensorrt-rtx": _engine("tensorrt-rtx", "tensorrt_rtx"),
    "edge-llm": Target(
        edge_llm.refusal,
        edge_llm.write,
        edge_llm.use,
        "transformers",
        remote_code.INSTALL,
        edge_llm.run,
    ),
    "gguf": Target(
        llama_cpp.refusal,
        llama_cpp.write,
        "```console\nllama-cli -m model.q8_0.gguf\n```",
        "xllamacpp",
        "pip install xllamacpp==2026.10.11549",
        llama_cpp.run,
        "float16",
    ),
}


def deploy(
    run: Path,
    target: str,
    output: Path,
    variant: str | None = None,
    execution: Execution | None = None,
    exported: Path | None = None,
) -> str:
    """Writes a variant of a run as a target's folder, and runs its self-test where the runtime is installed.

    Args:
        run: run folder, verified.
        target: of :data:`TARGETS`.
        output: a new folder.
        variant: None for the first repaired one that the target can hold.
        execution: how to run.
        exported: for ``edge-llm`` the folder that its own exporter made of the whole model, which takes any operator.

    Returns:
        the outcome of the self-test, or how to get to one, as a sentence.

    Raises:
        RecipeError: unknown target or variant, or the target cannot hold the variant.
        RunFolderError: the run is not verified, or the output exists.
        ParityError: what was written answers otherwise than the verified graph; the folder is removed.
    """
    execution, name = execution or Execution(), require_name(target, TARGETS, "target")
    chosen = TARGETS[name]
    if exported is not None and name != "edge-llm":
        raise RecipeError(f"{name} takes no export of its own.", "Give --exported with --target edge-llm.")
    bundle = _bundle(RunFolder(run), chosen, name, variant, exported)
    if output.exists() and any(output.iterdir()):
        raise RunFolderError(f"{output} exists.", "Name a new folder with -o.")
    with atomic_folder(output) as temporary:
        bundle.copy_description(temporary)
        chosen.write(bundle, temporary, execution)
        if (temporary / "README.md").exists():
            (temporary / "README.md").replace(temporary / BASE_CARD)
        write_selftest(bundle, temporary, name, chosen.context(bundle))
        write_card(bundle, temporary, name, chosen.use if isinstance(chosen.use, str) else chosen.use(bundle))
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


def _bundle(folder: RunFolder, target: Target, name: str, variant: str | None, exported: Path | None) -> Bundle:
    names = folder.graphs()
    parity = folder.read_parity()
    if not names or not parity:
        raise RunFolderError(f"{folder.path} has no verified graph.", f"Run: ghostexport verify {folder.path}")
    found = {v: replace(_of(folder, v), exported=exported) for v in names if parity.get(v, {}).get("passed")}
    fitting = [v for v, bundle in found.items() if target.why_not(bundle) is None]
    repaired = [v for v in fitting if is_repaired(v)]
    if variant is None and repaired:
        return found[repaired[0]]
    chosen = require_name(variant, found, "variant") if variant else next(iter([v for v in found if v != "dense"]))
    if (reason := target.why_not(found[chosen])) is not None:
        other = f"none of this run; make one: ghostexport {target.otherwise.format(run=shlex.quote(str(folder.path)))}"
        raise RecipeError(f"{name} cannot hold {chosen}: {reason}.", f"What fits: {', '.join(repaired) or other}")
    return found[chosen]


def _of(folder: RunFolder, variant: str) -> Bundle:
    plan, dense = folder.read_plan(), float_variant(variant) == "dense"
    return Bundle(
        folder, variant, PrunePlan.from_spans(plan.num_blocks, []) if dense else plan, folder.read_operators(variant)
    )
