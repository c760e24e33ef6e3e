"""A benchmark's GEMM on the CPU."""

import torch

from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from expertd.layout import Layout
from tests.kernels.helpers import random_contiguous, random_masked


def problem_on_the_cpu(shape: Shape) -> Problem:
    """The shape with random operands."""
    if shape.layout is Layout.CONTIGUOUS:
        packed = random_contiguous(shape.rows, shape.n, shape.k)
        out = torch.empty(sum(shape.rows), shape.n, dtype=torch.bfloat16)
        return Problem(shape, packed.a, packed.b, packed.offsets, out)
    masked = random_masked(shape.rows, shape.max_m, shape.n, shape.k)
    out = torch.empty(shape.num_groups, shape.max_m, shape.n, dtype=torch.bfloat16)
    return Problem(shape, masked.a, masked.b, masked.counts, out)
