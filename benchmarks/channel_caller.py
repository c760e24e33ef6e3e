"""Callers through channels, in a process of their own: closed loops, each with a thread, a channel a layer.

Latency is from the request to its answer; the tensors are written before, and read after. With a device, they
lie in that GPU's memory. Callers look for the answer all the time, as those do that cannot wait for it.
"""

import itertools
import json
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from expertd_client import ExpertClient

SPIN_SECONDS = 0.02  # longer than a step: a caller that sleeps is woken 0.05 to 0.2 ms late


def loop(given: dict[str, Any], latencies: list[float], errors: list[BaseException]) -> None:
    """Requests for `seconds`, the first tenth of them dropped."""
    try:
        with ExpertClient(given["url"]) as client, ExitStack() as stack:
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
            time.sleep(max(0.0, given.get("start", 0.0) - time.time()))
            begin = time.perf_counter() + given["seconds"] / 10
            for channel in itertools.cycle(channels):
                if (sent := time.perf_counter()) >= begin + given["seconds"]:
                    break
                channel.wait(channel.submit(channel.slots[0], given["tokens"], synchronize=False))
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
    """Reads {url, models, tokens, device, callers, seconds, start} from stdin; prints latencies as JSON."""
    given = json.load(sys.stdin)
    latencies: list[float] = []
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=loop, args=(given, latencies, errors)) for _ in range(given["callers"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    print(json.dumps(latencies))


if __name__ == "__main__":
    main()
