"""Decode beside prefill without a server: `python -m benchmarks lanes_floor [--layers NAME ...]`.

One loop launches what a server's worker thread would for `benchmarks lanes`: decode steps, with the same
pause after each, and a prefill step as soon as fewer than two are on the device, but not shortly before the
next decode step. Graphs, partitions and memory are those of a server. What a server takes beyond that is its
channels, queues, answers and metrics. The rows are for the same file and table.
"""

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.run import Result, earlier, new_parser
from benchmarks.serving.lanes import (
    ALONE,
    KEYS,
    LAYERS,
    PAUSE_SECONDS,
    SPLITS,
    Row,
    Way,
    row_of,
    settings_of,
    shown,
    steady_after,
)
from expertd.kernels import Backend
from expertd.service.engine.layers import Cancelled, layer_of
from expertd.service.engine.loading import Loaded, load
from expertd.service.memory import Span
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest, Signal
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings

_LEFT_SECONDS = 0.15e-3  # of a pause: no prefill step is launched then


class Steps:
    """Steps of one size, each with the same memory, as a caller's slot has."""

    def __init__(self, runner: Any, hidden_size: int, num_tokens: int) -> None:
        self._runner = runner
        self._on_gpu = torch.cuda.is_available()
        device = "cuda" if self._on_gpu else "cpu"
        self._tensors = [
            torch.randn(num_tokens, hidden_size, device=device).to(torch.bfloat16) for _ in range(2)
        ]
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=self._on_gpu)
        self._seen = self._word.numpy()
        self._signal = Signal(self._word.data_ptr())
        source, target = map(self._span, self._tensors)
        self._request = LayerRequest(
            num_tokens, source, "BF16", None, "INT32", None, "BF16", target, self._signal
        )
        self._running: deque[Any] = deque()
        self.done = 0

    def launch(self) -> None:
        """Begin one more."""
        self._signal.value += 1
        self._running.append(self._runner.begin([self._request]))

    def keep_two(self) -> None:
        """Have two on the device."""
        while self._running and self._running[0].is_done():
            self._running.popleft().finish()
            self.done += 1
        if len(self._running) < 2:
            self.launch()

    def await_word(self) -> None:
        """Wait for the last one as its caller does: for the word that the device writes."""
        while self._on_gpu and self._seen[0] != self._signal.value:
            pass

    def finish(self) -> None:
        """Wait for all."""
        while self._running:
            self._running.popleft().finish()

    def _span(self, tensor: torch.Tensor) -> Span:
        if self._on_gpu:
            return Span(tensor.data_ptr(), tensor.nbytes, 0, owner=tensor)
        view = memoryview(tensor.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        return Span(tensor.data_ptr(), tensor.nbytes, None, view, tensor)


def alone(prefill: Steps, seconds: float) -> float:
    """Prefill steps per second."""
    began, prefill.done = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        prefill.keep_two()
    return prefill.done / (now - began)


def beside(decode: Steps, prefill: Steps, seconds: float) -> tuple[list[float], float]:
    """A decode step's seconds, each in ascending order, and the prefill steps per second."""
    took: list[float] = []
    began, prefill.done = time.perf_counter(), 0
    while (sent := time.perf_counter()) < began + seconds:
        decode.launch()
        prefill.keep_two()
        decode.await_word()
        answered = time.perf_counter()
        decode.finish()
        took.append(answered - sent)
        while (now := time.perf_counter()) < answered + PAUSE_SECONDS:
            if now < answered + PAUSE_SECONDS - _LEFT_SECONDS:
                prefill.keep_two()
    return sorted(took), prefill.done / (sent - began)


def measured(
    name: str, splits: Sequence[int], tokens: Sequence[int], lead: float, seconds: float
) -> Iterator[Row]:
    """The rows of one layer, but for those of prefill alone."""
    layer = LAYERS[name]
    made: list[MoELayer] = []

    def loaded(way: Way) -> Loaded:
        """As a server has it; the layer is made once, because its weights take long."""
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.model_validate(settings_of(layer, way, Path(folder)))
        return load(settings, lambda: False, make_layer=make_layer)

    def make_layer(
        model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled
    ) -> MoELayer:
        if not made:
            made.append(layer_of(model, backend, device, cancelled))
        return made[0]

    def steps(given: Loaded, prefill: bool, num_tokens: int) -> Steps:
        (runner,) = given.runners_of_lanes[prefill].values()
        return Steps(runner, layer.hidden, num_tokens)

    now = loaded(ALONE)
    now.prepare_thread()
    prefill = steps(now, True, layer.prefill)
    alone(prefill, lead)
    rate_alone = alone(prefill, seconds)
    prefill.finish()
    on_gpu = now.partitions is not None
    now = loaded(Way("lanes", lanes=True, split=splits[0] if on_gpu else None))
    for split in splits if on_gpu else (None,):
        where = "lanes on all SMs"
        if split is not None:
            assert now.partitions is not None
            now.partitions.apply({"decode": split, "prefill": now.partitions.total_sms - split})
            now.prepare_steps(lambda: False)
            where = f"{split} SMs for decode"
        for count in tokens:
            decode, prefill = steps(now, False, count), steps(now, True, layer.prefill)
            beside(decode, prefill, lead)
            took, rate = beside(decode, prefill, seconds)
            prefill.finish()
            rates = layer.prefill * rate, layer.prefill * rate_alone
            yield row_of(name, Way(f"no server, {where}"), count, took, *rates)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each layer, and add the rows to those of a file if asked to."""
    parser = new_parser(__doc__)
    default = [name for name in LAYERS if (name != "tiny") == torch.cuda.is_available()]
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=default)
    parser.add_argument("--splits", type=int, nargs="+", default=SPLITS, help="SMs of the decode lane")
    parser.add_argument("--tokens", type=int, nargs="+", help="only decode steps of these")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    parser.add_argument("--lead", type=float, help="seconds before them; 0.3, on a GPU 2")
    given = parser.parse_args(arguments)
    lead = steady_after(torch.cuda.is_available(), given.lead)
    about = json.loads(given.json.read_text())["about"] if given.json else {}
    result = Result(given.json, about, earlier(given.json), KEYS)
    for name in given.layers:
        tokens = given.tokens or LAYERS[name].decode
        for row in measured(name, given.splits, tokens, lead, given.seconds):
            result.put(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        print(shown(result.rows, name), flush=True)
    return 0
