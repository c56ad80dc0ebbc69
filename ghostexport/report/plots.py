"""The plots of the report as SVG text, drawn for a width of about 360 to 600 pixels."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RuntimeUnavailableError

#: Inches; at 72 points an inch this is the width of a phone, so that 8-point text stays readable there.
WIDTH = 4.8
_FIXED = {"dense": "#5b6470", "pruned": "#c2700a"}
_CYCLE = ("#6d28d9", "#0b7a5b", "#1d5fd1", "#b5179e", "#0e7490", "#9f1239")
#: Side of the heat map: larger matrices are pooled to it by their largest magnitude.
HEAT_SIDE = 96
_STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444",
    "svg.fonttype": "path",
}

P = ParamSpec("P")


def _styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Draws in the report's style, whatever the user's own matplotlib settings are."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            import matplotlib
        except ImportError as error:
            raise RuntimeUnavailableError(
                "The report needs matplotlib, which is not installed.", "pip install 'ghostexport[report]'"
            ) from error
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            return draw(*args, **kwargs)

    return styled


def colours(variants: Sequence[str]) -> dict[str, str]:
    """One fixed colour per variant; ``ghost`` gets the first of the cycle wherever it stands."""
    operators = sorted((v for v in variants if v not in _FIXED), key=lambda v: (v != "ghost", variants.index(v)))
    return _FIXED | {v: _CYCLE[i % len(_CYCLE)] for i, v in enumerate(operators)}


@_styled
def pareto(points: Mapping[str, tuple[float, float, float, float]], quality: str, speed: str) -> str:
    """Quality over speed-up.

    Args:
        points: variant -> (speed-up, its low, its high, quality).
        quality, speed: axis labels.
    """
    figure, (axis,) = _figure("pareto", 3.2)
    tint = colours(list(points))
    for variant, (speedup, low, high, y) in points.items():
        axis.errorbar(
            speedup, y, xerr=[[speedup - low], [high - speedup]], fmt="o", ms=7, color=tint[variant], capsize=3
        )
    values = [y for *_, y in points.values()]
    if max(values) > 4 * min(values):
        _log_scale(axis)
    axis.margins(x=0.22, y=0.18)
    middle = float(np.mean(axis.get_xlim()))
    for variant, (speedup, _, _, y) in points.items():
        right = speedup <= middle
        offset, align = ((9, 4), "left") if right else ((-9, 4), "right")
        axis.annotate(
            variant, (speedup, y), xytext=offset, textcoords="offset points", ha=align, va="bottom", color=tint[variant]
        )
    axis.set_xlabel(speed)
    axis.set_ylabel(quality)
    return _svg(figure, "pareto")


@_styled
def distributions(title: str, samples: Mapping[str, Sequence[float]]) -> str:
    """Raw samples and quartiles of each variant on one workload.

    Args:
        samples: variant -> milliseconds.
    """
    figure, (axis,) = _figure(title, 0.7 + 0.42 * len(samples))
    tint = colours(list(samples))
    generator = np.random.default_rng(0)
    for row, (variant, values) in enumerate(samples.items()):
        jitter = generator.uniform(-0.24, 0.24, len(values))
        axis.scatter(values, row + jitter, s=7, color=tint[variant], alpha=0.45, linewidths=0)
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
        axis.plot([low, high], [row, row], color="black", lw=1.2)
        axis.plot([median], [row], "|", color="black", ms=13, mew=1.8)
    axis.set_yticks(range(len(samples)), list(samples))
    axis.set_ylim(len(samples) - 0.5, -0.5)
    axis.set_xlabel("ms")
    axis.set_title(title)
    return _svg(figure, title)


@_styled
def scores(series: Mapping[str, Sequence[tuple[float, float]]], removed: Sequence[Sequence[int]], label: str) -> str:
    """What a criterion computed, ``(block, score)`` by name, with the cut shaded.

    Of more than three series (the rounds of a greedy search) only the first and the last have a colour.
    """
    figure, (axis,) = _figure(f"scores {label}", 2.6)
    named = list(series) if len(series) <= 3 else [next(iter(series)), list(series)[-1]]
    for name, points in series.items():
        style = {"color": _CYCLE[named.index(name)], "label": name} if name in named else {"color": "#c4c9d0"}
        axis.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, zorder=2 + (name in named), **style)
    for start, stop in removed:
        axis.axvspan(start - 0.5, stop - 0.5, color="#c2700a", alpha=0.18, lw=0)
    for start, stop in removed if len(removed) <= 2 else ():  # the labels of many spans would cover each other
        axis.annotate(
            f"removed\n[{start}, {stop})",
            ((start + stop - 1) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            color="#8a4b00",
        )
    axis.margins(y=0.25)
    values = [y for points in series.values() for _, y in points]
    if min(values) > 0 and max(values) > 50 * min(values):  # one indispensable block would flatten all others
        axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("block (of a span: its first)")
    axis.set_ylabel(label)
    if len(series) > 1:
        axis.legend(frameon=False)
    return _svg(figure, f"scores {label}")


@_styled
def heat_map(name: str, matrix: NDArray[Any]) -> str:
    """The operator's delta ``[C, C]``, pooled to :data:`HEAT_SIDE` by largest magnitude."""
    figure, (axis,) = _figure(name, 3.9)
    pooled = pool(matrix.astype(np.float32), HEAT_SIDE)
    # the colour scale ends at the 99.5th percentile: a few outlier channels would hide everything else
    limit = float(np.quantile(np.abs(pooled), 0.995)) or 1.0
    image = axis.imshow(pooled, cmap="RdBu_r", vmin=-limit, vmax=limit, extent=(0, matrix.shape[1], matrix.shape[0], 0))
    axis.set_xlabel("output channel")
    axis.set_ylabel("input channel")
    axis.set_title(name)
    figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03, extend="both")
    return _svg(figure, name)


def pool(matrix: NDArray[Any], side: int) -> NDArray[Any]:
    """``matrix`` reduced to at most ``side x side``; each cell keeps the entry of largest magnitude."""
    rows, columns = (np.array_split(np.arange(n), min(side, n)) for n in matrix.shape)
    pooled = np.empty((len(rows), len(columns)), matrix.dtype)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            tile = matrix[r[0] : r[-1] + 1, c[0] : c[-1] + 1]
            pooled[i, j] = tile.flat[np.abs(tile).argmax()]
    return pooled


@_styled
def singular_values(spectra: Mapping[str, NDArray[Any]]) -> str:
    """Singular values of each operator's delta, largest first."""
    figure, (axis,) = _figure("singular values", 2.8)
    tint = colours(list(dict.fromkeys(name.split(" ")[0] for name in spectra)))
    for number, (name, values) in enumerate(spectra.items()):
        style = ("-", "--", ":", "-.")[number % 4]
        axis.plot(np.arange(1, len(values) + 1), values, style, lw=1.4, label=name, color=tint[name.split(" ")[0]])
    axis.set_yscale("log")
    largest = max(float(v[0]) for v in spectra.values())
    axis.set_ylim(bottom=max(largest * 1e-6, min(float(v[-1]) for v in spectra.values()) * 0.8))
    axis.set_xlabel("index")
    axis.set_ylabel("singular value of M")
    axis.legend(frameon=False)
    return _svg(figure, "singular values")


@_styled
def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Horizontal bars: one group per variant, one bar per quantity.

    Args:
        groups: quantity -> variant -> value.
    """
    variants = list(next(iter(groups.values())))
    figure, (axis,) = _figure(title, 0.9 + 0.26 * len(variants) * len(groups))
    tint, height = colours(variants), 0.8 / len(groups)
    for number, (quantity, values) in enumerate(groups.items()):
        for row, variant in enumerate(variants):
            if variant not in values:
                continue
            y = row - 0.4 + (number + 0.5) * height
            axis.barh(y, values[variant], height * 0.86, color=tint[variant], alpha=(0.95, 0.5, 0.3)[number % 3])
            axis.annotate(
                f"{_rounded(values[variant])} {unit} {quantity}",
                (0, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color="white" if number == 0 else "black",
                fontsize=7.5,
            )
    axis.set_yticks(range(len(variants)), variants)
    axis.set_ylim(len(variants) - 0.5, -0.5)
    axis.set_xlabel(unit)
    axis.set_title(title)
    return _svg(figure, title)


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@_styled
def curves(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One line per variant through (x, y) points, for sweeps over depth."""
    figure, (axis,) = _figure(title, 2.9)
    tint = colours(list(lines))
    for variant, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, lw=1.4, color=tint[variant], label=variant)
    if all(float(x).is_integer() for points in lines.values() for x, _ in points):
        axis.xaxis.get_major_locator().set_params(integer=True)
    values = [y for points in lines.values() for _, y in points]
    if min(values) > 0 and max(values) > 4 * min(values):
        _log_scale(axis)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_title(title)
    axis.legend(frameon=False)
    return _svg(figure, title)


def _figure(name: str, height: float) -> tuple[Any, tuple[Any, ...]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", label=name)
    axis = figure.add_subplot()
    axis.grid(axis="x", color="#ddd", lw=0.6)
    axis.set_axisbelow(True)
    return figure, (axis,)


def _log_scale(axis: Any) -> None:
    """A logarithmic y axis with plain numbers: 20, 30, 60 and not 2 x 10^1."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")


def _svg(figure: Any, name: str) -> str:
    """The figure as an ``<svg>`` element without XML header; equal data give equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
