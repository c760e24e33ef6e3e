"""Counts of calls by the name of their key, in memory that several processes of a server can share.

Names come from a file that changes, so each process writes them beside its counts. They are never removed.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from expertd.service.engine.metric_family import Family

# Names over the life of a server; further ones are counted without a name.
_MAX_NAMES = 1024
_NAME_BYTES = 64
_RESULTS = ("admitted", "forbidden")
_COUNTS = _MAX_NAMES * len(_RESULTS)
REQUESTS = Family(
    "counter",
    "key_requests",
    "calls of all kinds but health, by the name of their API key; result: admitted, forbidden (the key "
    'lacks the right), or with key "" unauthorized (no key, or an unknown one)',
    "requests",
    ("key", "result"),
)
FAMILIES = (REQUESTS,)
NUM_CELLS = _COUNTS + _MAX_NAMES * _NAME_BYTES // 8  # float64: the counts, then the names


class KeyCounts:
    """Adds to `cells` (float64; None: to new ones). For one thread of one process.

    The first name is "": of calls without a known key, whose second count is of those refused for that.
    """

    def __init__(self, cells: "memoryview[float] | None" = None) -> None:
        self.cells = memoryview(bytearray(NUM_CELLS * 8)).cast("d") if cells is None else cells
        self._names = _names(self.cells)
        self._places = {name: place for place, name in enumerate(_written(self._names))}

    def add(self, name: str) -> None:
        """Begin the counts of a name, at 0."""
        self._place(name)

    def admitted(self, name: str) -> None:
        """Count a call whose key has the right for it."""
        self.cells[2 * self._place(name)] += 1

    def forbidden(self, name: str) -> None:
        """Count a call whose key lacks the right for it."""
        self.cells[2 * self._place(name) + 1] += 1

    def unauthorized(self) -> None:
        """Count a call without a key, or with an unknown one."""
        self.cells[1] += 1

    def _place(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            place = len(self._places)
            if place == _MAX_NAMES:
                return 0
            data = name.encode("ascii").ljust(_NAME_BYTES, b"\0")
            self._names[place * _NAME_BYTES : (place + 1) * _NAME_BYTES] = data
            self._places[name] = place
        return place


def key_metrics(cells: Iterable["memoryview[float]"]) -> Iterator[Metric]:
    """The metric of keys, summed over the cells of all processes."""
    totals: dict[tuple[str, str], float] = {("", "unauthorized"): 0.0}
    for each in cells:
        for place, name in enumerate(_written(_names(each))):
            for number, result in enumerate(_RESULTS):
                value = each[2 * place + number]
                if name or value:
                    shown = "unauthorized" if not name and number else result
                    totals[name, shown] = totals.get((name, shown), 0.0) + value
    family = REQUESTS.counter()
    for labels, value in totals.items():
        family.add_metric(list(labels), value)
    yield family


def _names(cells: "memoryview[float]") -> memoryview:
    return cells[_COUNTS:NUM_CELLS].cast("B")


def _written(names: memoryview) -> Iterator[str]:
    """The names that were written, in order; the first one is ""."""
    yield ""
    for start in range(_NAME_BYTES, len(names), _NAME_BYTES):
        name = bytes(names[start : start + _NAME_BYTES]).rstrip(b"\0")
        if not name:
            return
        yield name.decode("ascii")
