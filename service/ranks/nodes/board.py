"""What nodes say in the front end's store, and the front end's view of the others: their agents."""

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from expertd.service.ranks.front.starting import RankLoadError
from expertd.service.ranks.rendezvous import Rendezvous
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
_ANSWER_SECONDS = 5.0  # of the store
LOST_SECONDS = 3.0  # without a beat: far more than a busy machine delays one
_ARRIVE_SECONDS = 1.0  # in which agents that are there have shown it: the log says which ones are not
_REPORT_SECONDS = 1.0  # after an agent's report: ranks that can say more themselves have done so
_SHARED = {"backend", "nnodes", "partitions", "models", "placement", "exact_combine", "overlap"}


def place_of(beat: str) -> str:
    """The place of the agent that has sent a beat."""
    return beat.partition(":")[0]


class Board:
    """A client of the store, for one thread at a time. Raises RuntimeError if that is out of reach."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store = rendezvous.store("nodes", _ANSWER_SECONDS)

    # The front end's.

    def describe(self, shared: dict[str, Any]) -> None:
        """Say what all nodes must agree on."""
        self._store.set("shared", json.dumps(shared))

    def begin(self, generation: int) -> None:
        """Have the agents start their ranks of a new group."""
        self._store.set("group", str(generation))

    def beats(self, num_nodes: int) -> dict[int, str]:
        """The last beat of each agent that has arrived."""
        return {node: beat for node in range(1, num_nodes) if (beat := self._get(f"beat/{node}")) is not None}

    def refusals(self, num_nodes: int) -> list[str]:
        """What the last agent of each node found wrong with its settings."""
        found = []
        for node in range(1, num_nodes):
            if (text := self._get(f"refused/{node}")) is not None:
                place, why = json.loads(text)
                if place == self.agents(node):
                    found.append(why)
        return found

    def report_of(self, generation: int, node: int) -> str | None:
        """Why a node's part of a group has ended; None: it has not."""
        return self._get(f"ended/{generation}/{node}")

    def await_report(self, generation: int, node: int, seconds: float) -> str | None:
        """Why a node's part of a group has ended, if its agent says so within `seconds`."""
        until = time.monotonic() + seconds
        while (text := self.report_of(generation, node)) is None and time.monotonic() < until:
            time.sleep(0.01)
        return text

    # An agent's.

    def shared(self) -> dict[str, Any] | None:
        """What all nodes must agree on; None: the front end has not said it yet."""
        text = self._get("shared")
        shared: dict[str, Any] | None = None if text is None else json.loads(text)
        return shared

    def generation(self) -> int:
        """The number of the present group; 0: there was none."""
        return int(self._get("group") or 0)

    def arrive(self, node: int) -> int:
        """Take a node's place; the number of agents that have done so."""
        return int(self._store.add(f"agents/{node}", 1))

    def agents(self, node: int) -> int:
        """The number of agents that have taken a node's place; the last one has it."""
        return int(self._store.add(f"agents/{node}", 0))

    def beat(self, node: int, place: int, count: int) -> None:
        """Show that the agent with this place, from `arrive`, is there; each `count` once."""
        self._store.set(f"beat/{node}", f"{place}:{count}")

    def refuse(self, node: int, place: int, text: str) -> None:
        """Say why the agent with this place, from `arrive`, cannot take part."""
        self._store.set(f"refused/{node}", json.dumps([place, text]))

    def report(self, generation: int, node: int, text: str) -> None:
        """Say why the node's part of a group has ended."""
        self._store.set(f"ended/{generation}/{node}", text)

    def _get(self, key: str) -> str | None:
        """A value, without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None


def shared_settings(settings: Settings) -> dict[str, Any]:
    """What all nodes must agree on: each reads its own settings. Paths and numbers of GPUs may differ."""
    shared = settings.model_dump(mode="json", include=_SHARED)
    for number, model in enumerate(settings.models):
        shared["models"][number] = model.model_dump(
            mode="json", exclude={"source": True, "weights": {"path"}}
        )
    shared["ranks"] = settings.ranks_per_node
    shared["on GPUs"] = settings.devices is not None
    shared["max_batch_tokens"] = settings.limits.max_batch_tokens
    shared["torch"] = torch.__version__
    return shared


class Nodes:
    """The agents of nodes 1 to nnodes - 1. For one thread at a time. Raises RuntimeError without a store."""

    def __init__(self, settings: Settings, rendezvous: Rendezvous) -> None:
        self._num_nodes = settings.nnodes
        self._timeout = settings.rendezvous_timeout_seconds
        self._board = Board(rendezvous)
        self._board.describe(shared_settings(settings))
        self._beats: dict[int, str] = {}
        self._seen: dict[int, float] = {}  # when each agent's beat was new
        self._generation = 0
        self._reported: float | None = None  # when a report about the present group was there

    def wait_present(self, stop: Callable[[], bool], is_first: bool) -> None:
        """Return once all agents are there, or `stop` is true.

        Raises RankLoadError for one with other settings, and for one that does not come in time, if
        `is_first`: later they are waited for as long as it takes.
        """
        self._look()
        began, told = time.monotonic(), False
        while not stop():
            if refusals := self._board.refusals(self._num_nodes):
                raise RankLoadError(refusals[0], True)
            self._look()
            # Only new beats count.
            missing = [node for node in range(1, self._num_nodes) if self._seen.get(node, 0.0) <= began]
            if not missing:
                return
            if not told and time.monotonic() > began + _ARRIVE_SECONDS:
                limit = f" {self._timeout:g} s" if is_first else ""
                logger.info("waiting%s for %s", limit, ", ".join(f"node {node}" for node in missing))
                told = True
            if is_first and time.monotonic() > began + self._timeout:
                expected = f"an agent within {self._timeout:g} s"
                raise RankLoadError(f"node {missing[0]}: expected {expected}, got none", True)
            time.sleep(BEAT_SECONDS / 5)

    def begin(self, generation: int) -> None:
        """Have the agents start their ranks of a new group."""
        self._generation, self._reported = generation, None
        self._board.begin(generation)

    def why_lost(self) -> str | None:
        """Which node has been silent for too long, or why its ranks have ended; None: neither."""
        self._look()
        now = time.monotonic()
        for node, seen in self._seen.items():
            if now - seen > LOST_SECONDS:
                return f"node {node}: expected a sign of its agent within {LOST_SECONDS:g} s, got none"
            if (report := self._board.report_of(self._generation, node)) is not None:
                self._reported = self._reported or now
                if now - self._reported > _REPORT_SECONDS:
                    return report
        return None

    def _look(self) -> None:
        now = time.monotonic()
        for node, beat in self._board.beats(self._num_nodes).items():
            if (before := self._beats.get(node)) == beat:
                continue
            ago = now - self._seen.get(node, -math.inf)
            if before is not None and place_of(before) != place_of(beat) and ago < LOST_SECONDS:
                logger.warning(
                    "node %d: another agent has taken the place of one that was there %.1f s ago", node, ago
                )
            self._beats[node], self._seen[node] = beat, now
