"""A caller whose timeouts pass at about the time of its answers, in a process of its own.

Prints what came of its requests, as JSON. Arguments: the server's URL, the model, "host" or "gpu" (where its
data region is), the number of requests. Outputs must have the bits of the same requests without a timeout.
"""

import base64
import json
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

import httpx
import torch

from tests.service.channels.caller_gpu import allocated
from tests.service.channels.peer import Peer

SLOTS = 2


class Caller:
    """One channel, whose region is the tensor `data`, uint8 [n]."""

    def __init__(self, url: str, model: str, tokens: int, on_gpu: bool) -> None:
        body: dict[str, Any] = {
            "version": 3,
            "model": model,
            "num_slots": SLOTS,
            "max_tokens": tokens,
            "datatype": "BF16",
        }
        if on_gpu:
            probe = httpx.post(f"{url}/v1/channels", json=body, timeout=60).json()
            self.data, handle = allocated(probe["geometry"]["data_bytes"])
            b64 = base64.b64encode(handle).decode()
            cuda = {"device_id": 0, "raw_handle": {"b64": b64}, "byte_size": len(self.data)}
            body["memory"] = {"cuda": cuda}
        opened = httpx.post(f"{url}/v1/channels", json=body, timeout=60)
        assert opened.status_code == 201, opened.text
        self.peer = Peer(opened.json())
        if self.peer.data is not None:
            self.data = torch.frombuffer(self.peer.data, dtype=torch.uint8)

    def send(self, values: torch.Tensor, timeout: float) -> int:
        """Send a request in the next slot, which is free."""
        places = self.peer.places(self.peer.sequence + 1)
        rows = values.view(torch.uint8).view(-1)
        self.data[places[0] : places[0] + len(rows)] = rows
        if self.data.is_cuda:
            torch.cuda.synchronize()
        return self.peer.send(len(values), places, "BF16", "BF16", timeout=timeout)

    def output(self, sequence: int, values: torch.Tensor) -> torch.Tensor:
        """The output of a request with these hidden states, as bytes: a view of the region."""
        start = self.peer.places(sequence)[3]
        return self.data[start : start + values.numel() * 2]


def main() -> None:
    url, model, where, count = sys.argv[1:]
    if where == "gpu":
        torch.cuda.set_device(0)
    random = torch.Generator().manual_seed(0)
    tokens, place = 8192, "cuda" if where == "gpu" else "cpu"
    caller = Caller(url, model, tokens, where == "gpu")
    peer = caller.peer
    sizes = (tokens, 5000, 4500)  # no two fit in a step
    inputs = [
        torch.randn(size, peer.hidden_size, generator=random).to(place, torch.bfloat16) for size in sizes
    ]
    expected, seconds = [], []
    for values in inputs:
        took = []
        for _ in range(10):
            began = time.perf_counter()
            sequence = caller.send(values, 0.0)
            assert peer.wait(sequence).status == 200
            took.append(time.perf_counter() - began)
        expected.append(caller.output(sequence, values).clone())
        seconds.append(median(took))
    outcomes: Counter[str] = Counter()
    in_flight: dict[int, int] = {}  # slot -> the number of its input

    def settle(slot: int) -> None:
        if (number := in_flight.pop(slot, None)) is None:
            return
        sequence = peer.sequence - (peer.sequence - 1 - slot) % SLOTS
        in_time = peer.is_in_time(sequence)
        answer = peer.wait(sequence)
        outcome = str(answer.status) if in_time else "late"
        outcomes[outcome] += 1
        seconds[number] *= {"200": 0.8, "503": 1.25}.get(outcome, 1.0)  # towards the time of the step's end
        assert answer.status == 200 or (answer.status == 503 and "timeout" in answer.error), answer
        if answer.status == 200:
            assert torch.equal(caller.output(sequence, inputs[number]), expected[number]), sequence

    for _ in range(int(count)):
        slot = peer.sequence % SLOTS
        settle(slot)
        in_flight[slot] = number = int(torch.randint(len(inputs), (1,), generator=random))
        share = 0.7 + 0.6 * float(torch.rand(1, generator=random))
        caller.send(inputs[number], seconds[number] * share)
    for slot in range(SLOTS):
        settle(slot)
    print(json.dumps(outcomes))
    peer.close()


if __name__ == "__main__":
    main()
