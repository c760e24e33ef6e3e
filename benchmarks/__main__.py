"""Runs a benchmark: `python -m benchmarks NAME [options]`; without a name it lists them."""

import sys
from importlib import import_module

BENCHMARKS = {
    "gemm": ("grouped_gemm", "gemm_sweep", "host_cost"),
    "layer": ("moe_layer", "cpu_layer", "numerics", "weights"),
    "ranks": ("parallel", "overlap", "placement", "moves"),
    "serving": (
        *("serving", "serving_cpu", "steps", "stream_steps", "lanes", "lanes_floor", "open_loop"),
        *("deadlines", "metrics_cost"),
    ),
}
"""Their names, by the package that has a module of each name."""


def main() -> int | None:
    """Run the benchmark that the command line names."""
    packages = {name: package for package, names in BENCHMARKS.items() for name in names}
    if len(sys.argv) < 2 or sys.argv[1] not in packages:
        sys.exit(f"usage: python -m benchmarks NAME [options], NAME one of {', '.join(packages)}")
    name = sys.argv.pop(1)
    sys.argv[0] = f"benchmarks {name}"
    found: int | None = import_module(f"benchmarks.{packages[name]}.{name}").main()
    return found


if __name__ == "__main__":
    sys.exit(main())
