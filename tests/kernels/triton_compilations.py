"""Compiles every Triton variant for the targets in its arguments, and prints their resources as JSON lines.

In a process of its own, since Triton either interprets a process's kernels or compiles them.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass

from expertd.kernels.backends.triton.build import compile_variant, run_compiler
from expertd.kernels.backends.triton.targets import TARGETS
from expertd.kernels.backends.triton.variants import variants_for


@dataclass(frozen=True)
class Compiled:
    """A variant's resources, and the tensor cores' instructions in its PTX; bytes of the stack per thread."""

    capability: int
    name: str
    threads: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    unused: int
    instructions: list[str]
    scratch_bytes: int


def main(capabilities: list[int]) -> None:
    """Print a line for each variant."""
    for capability in capabilities:
        target = TARGETS[capability]
        for variant in variants_for(target):
            made, binary = run_compiler(variant, target), compile_variant(variant, target)
            instructions = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", made.asm["ptx"]))
            compiled = Compiled(
                capability,
                variant.name,
                32 * variant.warps,
                binary.registers,
                binary.stack_bytes,
                binary.shared_bytes,
                binary.unused,
                sorted(instructions),
                made.metadata.global_scratch_size,
            )
            print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
