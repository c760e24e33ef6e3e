"""The metrics of what steps use: launches, copies, and memory by owner."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import Metric

from expertd.service.engine.metric_family import Family, gauges
from expertd.service.moe.step_counts import Launches, StepUse

_ONE, _GPU = "with one rank", "on a GPU, with one rank"
STEPS = Family(
    "counter",
    "steps",
    "steps, those at start-up included; launch: graph (a CUDA graph for their number of tokens), recurring "
    "(a CUDA graph of a step with the same memory), eager (launch by launch), host (on a CPU)",
    "steps",
    ("model", "launch"),
    when=_ONE,
)
COPY_SECONDS = Family(
    "counter",
    "host_copy_seconds",
    "time in which the host copied between requests and the memory of steps",
    "seconds",
    when=_ONE,
)
COPY_BYTES = Family("counter", "host_copy_bytes", "bytes of these copies", "bytes", when=_ONE)
WEIGHTS = Family(
    "gauge",
    "weights_bytes",
    "bytes of the model's weights, in FP8; a CPU keeps their matrices in bf16. 0: not loaded",
    "bytes",
    ("model",),
    when=_ONE,
)
MEMORY = Family(
    "gauge",
    "device_memory_bytes",
    "memory in use by owner: weights, staging (rows of steps), workspace (graphs and temporary tensors), "
    "outside (CUDA itself, and other processes)",
    "bytes",
    ("owner",),
    when=_GPU,
)
MEMORY_USED = Family("gauge", "device_memory_used_bytes", "memory in use", "bytes", when=_GPU)
MEMORY_TOTAL = Family("gauge", "device_memory_total_bytes", "total memory", "bytes", when=_GPU)
FAMILIES = (STEPS, COPY_SECONDS, COPY_BYTES, WEIGHTS, MEMORY, MEMORY_USED, MEMORY_TOTAL)


def use_metrics(models: Sequence[str], use: StepUse) -> Iterator[Metric]:
    """The metrics of `use`; a model that is not loaded has 0."""
    steps = STEPS.counter()
    for model in models:
        for launch, number in asdict(use.launches.get(model, Launches())).items():
            steps.add_metric([model, launch], number)
    yield steps
    yield COPY_SECONDS.counter(use.copies.seconds)
    yield COPY_BYTES.counter(use.copies.num_bytes)
    yield from gauges(WEIGHTS, {model: use.weights.get(model, 0) for model in models})
    if use.memory is not None:
        yield from gauges(MEMORY, use.memory)


def memory_metrics(memory: tuple[int, int] | None) -> Iterator[Metric]:
    """Those of (used, total) bytes of the device; nothing without a GPU."""
    if memory is not None:
        yield MEMORY_USED.gauge(memory[0])
        yield MEMORY_TOTAL.gauge(memory[1])
