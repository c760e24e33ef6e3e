"""Callers of a server on one machine: `python -m benchmarks.serving [--json FILE] [--rows WORD ...]`.

DeepSeek-V3's layer with all 256 experts, random weights, bf16. The server and its callers are processes of
their own. A row is a way to the server (HTTP over loopback, tensors in shared memory, channels; host memory,
the GPU's, or another GPU's), a number of tokens and of callers, each of which sends its next request when it
has read the last answer. The columns: the median and the 99th percentile of the caller's time, tokens per
second, the mean of `expertd_compute_seconds` meanwhile, and the GPU's own time for such a step. HTTP is
measured once more with four HTTP processes.
"""

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import expect_gpu, header

Row = dict[str, Any]
MODEL, HIDDEN = "deepseek-v3", 7168
SECONDS = 2.0
CALLER_PROCESSES, START_SECONDS = 4, 1.5
TOKENS = (1, 8, 64, 256, 1024, 4096)
CONFIG = """
models:
  - {name: deepseek-v3, hidden_size: 7168, intermediate_size: 2048, num_experts: 256, top_k: 8,
     routing: {scoring_func: sigmoid, routed_scaling_factor: 2.5, num_expert_groups: 8, topk_group: 4}}
shared_memory: {enabled: true}
limits: {max_body_bytes: 134217728}
"""


class Case(NamedTuple):
    """One row: the way, the device of the tensors, tokens a request, callers."""

    way: str  # "http", "shared memory" or "channel"
    device: str | None  # None: host memory
    tokens: int
    callers: int = 1


def cases(gpus: int) -> list[Case]:
    """All rows; those with a second GPU only where there is one."""
    rows = [Case("http", None, tokens) for tokens in TOKENS]
    rows += [
        Case("http", None, tokens, callers) for tokens, callers in ((4096, 4), (64, 32), (1, 32), (1, 64))
    ]
    for device in (None, "cuda:0", *(("cuda:1",) if gpus > 1 else ())):
        rows += [Case("shared memory", device, tokens) for tokens in (1, 64, 256, 4096)]
        rows += [Case("channel", device, tokens) for tokens in TOKENS]
    return [*rows, Case("channel", "cuda:0", 16, 4)]


@contextmanager
def server(workers: int) -> Iterator[tuple[str, int]]:
    """A ready server: its URL and port."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serving.yaml"
        config.write_text(f"{CONFIG}channels: {{socket: {folder}/channels}}\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = "import sys; from expertd.service.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "serve", "--config", str(config)]
        options = ["--port", str(port), *(["--http-workers", str(workers)] if workers > 1 else [])]
        process = subprocess.Popen([*command, *options])
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(3000):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with code {process.returncode}")
                try:
                    urllib.request.urlopen(f"{url}/v2/health/ready")
                    break
                except OSError:
                    time.sleep(0.1)
            yield url, port
        finally:
            process.terminate()
            process.wait(60)


def measure(case: Case, url: str, port: int) -> Row:
    """One row."""
    given = {"url": url, "port": port, "model": MODEL, "hidden_size": HIDDEN, "seconds": SECONDS}
    given |= {"tokens": case.tokens, "device": case.device}
    program = {"http": "http_caller", "shared memory": "region_caller", "channel": "channel_caller"}[case.way]
    before = compute_seconds(url)
    # HTTP callers share few processes: more threads of one would wait for each other.
    processes = min(case.callers, CALLER_PROCESSES) if case.way == "http" else 1
    callers = case.callers // processes
    given |= {"connections": callers, "callers": callers}
    if processes > 1:
        given["start"] = time.time() + START_SECONDS
    latencies = sorted(latency for part in run_callers(program, given, processes) for latency in part)
    after = compute_seconds(url)
    return {
        **case._asdict(),
        "requests": len(latencies),
        "p50_us": 1e6 * statistics.median(latencies),
        "p99_us": 1e6 * latencies[int(0.99 * len(latencies))],
        "tokens_per_second": len(latencies) * case.tokens / SECONDS,
        "compute_us": 1e6 * (after[0] - before[0]) / max(1.0, after[1] - before[1]),
        "steps": after[1] - before[1],
    }


def run_callers(program: str, given: Row, processes: int) -> list[list[float]]:
    """What each of the callers' processes has measured."""
    command = [sys.executable, "-m", f"benchmarks.{program}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, text=True, **pipes) for _ in range(processes)]  # type: ignore[call-overload]
    for process in running:
        process.stdin.write(json.dumps(given))
        process.stdin.close()
    found = []
    for process in running:
        with process:
            found.append(process.stdout.read())
            errors = process.stderr.read()
        if process.returncode:
            raise RuntimeError(errors)
    return [json.loads(text) for text in found]


def compute_seconds(url: str) -> tuple[float, float]:
    """The sum and the count of `expertd_compute_seconds`."""
    time.sleep(0.3)  # steps are counted after their answers
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = [
        sum(float(value) for value in re.findall(rf"^expertd_compute_seconds_{name}{{.*}} (.+)$", text, re.M))
        for name in ("sum", "count")
    ]
    return found[0], found[1]


def gpu_times() -> dict[int, float]:
    """The GPU's own time for a step, from benchmarks.steps in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.steps", "--only-gpu"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {int(tokens): us for tokens, us in json.loads(ran.stdout).items()}


def main() -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", help="only ways that begin with one of these words")
    parser.add_argument("--http-workers", type=int, nargs="+", default=(1, 4), help="only HTTP with several")
    arguments = parser.parse_args()
    expect_gpu("serving")
    import torch

    gpu = gpu_times()
    rows: list[Row] = []
    result = {"header": header(), "rows": rows}
    for workers in arguments.http_workers:
        ways = tuple(arguments.rows or ("",)) if workers == 1 else ("http",)
        wanted = [case for case in cases(torch.cuda.device_count()) if case.way.startswith(ways)]
        with server(workers) as (url, port):
            for case in wanted:
                row = {"http_workers": workers, **measure(case, url, port), "gpu_us": gpu.get(case.tokens)}
                rows.append(row)
                rounded = {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}
                print(json.dumps(rounded), flush=True)
                if arguments.json:  # after each row, so that an interrupted run leaves some
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
