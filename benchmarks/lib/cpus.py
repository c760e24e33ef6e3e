"""Which CPUs a server has, and which its callers, where both run on one machine."""

import argparse
import os
from typing import Any

import torch

from benchmarks.lib.timing import cpu_name


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--server-cpus`."""
    about = "CPUs for the server alone, callers have the others; default: they share all"
    parser.add_argument("--server-cpus", type=int, help=about)


def split(count: int | None) -> tuple[set[int] | None, dict[str, Any]]:
    """The server's CPUs, None: all; and what a header says of them.

    With a count, this process has the others from now on, and so have those that it starts.
    """
    cpus = sorted(os.sched_getaffinity(0))
    header = {"cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}
    if "OMP_NUM_THREADS" in os.environ:
        header["threads"] = os.environ["OMP_NUM_THREADS"]
    if count is None:
        return None, header | {"cpus": len(cpus)}
    if not 0 < count < len(cpus):
        raise SystemExit(f"--server-cpus: expected 1 to {len(cpus) - 1}, got {count}")
    os.sched_setaffinity(0, cpus[count:])
    return set(cpus[:count]), header | {"cpus": count, "callers_cpus": len(cpus) - count}


def described(header: dict[str, Any]) -> str:
    """The same in words."""
    server = f"{header['cpus']} cores of an {header['cpu']} with {header['instructions']}"
    threads = f"; OMP_NUM_THREADS={header['threads']}" if "threads" in header else ""
    if "callers_cpus" not in header:
        return f"{server}, which server and callers share{threads}"
    return f"{server} for the server, and {header['callers_cpus']} others for its callers{threads}"
