"""The flags of the command line as one table: each sets one key of the recipe. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ghostexport.errors import RecipeError


def _as_is(value: Any) -> Any:
    return value


def number_or_word(value: str | None) -> float | str | None:
    """``1e-3`` as a number, ``cv`` as a word."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


#: What most people need first stands in the first panel of ``--help``, beside ``-o`` and ``--hardware``.
FIRST = ("prune", "calibration", "quality")

#: Panel of ``--help`` for the flags of a recipe section, in the order of the stages.
PANELS = {
    "model": "Model",
    "calibration": "Calibration text",
    "select": "Which blocks go",
    "recover": "Repair",
    "export": "Export",
    "quantize": "Weight formats",
    "build": "Engines",
    "bench": "Benchmark",
    "eval": "Evaluation",
}


def colon_spans(remove: list[str] | None) -> list[list[int]]:
    """``10:17`` of the command line as half-open spans."""
    try:
        return [[int(part) for part in span.split(":")] for span in remove or ()]
    except ValueError:
        raise RecipeError(f"--remove {' '.join(remove or ())} is not START:STOP.", "Example: --remove 10:17") from None


@dataclass(frozen=True)
class Flag:
    """A flag: the recipe key it sets, its type on the command line, its help, and how its value is read."""

    section: str
    key: str
    kind: Any
    help: str
    read: Callable[[Any], Any] = _as_is

    def annotation(self, name: str) -> Any:
        dashed = f"--{name.replace('_', '-')}"
        names = (dashed,) if self.kind is not bool else (f"{dashed}/--no-{dashed.removeprefix('--')}",)
        panel = None if name in FIRST else PANELS[self.section]
        option = typer.Option(*names, help=self.help, show_default=False, rich_help_panel=panel)
        return Annotated[self.kind | None, option]


#: flag (with ``_`` for ``-``) -> recipe key. Defaults stand in ``recipe.py`` alone.
FLAGS: dict[str, Flag] = {
    "dtype": Flag("model", "dtype", str, "auto, float32, float16 or bfloat16."),
    "revision": Flag("model", "revision", str, "Revision of a Hub repository."),
    "trust_remote_code": Flag("model", "trust_remote_code", bool, "Run the Python code that a model's source brings."),
    "calibration": Flag(
        "calibration",
        "source",
        list[str],
        "wikitext2, c4, ptb, demo, or a .txt/.jsonl/.parquet file; repeatable, with shares: c4:96.",
        lambda names: names[0] if names and len(names) == 1 else names or None,
    ),
    "sequences": Flag("calibration", "sequences", int, "Calibration sequences."),
    "length": Flag("calibration", "length", int, "Tokens per sequence."),
    "held_out": Flag("calibration", "held_out_sequences", int, "Held-out sequences."),
    "seed": Flag("calibration", "seed", int, "Seed of the calibration draw."),
    "bos": Flag("calibration", "bos", bool, "Begin every window with the BOS token, where there is one."),
    "prune": Flag("select", "prune", int, "How many decoder blocks to remove."),
    "select": Flag("select", "criterion", str, "Criterion that chooses the blocks."),
    "protect_first": Flag("select", "protect_first", int, "Blocks at the start that stay."),
    "protect_last": Flag("select", "protect_last", int, "Blocks at the end that stay."),
    "search_minutes": Flag("select", "search_minutes", float, "Time that --select search may take."),
    "base": Flag("select", "base", str, "Score that prune-and-comp ranks by: shortgpt, taylor, magnitude, perplexity."),
    "operator": Flag("recover", "operators", list[str], "Recovery operator; repeatable."),
    "quality": Flag("recover", "quality", str, "paper (ghost), best (closed form), or heal (trained)."),
    "refit_downstream": Flag("recover", "refit_downstream", bool, "Refit the blocks behind the cut (+refit)."),
    "ridge": Flag("recover", "ridge", str, "Ridge of the least-squares operators: a number, or cv.", number_or_word),
    "rank": Flag("recover", "rank", int, "Rank of the operators' matrices."),
    "refit_upstream": Flag("recover", "refit_upstream", int, "Kept blocks before a cut that +refit also refits."),
    "solver": Flag("recover", "solver", str, "normal or svd: how ghost is solved."),
    "statistics": Flag("recover", "statistics", str, "dense, or sequential: later cuts fitted behind repaired ones."),
    "per_block": Flag("recover", "per_block", bool, "One map per removed block in plans of several runs."),
    "ratio": Flag("recover", "ratio", str, "LinearPatch: mean-of-ratios (its code) or ratio-of-means (its paper)."),
    "epochs": Flag("recover", "epochs", int, "Passes of the trained operators over the calibration set."),
    "learning_rate": Flag("recover", "learning_rate", float, "Highest learning rate of the healed operators."),
    "heal_rank": Flag("recover", "heal_rank", int, "Healing in less memory: linear layers change by this rank."),
    "weights": Flag("recover", "weights", str, "Checkpoint of the cut model, trained elsewhere (operator tuned)."),
    "exporter": Flag("export", "exporter", str, "auto, transformers or optimum."),
    "opset": Flag("export", "opset", int, "ONNX opset of the export."),
    "quantize": Flag(
        "quantize", "format", list[str], "Weights in int4, int8, fp8, mxfp8, nvfp4 beside float ones; repeatable."
    ),
    "block": Flag("quantize", "block", int, "Inputs that share a scale."),
    "scales": Flag("quantize", "scales", str, "search or absmax: how scales are chosen."),
    "rounding": Flag("quantize", "rounding", str, "nearest or gptq: how weights are rounded."),
    "activations": Flag(
        "quantize", "activations", str, "none; inputs too: static (int8, fp8), dynamic (mxfp8, nvfp4)."
    ),
    "smooth": Flag("quantize", "smooth", float, "SmoothQuant's exponent for rounded inputs."),
    "head": Flag("quantize", "head", str, "Head and tied embedding: keep, int8, or same as the rest."),
    "runtime": Flag("build", "runtimes", list[str], "onnxruntime, tensorrt, tensorrt-rtx; repeatable."),
    "profiles": Flag("build", "profiles", str, "joint, split or single."),
    "max_batch": Flag("build", "max_batch", int, "Largest batch of an engine."),
    "max_tokens": Flag("build", "max_tokens", int, "Most new tokens of one call."),
    "max_past": Flag("build", "max_past", int, "Most tokens in the KV cache."),
    "workspace": Flag("build", "workspace", int, "Builder workspace in MiB."),
    "hardware_compatibility": Flag("build", "hardware_compatibility", str, "ampere-plus or same-compute-capability."),
    "version_compatible": Flag("build", "version_compatible", bool, "Later TensorRT versions may load the plan."),
    "weight_streaming": Flag("build", "weight_streaming", bool, "Weights may stay in host memory."),
    "strip_plan": Flag("build", "strip_plan", bool, "Leave refittable weights out of the plan."),
    "refittable": Flag("build", "refittable", bool, "Operators can be swapped without a rebuild."),
    "opt_level": Flag("build", "opt_level", int, "Builder optimization level, 0 to 5."),
    "compute_capability": Flag("build", "compute_capability", list[str], "TensorRT-RTX target, SM86; repeatable."),
    "provider": Flag("build", "providers", list[str], "ONNX Runtime provider: cuda, cpu, ...; repeatable."),
    "preset": Flag("bench", "preset", str, "Workloads: edge, quick or server."),
    "repeats": Flag("bench", "repeats", int, "Rounds of the benchmark."),
    "batch": Flag("bench", "batches", list[int], "Batch size to measure; repeatable."),
    "prefill": Flag("bench", "prefill_tokens", list[int], "Prompt length to measure; repeatable."),
    "past": Flag("bench", "decode_past", list[int], "Past length of decode to measure; repeatable."),
    "eval_tokens": Flag("bench", "eval_tokens", int, "Held-out tokens for each engine's quality."),
    "windows": Flag("eval", "windows", int, "Held-out windows to evaluate on."),
    "corpus": Flag(
        "eval", "corpora", list[str], "Text to measure as papers do: wikitext2, c4, ptb, or a file; repeatable."
    ),
    "corpus_length": Flag("eval", "corpus_length", int, "Tokens of a corpus's windows."),
    "onnx": Flag("eval", "onnx", bool, "Evaluate the ONNX graphs too."),
    "generate": Flag("eval", "generate", int, "Tokens of the sample continuations."),
    "prompts": Flag("eval", "prompts", int, "How many beginnings are continued."),
    "task": Flag("eval", "tasks", list[str], "Zero-shot task, such as demo:arc_easy; repeatable."),
    "task_folder": Flag("eval", "task_folder", str, "Folder of lm-eval task files."),
    "limit": Flag("eval", "limit", int, "Items of each task."),
}


@dataclass(frozen=True)
class Verb:
    """A stage as a command, with the recipe sections whose flags it takes."""

    name: str
    stage: str
    help: str
    sections: tuple[str, ...]


VERBS = (
    Verb("calibrate", "calibrate", "Draw the calibration and held-out sequences.", ("model", "calibration", "select")),
    Verb("select", "select", "Choose the blocks to remove.", ("model", "calibration", "select")),
    Verb("recover", "recover", "Fit the operators.", ("model", "calibration", "select", "recover")),
    Verb("export", "export", "Export the dense graph, with KV cache.", ("model", "select", "export")),
    Verb(
        "verify",
        "verify",
        "Compare every graph with PyTorch.",
        ("model", "calibration", "select", "recover", "export", "quantize"),
    ),
    Verb(
        "eval",
        "eval",
        "Measure the quality of every variant: text, cuts, tasks.",
        ("model", "calibration", "select", "recover", "export", "quantize", "eval"),
    ),
    Verb(
        "engine",
        "build",
        "The main job: from a model to engines. Runs every missing stage.",
        ("model", "calibration", "select", "recover", "export", "quantize", "build"),
    ),
    Verb(
        "bench",
        "bench",
        "Measure quality and speed of the engines.",
        ("model", "calibration", "select", "recover", "export", "quantize", "build", "bench"),
    ),
)

#: ``--compat``: every switch as a published repository sets it; flags given beside it win. What cannot be switched, and
#: where a repository differs from its own paper, is in ``docs/methods.md``. Name -> recipe section -> key -> value.
COMPAT: dict[str, dict[str, dict[str, Any]]] = {
    "ghosted-v2": {
        "calibration": {"source": "c4", "sequences": 32, "length": 2048, "seed": 0, "bos": False},
        "select": {"criterion": "streamline-channelwise"},
        "recover": {
            "operators": ["ghost"],
            "ridge": 1e-6,
            "solver": "normal",
            "statistics": "dense",
            "per_block": True,
            "ratio": "mean-of-ratios",
        },
    },
    "linearpatch": {
        "calibration": {"source": "wikitext2", "sequences": 128, "length": 2048, "seed": 2, "bos": False},
        "select": {"criterion": "streamline-channelwise"},
        "recover": {
            "operators": ["linearpatch-rotate"],
            "statistics": "dense",
            "per_block": False,
            "ratio": "mean-of-ratios",
        },
    },
    "replaceme": {
        "calibration": {"sequences": 128, "length": 1024, "seed": 42, "bos": True},
        "select": {"criterion": "angular"},
        "recover": {"operators": ["replaceme-lstsq"], "ridge": 0.0, "statistics": "dense", "per_block": False},
    },
}


def merged(data: dict[str, Any], changes: dict[str, Any], keep_none: bool = False) -> dict[str, Any]:
    """``data`` with the given (not None) values of ``changes`` put over it, section by section."""
    result = dict(data)
    for section, values in changes.items():
        given = {key: value for key, value in values.items() if keep_none or value is not None}
        if given:
            old = result.get(section)
            result[section] = {**old, **given} if isinstance(old, dict) else given
    return result
