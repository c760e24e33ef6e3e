"""Which shapes of the grouped GEMM benchmark got slower than in a committed result."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[str, tuple[int, ...]]
# Between five committed runs on several cards, DeepGEMM's kernels, which did not change, were more than 5%
# slower in 1.3% of the comparisons, and in 0.3% if the better of two measurements counted.
NOISE = 0.05
AGAIN = 2  # further measurements of a shape that looks slower


def committed(file: Path) -> dict[Key, Row]:
    """The rows of a result, by shape. Raises ValueError for another file."""
    try:
        return {_key(row): row for row in json.loads(file.read_text())["rows"]}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected a result of benchmarks grouped_gemm, got {error!r}") from None


def is_slower(row: Row, before: Row) -> bool:
    """Whether the shape takes longer than before by more than NOISE.

    If both have DeepGEMM, its speed over DeepGEMM has to be lower by as much: a slower card slows both.
    """
    longer: bool = row["us"] > before["us"] * (1 + NOISE)
    if "speed" in row and "speed" in before:
        return longer and row["speed"] * (1 + NOISE) < before["speed"]
    return longer


def better_of(row: Row, again: Row) -> Row:
    """The row with the better time of two measurements, ours and DeepGEMM's each."""
    best = row | {"us": min(row["us"], again["us"])}
    if "deep_gemm_us" in row:
        best["deep_gemm_us"] = min(row["deep_gemm_us"], again["deep_gemm_us"])
        best["speed"] = best["deep_gemm_us"] / best["us"]
    return best


def slower_rows(
    rows: Sequence[Row], before: Mapping[Key, Row], again: Callable[[int], Row]
) -> list[tuple[Row, Row]]:
    """(row, the row before) of the shapes that are slower in every measurement.

    again  measures the shape of a row once more, given the row's index
    """
    found = []
    for index, row in enumerate(rows):
        old = before.get(_key(row))
        for _ in range(AGAIN):
            if old is None or not is_slower(row, old):
                break
            row = better_of(row, again(index))
        if old is not None and is_slower(row, old):
            found.append((row, old))
    return found


def describe(found: Sequence[tuple[Row, Row]], compared: int, missing: int, file: Path) -> str:
    """The comparison as text."""
    rest = f"; {missing} shapes are not in it" if missing else ""
    about = f"{compared} shapes compared with {file}{rest}. Slower by more than {100 * NOISE:.0f}%:"
    return "\n".join([about, *(f"  {_line(*pair)}" for pair in found)] if found else [f"{about} none"])


def count_compared(rows: Sequence[Row], before: Mapping[Key, Row]) -> int:
    """The number of rows whose shape is in `before`."""
    return sum(_key(row) in before for row in rows)


def _line(row: Row, before: Row) -> str:
    line = f"{row['shape']:<28} {before['us']:.1f} -> {row['us']:.1f} us, x{row['us'] / before['us']:.3f}"
    if "speed" in row and "speed" in before:
        line += f"; speed over DeepGEMM {before['speed']:.3f} -> {row['speed']:.3f}"
    return line


def _key(row: Row) -> Key:
    return row["shape"], tuple(row["rows"])
