"""The command line of `benchmarks parallel`, and its file of results."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import deep_gemm_peer
from benchmarks.layer.problem import LAYERS
from benchmarks.lib.run import new_parser
from benchmarks.lib.timing import header
from benchmarks.ranks import nccl_peer, rank_timing

TOKENS = (1, 16, 64, 128, 256, 1024, 4096)
SECTIONS = ("rows", "skewed", "uneven", "growth")
PEERS = ("nccl", "two_gemms", "mega_moe")


def options(arguments: Sequence[str] | None = None) -> Namespace:
    """The options; `layers` are those whose names contain a word, `peers` those that are not skipped."""
    parser = new_parser("Experts spread over the GPUs of one host.")
    parser.add_argument("--ranks", type=int, help="GPUs; default: all. torchrun says it by itself")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of each GPU, in rows")
    parser.add_argument("--layer", default="", help="only layers whose name contains this")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of skewed rows; 0: measure none")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--skip", nargs="+", choices=PEERS, default=(), help="peers not to measure")
    given = parser.parse_args(arguments)
    given.layers = [layer for layer in LAYERS if given.layer in layer.name]
    given.peers = [peer for peer in PEERS if peer not in given.skip]
    if not given.layers:
        sys.exit(f"--layer: expected a part of {', '.join(x.name for x in LAYERS)}, got {given.layer!r}")
    if min(given.tokens) < 1:
        sys.exit(f"--tokens: expected numbers of at least 1, got {min(given.tokens)}")
    if given.ranks is not None and not 1 <= given.ranks <= 8:
        sys.exit(f"--ranks: expected 1 to 8, got {given.ranks}")
    if given.zipf < 0:
        sys.exit(f"--zipf: expected at least 0, got {given.zipf:g}")
    return given


def about(given: Namespace, num_ranks: int) -> dict[str, Any]:
    """The machine, the versions, and how the rows are measured."""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    found = header() | {"ranks": num_ranks, "nccl": ".".join(map(str, version))}
    if "two_gemms" in given.peers:
        found["deep_gemm"] = deep_gemm_peer.version()
    return found | {"method": [rank_timing.METHOD, rank_timing.IN_A_ROW_METHOD, nccl_peer.METHOD]}


def write(file: Path | None, machine: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Replace the sections of the file that have been measured, if there is to be one.

    What it says of the machine is that of "rows": growth may come from one with more GPUs.
    """
    if file is not None:
        before = json.loads(file.read_text()) if file.exists() else {}
        about_rows = machine if "rows" in measured else before.get("about", machine)
        file.write_text(json.dumps({**before, "about": about_rows, **measured}, indent=1) + "\n")
