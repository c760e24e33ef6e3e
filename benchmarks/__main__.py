"""Runs a benchmark: `python -m benchmarks NAME [options]`; `--help` lists them."""

import argparse
import sys
from importlib import import_module

BENCHMARKS = {
    "engines": ("engines",),
    "gemm": ("grouped_gemm", "gemm_sweep", "host_cost"),
    "layer": ("moe_layer", "cpu_layer", "expert_store", "numerics", "weights"),
    "ranks": ("parallel", "placement"),
    "serving": (
        "serving",
        "serving_cpu",
        "nixl",
        "steps",
        "stream_steps",
        "lanes",
        "open_loop",
        "deadlines",
        "pool_rules",
    ),
}
"""Their names, by the package that has a module of each name."""
PACKAGES = {name: package for package, names in BENCHMARKS.items() for name in names}


def main() -> int | None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=PACKAGES, metavar="NAME", help=f"one of {', '.join(PACKAGES)}")
    name = parser.parse_args(sys.argv[1:2]).name
    sys.argv[:2] = [f"python -m benchmarks {name}"]
    found: int | None = import_module(f"benchmarks.{PACKAGES[name]}.{name}").main()
    return found


if __name__ == "__main__":
    sys.exit(main())
