"""A runner whose steps a test can hold, count and break; its arithmetic is the identity, row by row."""

import threading
from collections.abc import Sequence

import numpy as np

from expertd.layout import Layout
from expertd.service.moe.request import LayerRequest, StepResult


class EchoRunner:
    """Answers each request with its own bytes; holds every step while `gate` is closed.

    `steps` lists the tokens of each request of every step begun. A request holding `poison` as its first
    float makes its step raise.
    """

    def __init__(self, poison: float | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.steps: list[list[int]] = []
        self.poison = poison

    def validate(self, request: LayerRequest) -> None:
        if request.topk_ids is not None and np.frombuffer(request.topk_ids, np.int32).max() > 3:
            raise ValueError("topk_ids is expected to lie in 0..3")

    def run(self, requests: Sequence[LayerRequest]) -> StepResult:
        self.steps.append([request.num_tokens for request in requests])
        self.entered.release()
        self.gate.wait()
        for request in requests:
            if np.frombuffer(request.hidden_states, np.float32)[0] == self.poison:
                raise RuntimeError("a poisoned request")
        tokens = sum(request.num_tokens for request in requests)
        return StepResult(
            outputs=[memoryview(request.hidden_states) for request in requests],
            layout=Layout.MASKED,
            num_tokens=tokens,
            tokens_per_expert=[tokens, 0, 0, tokens],
            compute_seconds=0.001,
        )


def layer_request(values: Sequence[float]) -> LayerRequest:
    """One token per value, one FP32 column."""
    return LayerRequest(
        num_tokens=len(values),
        hidden_states=np.asarray(values, dtype=np.float32).tobytes(),
        datatype="FP32",
        topk_ids=None,
        topk_ids_datatype="INT32",
        topk_weights=None,
        output_datatype="FP32",
    )
