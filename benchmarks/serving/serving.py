"""Callers of a server on one machine: `python -m benchmarks serving [--json FILE] [--rows WORD ...]`.

DeepSeek-V3's layer with all 256 experts, random weights, bf16; with --layers several of them, and rows whose
callers call one after another. The server and its callers are processes of their own. A row is a way to the
server (HTTP over loopback, tensors in shared memory, channels; host memory, the GPU's, or another GPU's), a
number of tokens and of callers, each of which sends its next request when it has read the last answer.
"sockets" is HTTP with a server that only receives and sends. The columns: the median and the 99th percentile
of the caller's time, tokens per second, the mean of `expertd_compute_seconds` (of requests before those that
count, too), and the GPU's own time for such a step. HTTP is measured once more with four HTTP processes.
With --devices, several GPUs share the layers; "cuda:0" is one of them then. Rows that are not measured stay
in the file.
"""

import json
import subprocess
import sys

from benchmarks.lib.run import Result, earlier, new_parser
from benchmarks.lib.timing import expect_gpu, header
from benchmarks.serving.rows import Case, measure, server

TOKENS = (1, 8, 64, 256, 1024, 4096)
LAYERS_TOKENS = (1, 64, 256)
KEYS = ("http_workers", *Case._fields)


def cases(gpus: int, layers: int) -> list[Case]:
    """All rows; those with a second GPU only where there is one."""
    rows = [Case("http", None, tokens) for tokens in TOKENS]
    rows += [
        Case("http", None, tokens, callers) for tokens, callers in ((4096, 4), (64, 32), (1, 32), (1, 64))
    ]
    rows += [Case("sockets", None, tokens) for tokens in TOKENS]
    for device in (None, "cuda:0", *(("cuda:1",) if gpus > 1 else ())):
        rows += [Case("shared memory", device, tokens) for tokens in (1, 64, 256, 4096)]
        rows += [Case("channel", device, tokens) for tokens in TOKENS]
    rows += [Case("channel", device, 4096, 4) for device in (None, "cuda:0")]
    rows += [Case("channel", "cuda:0", 16, 4)]
    return rows + [Case("channel", None, tokens, 1, layers) for tokens in LAYERS_TOKENS if layers > 1]


def gpu_times() -> dict[int, float]:
    """The GPU's own time for a step, from benchmarks.serving.steps in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "steps", "--only-gpu"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {int(tokens): us for tokens, us in json.loads(ran.stdout).items()}


def main() -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--rows", nargs="+", help="only ways that begin with one of these words")
    parser.add_argument("--tokens", type=int, nargs="+", help="only rows with these")
    parser.add_argument("--http-workers", type=int, nargs="+", default=(1, 4), help="only HTTP with several")
    parser.add_argument("--devices", help="GPUs that share the layer, e.g. 0-1; default: one GPU")
    parser.add_argument("--layers", type=int, default=1, help="of the server")
    arguments = parser.parse_args()
    expect_gpu("benchmarks serving")
    import torch

    gpu = {} if arguments.devices else gpu_times()
    about = header() | {"devices": arguments.devices}
    result = Result(arguments.json, about, earlier(arguments.json), KEYS, Case._field_defaults)
    for workers in arguments.http_workers:
        ways = tuple(arguments.rows or ("",)) if workers == 1 else ("http",)
        wanted = [
            case
            for case in cases(torch.cuda.device_count(), arguments.layers)
            if case.way.startswith(ways) and (not arguments.tokens or case.tokens in arguments.tokens)
        ]
        if arguments.devices:
            wanted = [case for case in wanted if case.way != "sockets" and case.device != "cuda:1"]
        with server(workers, arguments.devices, arguments.layers) as (url, _):
            for case in wanted:
                row = {"http_workers": workers, **measure(case, url), "gpu_us": gpu.get(case.tokens)}
                result.put(row)
    return 0
