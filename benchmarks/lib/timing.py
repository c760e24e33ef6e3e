"""Measures for benchmarks: kernel time by CUPTI with a cold L2, the machine's ceilings, versions."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

FLUSH_BYTES = 512 << 20
Launch = tuple[str, float, float]
"""A kernel's name, start and end in us."""


def kernel_microseconds(call: Callable[[], object], kernel: str, repeats: int = 20) -> float:
    """Median time in us of the kernel whose name contains `kernel`; L2 is flushed before each call."""
    times = [end - start for name, start, end in profiled(call, repeats) if kernel in name]
    if len(times) != repeats:
        raise RuntimeError(f"expected {repeats} kernels named *{kernel}*, got {len(times)}")
    return statistics.median(times)


def profiled(call: Callable[[], object], repeats: int) -> list[Launch]:
    """The kernels of `repeats` calls, by start; L2 is flushed before a call."""
    for _ in range(2):
        call()
    return _profiled_in_order([call] * repeats)


def best_of_rounds(
    calls: Sequence[tuple[Callable[[], object], str]], repeats: int = 7, turns: int = 2
) -> list[float]:
    """Time in us of each call's kernel, whose name contains the given word: the best turn's median.

    The calls take turns, each with `repeats` launches in a turn, and L2 is flushed before each launch. One
    profile has them all, since to start a profile takes longer than many of these launches.
    """
    for call, _ in calls:
        call()
    order = [call for _ in range(turns) for call, _ in calls for _ in range(repeats)]
    return medians_of_rounds(_profiled_in_order(order), [word for _, word in calls], repeats, turns)


def medians_of_rounds(
    launches: Sequence[Launch], words: Sequence[str], repeats: int, turns: int
) -> list[float]:
    """The least of each call's `turns` medians in us, from launches in the order of `best_of_rounds`.

    words  a word of each call's kernel; launches of other kernels are left out
    Raises RuntimeError if the launches are others than the calls'.
    """
    found = [launch for launch in launches if any(word in launch[0] for word in words)]
    expected = [word for _ in range(turns) for word in words for _ in range(repeats)]
    if len(found) != len(expected):
        raise RuntimeError(f"launches: expected {len(expected)} of {', '.join(set(words))}, got {len(found)}")
    for (name, _, _), word in zip(found, expected, strict=True):
        if word not in name:
            raise RuntimeError(f"launch: expected {word}, got {name}")
    times = [end - start for _, start, end in found]
    medians = [statistics.median(times[i : i + repeats]) for i in range(0, len(times), repeats)]
    return [min(medians[call :: len(words)]) for call in range(len(words))]


def _profiled_in_order(calls: Sequence[Callable[[], object]]) -> list[Launch]:
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            flush.fill_(1)
            call()
        torch.cuda.synchronize()
    kernels = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and "FillFunctor" not in event.name
    ]
    return sorted(kernels, key=lambda kernel: kernel[1])


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GB, bytes read plus bytes written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(255)
    target = torch.empty_like(source)
    return 2 * source.numel() / _event_seconds(lambda: target.copy_(source)) / 1e12


def cublas_fp8_tflops(size: int = 8192) -> float:
    """TFLOPS of cuBLAS e4m3, size cubed, accurate accumulation, random data."""
    a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    call = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * size**3 / _event_seconds(call) / 1e12


def header() -> dict[str, object]:
    """The machine and the versions, printed above every table."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    from cuda.bindings import nvrtc

    return {
        "gpu": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "torch": torch.__version__,
        "nvrtc": ".".join(str(x) for x in nvrtc.nvrtcVersion()[1:]),
    }


def cpu_name() -> str:
    """Linux's name for the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def expect_gpu(benchmark: str) -> None:
    """Exit with a message if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{benchmark}: expected a Hopper GPU, got no CUDA device")


def _event_seconds(call: Callable[[], object], repeats: int = 10) -> float:
    call()
    seconds: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(seconds)
