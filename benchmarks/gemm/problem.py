"""One shape's tensors on the GPU, for our kernels and for DeepGEMM."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gemm.shapes import Shape
from expertd import kernels
from expertd.kernels import Quantized
from expertd.kernels.backends import Backend
from expertd.kernels.ops.four_bits import SCALE_DTYPES, FourBits, Weights
from expertd.layout import Layout
from expertd.weight_format import WeightFormat, WeightLayout

ALIGNMENT = 128  # row alignment of groups in DeepGEMM's contiguous layout


@dataclass(frozen=True)
class Problem:
    """Inputs of one call; `extents` are offsets or counts."""

    shape: Shape
    a: Quantized
    b: Quantized
    extents: Tensor
    out: Tensor

    def run(
        self, num_sms: int | None = None, backend: Backend | None = None, b: Weights | None = None
    ) -> Tensor:
        """Our kernel, on num_sms SMs or all of them.

        backend  None: the one for this GPU
        b        other weights of the same size; None: the problem's own
        """
        arguments = (self.a, self.b if b is None else b, self.extents)
        if self.shape.layout is Layout.CONTIGUOUS:
            return kernels.grouped_gemm_contiguous(*arguments, out=self.out, num_sms=num_sms, backend=backend)
        mean = max(1, sum(self.shape.rows) // self.shape.num_groups)
        return kernels.grouped_gemm_masked(
            *arguments, expected_m=mean, out=self.out, num_sms=num_sms, backend=backend
        )

    def real_rows(self, out: Tensor) -> Tensor:
        """The real rows, group after group."""
        if self.shape.layout is Layout.CONTIGUOUS:
            return out
        return torch.cat([out[g, :rows] for g, rows in enumerate(self.shape.rows)])


class Pool:
    """Random e4m3, distributed like quantized normal data, made once and cut to size for every shape."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.float8_e4m3fn, device="cuda")
        for piece in torch.split(self.data, 1 << 26):
            piece.copy_((torch.randn(piece.shape, device="cuda") * 166).clamp(-448, 448))

    def problem(self, shape: Shape) -> Problem:
        """Fresh scales and rows; weights are a view of the pool."""
        g, n, k = shape.num_groups, shape.n, shape.k
        b = self.data[: g * n * k].view(g, n, k)
        b_scales = _scales(g, -(-n // 128), k // 128)
        if shape.layout is Layout.CONTIGUOUS:
            m = sum(shape.rows)
            a = self._rows(m, k)
            a_scales = _scales(k // 128, m).t()
            extents = torch.tensor([0, *shape.rows]).cumsum(0).to(torch.int32).cuda()
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        else:
            a = self._rows(g * shape.max_m, k).view(g, shape.max_m, k)
            a_scales = _scales(g, k // 128, shape.max_m).transpose(1, 2)
            extents = torch.tensor(shape.rows, dtype=torch.int32, device="cuda")
            out = torch.empty(g, shape.max_m, n, dtype=torch.bfloat16, device="cuda")
        return Problem(shape, Quantized(a, a_scales), Quantized(b, b_scales), extents, out)

    def _rows(self, m: int, k: int) -> Tensor:
        start = torch.randint(0, (self.data.numel() - m * k) // 128, ()).item() * 128
        return self.data[int(start) : int(start) + m * k].view(m, k).clone()


def random_mxfp4(like: Tensor) -> FourBits:
    """MXFP4 weights of the size and on the device of [G, N, K]: every code, and five scales."""
    num_groups, n, k = like.shape
    sizes = (0, 256, (num_groups, n, k // 2)), (117, 122, (num_groups, n, k // 32))
    data, scales = (torch.randint(*size, dtype=torch.uint8, device=like.device) for size in sizes)
    return FourBits(data, scales, WeightFormat.MXFP4)


def random_four_bits(like: Tensor, layout: WeightLayout) -> FourBits:
    """INT4 or NVFP4 weights of the size and on the device of [G, N, K]: every code."""
    num_groups, n, k = like.shape
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, device=like.device)
    scales = torch.rand((num_groups, n, k // layout.group_size), device=like.device) + 1
    whole = torch.full((num_groups, n), 2.0**-7, device=like.device) if layout.has_whole else None
    return FourBits(data, scales.to(SCALE_DTYPES[layout.format][0]), layout.format, whole)


def _scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") * 1e-2 + 5e-3
