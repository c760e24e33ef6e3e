"""Callers through channels, in a process of their own: closed loops, each with a thread, a channel a layer.

Latency is from the request to its answer; the tensors are written before, and read after. With a device, they
lie in that GPU's memory. Callers look for the answer all the time, as those do that cannot wait for it. See
`benchmarks.lib.callers` for when requests count.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.lib.callers import window
from expertd_client import ExpertClient

SPIN_SECONDS = 0.02  # longer than a step: a caller that sleeps is woken 0.05 to 0.2 ms late


def open_channels(given: dict[str, Any], stack: ExitStack) -> list[Any]:
    """The channels of one caller, whose tokens are written."""
    client = stack.enter_context(ExpertClient(given["url"]))
    channels = []
    for model in given["models"]:
        channel = client.open_channel(
            model,
            num_slots=1,
            max_tokens=given["tokens"],
            datatype="BF16",
            device=given["device"],
            spin_seconds=SPIN_SECONDS,
        )
        channels.append(stack.enter_context(channel))
        fill(channel.slots[0].hidden_states, given["device"])
    return channels


def loop(
    channels: Sequence[Any],
    tokens: int,
    begin: float,
    end: float,
    latencies: list[float],
    errors: list[BaseException],
) -> None:
    """Requests through each channel in turn; those from `begin` on count."""
    try:
        for channel in itertools.cycle(channels):
            if (sent := time.perf_counter()) >= end:
                break
            channel.wait(channel.submit(channel.slots[0], tokens, synchronize=False))
            if sent >= begin:
                latencies.append(time.perf_counter() - sent)
    except BaseException as error:
        errors.append(error)


def fill(rows: Any, device: str | None) -> None:
    """Write the tokens that all callers send to rows [tokens, H]."""
    tokens = np.random.default_rng(len(rows)).standard_normal(rows.shape, dtype=np.float32)
    bits = (tokens.view(np.uint32) >> 16).astype(np.uint16)
    if device is None:
        rows.view(np.uint16)[:] = bits
        return
    import torch

    rows.view(torch.uint16).copy_(torch.from_numpy(bits))
    torch.cuda.synchronize(device)


def main() -> None:
    """Reads {url, models, tokens, device, callers, seconds} from stdin; prints latencies as JSON."""
    given = json.loads(sys.stdin.readline())
    latencies: list[float] = []
    errors: list[BaseException] = []
    with ExitStack() as stack:
        opened = [open_channels(given, stack) for _ in range(given["callers"])]
        begin, end = window(given["seconds"])
        shared = given["tokens"], begin, end, latencies, errors
        threads = [threading.Thread(target=loop, args=(channels, *shared)) for channels in opened]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    print(json.dumps(latencies))


if __name__ == "__main__":
    main()
