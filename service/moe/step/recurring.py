"""Large steps that recur as CUDA graphs: launching them one by one takes the host 0.3 ms."""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from expertd.service.device import Graph, GraphPool, Stream

logger = logging.getLogger(__name__)

_MOST = 32  # graphs, and steps that have run once
_CAPTURE_AT = 3  # steps on the same memory, of the same number of tokens
_GENERATIONS = itertools.count()  # of all layers: one may be unloaded, and another have its name and requests


class RecurringSteps:
    """Graphs by the memory that a step reads and writes; the least recently used is dropped."""

    def __init__(self) -> None:
        self.generation = next(_GENERATIONS)  # changes when graphs are freed: others must not keep them
        self._seen: OrderedDict[object, int] = OrderedDict()
        self._graphs: OrderedDict[object, Graph] = OrderedDict()

    def run(
        self, key: object, work: Callable[[], object], pool: GraphPool | None, stream: Stream
    ) -> Graph | None:
        """Enqueue `work` on `stream`, the current one; its graph if there is one.

        `key` names everything that its launches depend on. Once it has come often enough, `work` is captured
        while it runs. Graphs of one pool must not run at the same time; None: nothing is captured.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return graph
        work()
        if pool is None:
            return None
        count = self._seen.pop(key, 0) + 1
        if count < _CAPTURE_AT:
            self._seen[key] = count
            _drop_oldest(self._seen)
            return None
        try:
            self._graphs[key] = graph = pool.capture(work, stream)
        except Exception:  # above all a lack of memory: such steps run as before
            logger.warning("capturing a recurring step failed", exc_info=True)
            return None
        if _drop_oldest(self._graphs):
            self.generation = next(_GENERATIONS)
        return graph

    def clear(self) -> None:
        """Free all graphs."""
        self.generation = next(_GENERATIONS)
        self._seen.clear()
        for graph in self._graphs.values():
            graph.reset()  # requests that may recur still refer to it, and it to its memory
        self._graphs.clear()


def _drop_oldest(kept: OrderedDict[object, Any]) -> bool:
    if len(kept) <= _MOST:
        return False
    kept.popitem(last=False)
    return True
