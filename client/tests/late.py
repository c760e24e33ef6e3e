"""Requests over an open channel whose timeouts pass at about the time of their answers."""

import time
from collections import Counter
from statistics import median
from typing import Any

import numpy as np
import torch

from expertd_client import DeadlineError, ServerBusyError
from tests.expertd import HIDDEN, MODEL

_TOKENS = (1, 16, 250)  # of requests; the channel must take as many
_IDLE_SECONDS = 0.11  # then the server computes a request whether or not it will likely be in time


def check_late_requests(caller: Any, channel: Any, count: int) -> Counter[str]:
    """Send requests in slots of tensors, one after the other; every output must be right."""
    random = np.random.default_rng(count)
    inputs = [torch.randn(tokens, HIDDEN, dtype=torch.float32) for tokens in _TOKENS]
    expected = [caller.infer(MODEL, each) for each in inputs]
    seconds = [median(_seconds(channel, each) for _ in range(20)) for each in inputs]
    outcomes: Counter[str] = Counter()
    for turn in range(count):
        slot, number = channel.slots[turn % 2], int(random.integers(len(inputs)))
        slot.hidden_states[: len(inputs[number])] = inputs[number]
        timeout = seconds[number] * random.uniform(0.7, 1.4)
        time.sleep(_IDLE_SECONDS)
        try:
            output = channel.infer(slot, len(inputs[number]), timeout=timeout)
        except (DeadlineError, ServerBusyError) as error:
            outcomes[type(error).__name__] += 1
            seconds[number] *= 1.25  # so that about as many are in time as are not, however long that takes
            continue
        outcomes["right"] += 1
        seconds[number] *= 0.8
        torch.testing.assert_close(output.cpu(), expected[number], rtol=0.02, atol=1e-3)
    assert outcomes.total() == count
    return outcomes


def _seconds(channel: Any, values: torch.Tensor) -> float:
    channel.slots[0].hidden_states[: len(values)] = values
    began = time.perf_counter()
    channel.infer(channel.slots[0], len(values))
    return time.perf_counter() - began
