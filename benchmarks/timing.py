"""Measures for benchmarks: kernel time by CUPTI with a cold L2, the machine's ceilings, versions."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

FLUSH_BYTES = 512 << 20


def kernel_microseconds(call: Callable[[], object], kernel: str, repeats: int = 20) -> float:
    """Median time in us of the kernel whose name contains `kernel`; L2 is flushed before each call."""
    times = [end - start for name, start, end in profiled(call, repeats) if kernel in name]
    if len(times) != repeats:
        raise RuntimeError(f"expected {repeats} kernels named *{kernel}*, got {len(times)}")
    return statistics.median(times)


def profiled(call: Callable[[], object], repeats: int) -> list[tuple[str, float, float]]:
    """(name, start, end) in us of the kernels of `repeats` calls, by start; L2 is flushed before a call."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
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
