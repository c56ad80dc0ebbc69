"""A repair with non-linear features in closed form: ``Delta ~ x M + relu(x R) V``, R fixed; is it worth its bytes?

    python benchmarks/features.py            # SmolLM2-135M, seven blocks removed; writes results/features.json

Token-weighted least squares on ``[x, relu(x R)]`` under a ridge that every fourth sequence judges (``choose_change``).
``R`` ``[C, K]`` is random (columns of norm 1) or the principal directions of the stream. Beside them stand the linear
operator, fitted in the same way, and, for the bytes of the widest features, one more kept block with that operator:
``R`` and ``V`` of 3,072 features are 3.5 million numbers, as many as a block.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from healing import window_losses
from quality_report import AVERAGED, geometric_mean, perplexity, ratio
from quality_texts import calibration_windows, held_out_windows, pools

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.models.blocks import hidden_states
from ghostexport.moments import BoundaryMoments, token_weights
from ghostexport.plan import PrunePlan
from ghostexport.recovery.refit.judging import choose_change, judges

SPAN, SHORTER = (12, 19), (13, 19)
SEQUENCES, WINDOWS = 64, 5
WIDTHS = (576, 1152, 3072)
RESULTS = Path(__file__).parent / "results"

Directions = torch.Tensor | None


def main() -> None:
    loaded = models.load_model("smollm2", "float32", Execution(device="cpu"))
    texts, bos = pools(loaded.tokenizer), loaded.tokenizer.bos_token_id
    drawn, held_out = calibration_windows(texts, SEQUENCES, bos), held_out_windows(texts, WINDOWS, bos)
    begun = time.monotonic()
    stream = read(loaded, drawn)
    C = loaded.hidden_size
    wide = torch.nn.functional.normalize(torch.randn(C, WIDTHS[-1], generator=torch.Generator().manual_seed(0)), dim=0)
    x = stream[SPAN[0]][::8].reshape(-1, C).double()
    weighted = x * token_weights(x)[:, None]
    principal = torch.linalg.eigh(weighted.T @ x).eigenvectors.float()
    folds = moments(stream, SPAN, wide)
    subjects: dict[str, tuple[tuple[int, int], Directions, list[BoundaryMoments]]] = {
        "linear": (SPAN, None, [part(fold, C) for fold in folds])
    }
    for width in WIDTHS:
        subjects[f"random {width}"] = (SPAN, wide[:, :width], [part(fold, C + width) for fold in folds])
    subjects["principal 576"] = (SPAN, principal, moments(stream, SPAN, principal))
    subjects["linear, one more block kept"] = (SHORTER, None, moments(stream, SHORTER, None))
    cells, rows = {}, []
    for name, (span, directions, own) in subjects.items():
        choice = choose_change(*own)
        assert choice.change is not None
        model = repaired(loaded, span, choice.change.float(), directions)
        cells[name] = {"losses": {domain: window_losses(model, windows) for domain, windows in held_out.items()}}
        extra = 0 if directions is None else 2 * directions.numel()
        block = sum(parameter.numel() for parameter in loaded.blocks[SPAN[0]].parameters())
        numbers = C * C + extra + (block if span == SHORTER else 0)
        row: dict[str, Any] = {"repair": name, "removed": list(span), "numbers": numbers, "ridge": choice.ridge}
        row |= {"judged_error": choice.error, "geometric_mean": geometric_mean(cells[name])}
        row |= {domain: perplexity(losses) for domain, losses in cells[name]["losses"].items()}
        row["ratio_to_linear"] = ratio(cells[name], cells["linear"], AVERAGED)
        rows.append(row)
        print(time.strftime("%H:%M:%S"), row, flush=True)
    about = {"model": "SmolLM2-135M (de-quantised)", "sequences": SEQUENCES, "windows": WINDOWS}
    about |= {"torch": torch.__version__, "seconds": round(time.monotonic() - begun)}
    write_json(RESULTS / "features.json", about | {"rows": rows})


def read(loaded: models.LoadedModel, tokens: CalibrationSet) -> dict[int, torch.Tensor]:
    """``x_l`` ``[N, T, C]`` at the ends of both spans, products in bfloat16."""
    points = sorted({*SPAN, *SHORTER})
    found = {point: torch.empty(*tokens.tokens.shape, loaded.hidden_size) for point in points}
    for batch in tokens.batches():

        def keep(point: int, x: torch.Tensor, rows: range = batch.sequences) -> None:
            found[point][rows.start : rows.stop] = x

        with torch.autocast("cpu", torch.bfloat16):
            models.read_residuals(loaded.model, points, keep, batch.input_ids)
    return found


def regressors(x: torch.Tensor, R: Directions) -> torch.Tensor:
    """``[x, relu(x R)]``"""
    return x if R is None else torch.cat([x, torch.relu(x @ R)], dim=-1)


def moments(stream: dict[int, torch.Tensor], span: tuple[int, int], R: Directions) -> list[BoundaryMoments]:
    """Of the fitting and of the judging sequences."""
    C = stream[span[0]].shape[-1]
    folds = [BoundaryMoments(C, regressors=C + (0 if R is None else R.shape[1])) for _ in range(2)]
    for sequence, (x, post) in enumerate(zip(*(stream[point] for point in span), strict=True)):
        folds[judges(sequence)].add_change(regressors(x, R), post.double() - x.double(), token_weights(post))
    return folds


def part(fold: BoundaryMoments, rows: int) -> BoundaryMoments:
    """The moments of the first regressors alone."""
    found = BoundaryMoments(fold.channels, regressors=rows)
    found.gram, found.cross, found.sum_x = fold.gram[:rows, :rows], fold.cross[:rows], fold.sum_x[:rows]
    found.sum_delta, found.square_delta = fold.sum_delta, fold.square_delta
    found.weight, found.tokens = fold.weight, fold.tokens
    return found


def repaired(loaded: models.LoadedModel, span: tuple[int, int], change: torch.Tensor, R: Directions) -> Any:
    """The cut model with ``x + [x, relu(x R)] W`` before the block behind the cut, in float32."""
    model = models.drop_blocks(loaded.model, PrunePlan.from_spans(loaded.num_blocks, [span]))

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast("cpu", enabled=False):
            x = hidden_states(args, kwargs).float()
            y = x + regressors(x, R) @ change
        return ((y, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": y})

    models.find_blocks(model)[span[0]].register_forward_pre_hook(before, with_kwargs=True)
    return model


if __name__ == "__main__":
    main()
