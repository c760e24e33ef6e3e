"""How fast weights are read: `python -m benchmarks weights [--device cuda] [--directory DIR] [--json FILE]`.

Makes a checkpoint of 2 GB in DIR (on the storage to be measured), whose FP8 numbers are random, and reads it
in turns, in another order each round: `expertd` as a server loads a layer, which fuses gates and ups and
looks for NaNs; `safetensors` tensor by tensor, copied from its mapping; fastsafetensors if it is installed;
and `dd` with and without the page cache, which keeps nothing.
Half of the rows are *cold*: before each reading, the page cache drops the file (posix_fadvise, which needs no
root; the cache of the storage itself, or of a virtual machine's host, stays). The others are *warm*: the page
cache has the file. A row has the median of GB/s with its quartiles, and the processor's seconds for one
reading.
"""

import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import cpu_name
from benchmarks.make_checkpoint import SMALL
from expertd.service.checkpoints import LayerSource, models_of
from expertd.service.checkpoints.weights import read_layer
from expertd.service.settings.served import CheckpointSettings

SIZES = {"deepseek-v3": (7168, 2048, 44), "qwen3-30b-a3b": (2048, 768, 420)}
"""Hidden and intermediate size of a model's experts, and how many of them have 2 GB."""
_LAYER = 1
Way = Callable[[], object]


def make(directory: Path, sizes: tuple[int, int, int]) -> Path:
    """Write a checkpoint with one MoE layer in one file, which is returned."""
    hidden, intermediate, num_experts = sizes
    config = {**SMALL, "num_hidden_layers": _LAYER + 1, "n_routed_experts": num_experts}
    config |= {"hidden_size": hidden, "moe_intermediate_size": intermediate}
    (directory / "config.json").write_text(json.dumps(config))
    generator, prefix = np.random.default_rng(0), f"model.layers.{_LAYER}.mlp"
    tensors = {
        f"{prefix}.gate.weight": torch.ones(num_experts, hidden, dtype=torch.bfloat16),
        f"{prefix}.gate.e_score_correction_bias": torch.zeros(num_experts),
    }
    shapes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    shapes["down_proj"] = (hidden, intermediate)
    for expert in [*(f"experts.{number}" for number in range(num_experts)), "shared_experts"]:
        for name, (n, k) in shapes.items():
            numbers = np.frombuffer(generator.bytes(n * k), np.uint8) & 0xF7  # without NaNs
            data = torch.from_numpy(numbers).view(torch.float8_e4m3fn).view(n, k)
            tensors[f"{prefix}.{expert}.{name}.weight"] = data
            tensors[f"{prefix}.{expert}.{name}.weight_scale_inv"] = torch.ones(-(-n // 128), -(-k // 128))
    file = directory / "model.safetensors"
    save_file(tensors, file)
    return file


def drop(file: Path) -> None:
    """Have the page cache forget the file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ways_of(file: Path, device: torch.device) -> dict[str, Way]:
    """The ways to read `file`."""
    (model,) = models_of(CheckpointSettings(path=file.parent, layers=str(_LAYER)))
    ways: dict[str, Way] = {
        "expertd": lambda: _layer(model.source, device),
        "safetensors": lambda: _safetensors(file, device),
        "dd": lambda: _dd(file),
        "dd iflag=direct": lambda: _dd(file, "iflag=direct"),
    }
    if _version("fastsafetensors") is not None:
        ways["fastsafetensors"] = lambda: _fastsafetensors(file, device)
    return ways


def _layer(source: LayerSource, device: torch.device) -> None:
    read_layer(source, device, lambda _: None)
    _synchronize(device)


def _safetensors(file: Path, device: torch.device) -> None:
    tensors: dict[str, Tensor] = {}
    with safetensors.safe_open(file, framework="pt", device=str(device)) as opened:
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            tensor = opened.get_tensor(name)
            tensors[name] = tensor.clone() if device.type == "cpu" else tensor  # a mapping is not read yet
    _synchronize(device)


def _fastsafetensors(file: Path, device: torch.device) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    on = str(device) if device.index is not None or device.type == "cpu" else f"{device}:0"
    loader = SafeTensorsFileLoader(SingleGroup(), device=on, nogds=True)
    loader.add_filenames({0: [str(file)]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}
    _synchronize(device)
    del tensors
    buffer.close()
    loader.close()


def _dd(file: Path, *more: str) -> None:
    command = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none", *more]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        raise OSError(f"{' '.join(more)}: refused by the file system")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(ways: dict[str, Way], file: Path, rounds: int, warm: bool) -> dict[str, dict[str, float]]:
    """GB/s and the processor's seconds of each way."""
    size, found = file.stat().st_size, {name: list[tuple[float, float]]() for name in ways}
    if warm:
        _dd(file)
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            if not warm:
                drop(file)
            cpu, begin = _cpu_seconds(), time.perf_counter()
            ways[name]()
            seconds = time.perf_counter() - begin
            found[name].append((size / seconds / 1e9, _cpu_seconds() - cpu))
    return {name: _row(rows) for name, rows in found.items()}


def working(ways: dict[str, Way]) -> dict[str, Way]:
    """The ways that the file system does not refuse; each has run once."""
    found = {}
    for name, way in ways.items():
        try:
            way()
            found[name] = way
        except OSError as error:
            print(f"{name}: {error}")
    return found


def _row(found: list[tuple[float, float]]) -> dict[str, float]:
    low, middle, high = statistics.quantiles([speed for speed, _ in found], n=4, method="inclusive")
    return {"GB/s": middle, "low": low, "high": high, "cpu": statistics.median(cpu for _, cpu in found)}


def _cpu_seconds() -> float:
    times = os.times()  # also of processes that have ended
    return times.user + times.system + times.children_user + times.children_system


def about(directory: Path, device: torch.device) -> dict[str, Any]:
    """The machine, the storage and the versions."""
    versions = {package: _version(package) for package in ("torch", "safetensors", "fastsafetensors")}
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}, Linux {platform.release()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "storage": subprocess.run(
            ["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "versions": {package: version for package, version in versions.items() if version is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--directory", type=Path, default=Path(), help="(default: the present one)")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    header = {**about(given.directory, given.device), "rounds": given.rounds}
    result = Result(given.json, header)
    for sizes in given.sizes:
        with tempfile.TemporaryDirectory(prefix="weights-", dir=given.directory) as folder:
            file = make(Path(folder), SIZES[sizes])
            ways = working(ways_of(file, given.device))
            for cache in ("cold", "warm"):
                for way, row in measure(ways, file, given.rounds, cache == "warm").items():
                    result.put({"sizes": sizes, "cache": cache, "way": way, **row})
    return 0
