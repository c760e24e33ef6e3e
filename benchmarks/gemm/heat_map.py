"""The sweep as a heat map: rows of a group x (N, K), coloured by the speed over DeepGEMM."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

Row = dict[str, Any]
Point = tuple[int, int]
"""N and K."""
SLOWEST, FASTEST = 0.8, 1.4  # the ends of the colours; speeds beyond have the end's colour
NUMBERED = 12


def worst(rows: Sequence[Row], count: int = NUMBERED) -> list[Row]:
    """The slowest points beside DeepGEMM, the slowest first."""
    return sorted(rows, key=lambda row: row["speed"])[:count]


def draw(rows: Sequence[Row], title: str, ours: str, theirs: str) -> Any:
    """A figure with a panel for each number of groups and layout; the worst points carry their place.

    ours, theirs  colours of the points where we, or DeepGEMM, are faster
    """
    groups, layouts = (sorted({row[name] for row in rows}) for name in ("groups", "layout"))
    points = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    heights = {of: sorted({row["rows"] for row in rows if row["layout"] == of}) for of in layouts}
    figure, panels = plt.subplots(
        len(groups), len(layouts), figsize=(11, 0.8 + len(groups) * (0.7 + 0.2 * len(points))),
        squeeze=False, sharey=True, layout="constrained",
        width_ratios=[len(heights[of]) for of in layouts],
    )  # fmt: skip
    colours = LinearSegmentedColormap.from_list("speed", [theirs, "#ffffff", ours])
    norm = TwoSlopeNorm(1, SLOWEST, FASTEST)
    places = {_key(row): place for place, row in enumerate(worst(rows), 1)}
    for line, count in enumerate(groups):
        for column, layout in enumerate(layouts):
            of_panel = [row for row in rows if (row["groups"], row["layout"]) == (count, layout)]
            cells = _panel(panels[line][column], of_panel, heights[layout], points, (colours, norm))
            _number(panels[line][column], of_panel, heights[layout], points, places)
            panels[line][column].set_title(f"{layout}, {count} group{'s' * (count > 1)}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("rows of a group", fontsize=8)
    bar = figure.colorbar(cells, ax=panels, extend="both", shrink=0.5, ticks=(0.8, 0.9, 1, 1.2, 1.4))
    bar.ax.tick_params(labelsize=8)
    bar.ax.set_title("speed", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _panel(
    axes: Any,
    rows: Sequence[Row],
    heights: Sequence[int],
    points: Sequence[Point],
    colouring: tuple[Any, Any],
) -> Any:
    speeds = {(row["rows"], (row["n"], row["k"])): row["speed"] for row in rows}
    grid = [[speeds.get((height, point), math.nan) for height in heights] for point in points]
    axes.set_xticks([place + 0.5 for place in range(len(heights))], [str(height) for height in heights])
    axes.set_yticks([place + 0.5 for place in range(len(points))], [f"{n}x{k}" for n, k in points])
    axes.tick_params(labelsize=7, length=0)
    axes.tick_params(axis="x", rotation=60)
    colours, norm = colouring
    cells = axes.pcolormesh(grid, cmap=colours, norm=norm, edgecolors="#dddddd", linewidth=0.4)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return cells


def _number(
    axes: Any,
    rows: Sequence[Row],
    heights: Sequence[int],
    points: Sequence[Point],
    places: dict[tuple[Any, ...], int],
) -> None:
    for row in rows:
        if _key(row) in places:
            x, y = heights.index(row["rows"]), points.index((row["n"], row["k"]))
            axes.annotate(str(places[_key(row)]), (x + 0.5, y + 0.5), fontsize=7, ha="center", va="center")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("layout", "groups", "rows", "n", "k"))
