"""A caller through a channel, in a process of its own: decode steps with pauses, or prefill without end.

It reads a line of JSON from stdin {url, model, tokens, slots, device, pause, spin}, opens a channel, and
answers with a line once it has had some results. Then it reads {start, seconds} and sends requests until
`seconds` after `start`, each as soon as its slot is free. It prints the stamps [sent, answered] of each
request that was sent and answered from `start` on, in nanoseconds, and the number of those answered in that
time. Then it reads the next line. Times are those of the machine's monotonic clock, which all processes
share.
"""

import json
import sys
import time
from collections import deque
from typing import Any

from benchmarks.serving.channel_caller import fill
from expertd_client import ExpertClient

WARM_REQUESTS = 24  # among them those that a server captures as CUDA graphs


def results(channel: Any, given: dict[str, Any], start: float, end: float) -> dict[str, Any]:
    """What happened between these times of `time.perf_counter`."""
    answered, now_ns = 0, time.perf_counter_ns
    waiting: deque[tuple[int, Any, Any]] = deque()
    stamps: list[tuple[int, int]] = []
    for slot in channel.slots:
        waiting.append((now_ns(), slot, channel.submit(slot, given["tokens"], synchronize=False)))
    while waiting:
        sent, slot, ticket = waiting.popleft()
        channel.wait(ticket)
        now = now_ns()
        answered += start <= now / 1e9 <= end
        if start <= sent / 1e9 and now / 1e9 <= end:
            stamps.append((sent, now))
        if now / 1e9 < end:
            pause(given["pause"])
            waiting.append((now_ns(), slot, channel.submit(slot, given["tokens"], synchronize=False)))
    return {"stamps": stamps, "answered": answered}


def window() -> tuple[float, float]:
    """Of stdin: from and until when requests are counted."""
    given = json.loads(sys.stdin.readline())
    return given["start"], given["start"] + given["seconds"]


def pause(seconds: float) -> None:
    """As long as a caller takes between two steps; without sleeping, which takes longer than this."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def main() -> None:
    """Measure until stdin ends."""
    for line in sys.stdin:
        given = json.loads(line)
        with (
            ExpertClient(given["url"]) as client,
            client.open_channel(
                given["model"],
                num_slots=given["slots"],
                max_tokens=given["tokens"],
                datatype="BF16",
                device=given["device"],
                spin_seconds=given["spin"],
            ) as channel,
        ):
            for slot in channel.slots:
                fill(slot.hidden_states, given["device"])
            for _ in range(WARM_REQUESTS // given["slots"]):
                for slot in channel.slots:
                    channel.wait(channel.submit(slot, given["tokens"]))
            print(json.dumps("ready"), flush=True)
            print(json.dumps(results(channel, given, *window())), flush=True)


if __name__ == "__main__":
    main()
