"""Counts by the name of a key, in memory that processes share."""

from expertd.service.engine.metrics import requests
from expertd.service.engine.metrics.requests import NUM_KEY_CELLS, KeyCounts, key_metrics


def series(*cells: "memoryview[float]") -> dict[tuple[str, str], float]:
    (family,) = key_metrics(cells)
    return {(one.labels["key"], one.labels["result"]): one.value for one in family.samples}


def test_the_counts_of_all_processes_are_summed_by_name() -> None:
    one, two = KeyCounts(), KeyCounts()
    for name in ("a", "b"):
        one.add(name)
    one.admitted("a")
    two.admitted("c" * 64)
    two.admitted("a")
    two.forbidden("b")
    two.unauthorized()
    assert series(one.cells, two.cells) == {
        ("", "unauthorized"): 1,
        ("a", "admitted"): 2,
        ("a", "forbidden"): 0,
        ("b", "admitted"): 0,
        ("b", "forbidden"): 1,
        ("c" * 64, "admitted"): 1,
        ("c" * 64, "forbidden"): 0,
    }


def test_a_process_that_ends_leaves_its_counts_to_its_successor() -> None:
    cells = memoryview(bytearray(8 * NUM_KEY_CELLS)).cast("d")
    first = KeyCounts(cells)
    first.admitted("a")
    first.admitted("b")
    successor = KeyCounts(cells)
    successor.admitted("b")
    successor.admitted("c")
    counts = {name: value for (name, result), value in series(cells).items() if result == "admitted"}
    assert counts == {"a": 1, "b": 2, "c": 1}


def test_names_beyond_the_bound_are_counted_without_one() -> None:
    counts = KeyCounts()
    most = requests._MAX_NAMES - 1
    for number in range(most + 5):
        counts.admitted(str(number))
    found = series(counts.cells)
    assert found["", "admitted"] == 5
    assert len([name for name, result in found if name and result == "admitted"]) == most
    assert found[str(most - 1), "admitted"] == 1
