"""What the nodes tell each other in the store: who is there, which group runs, and why ranks were lost.

The front end writes the description of its settings and the number of the present group; each agent its
beats, and why its part of a group has ended. All values are text or JSON: nothing that is read can run code.
"""

import json
import time
from typing import Any

from expertd.service.ranks.meeting import Meeting

BEAT_SECONDS = 0.25
_ANSWER_SECONDS = 5.0  # of the store


def place_of(beat: str) -> str:
    """The place of the agent that has sent a beat."""
    return beat.partition(":")[0]


class Board:
    """A client of the store, for one thread at a time. Raises RuntimeError if that is out of reach."""

    def __init__(self, meeting: Meeting) -> None:
        self._store = meeting.store("nodes", _ANSWER_SECONDS)

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
