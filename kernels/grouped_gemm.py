"""The two public grouped GEMMs: check arguments, allocate the output, call a backend."""

import torch
from torch import Tensor

from expertd.kernels.backends import Backend, backend_for
from expertd.kernels.checks import check_contiguous, check_masked, check_quantized
from expertd.kernels.ops.four_bits import Weights
from expertd.kernels.ops.quantize import Quantized


def grouped_gemm_contiguous(
    a: Quantized,
    b: Weights,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    backend: Backend | str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Multiply rows sorted by group with their group's weight: out[r] = a[r] @ b[g].T for r in group g.

    a          e4m3 data [M, K], contiguous, 16-byte aligned, K a multiple of 128; fp32 scales [M, K/128], one
               per row and 128 columns, row- or column-major (`quantize_rows`)
    b          e4m3 data [G, N, K], contiguous, 16-byte aligned, N a multiple of 8, G from 1 to 1024; fp32
               scales [G, ceil(N/128), K/128], one per 128x128 block, contiguous (`quantize_blocks`). Or
               `FourBits`, if the backend takes their format
    offsets    int32 [G+1] on the same device: group g owns rows offsets[g]:offsets[g+1], with any height and
               any start. offsets[0] is 0, offsets[G] is at most M, and offsets never decrease; not checked,
               since that would read the device. Rows from offsets[G] on are not written
    out        bf16 [M, N], contiguous, 16-byte aligned; None: allocated
    backend    a Backend, its name, or None for the best one for a's device
    num_sms    size of the persistent grid in SMs; None: all of them; any count gives the same bits

    Returns out, without gradients. Between calls, b may be changed in place, never through `.data`, which
    backend "reference" does not notice. Raises ValueError naming expected and got, before anything is
    launched.
    """
    check_quantized("a", a)
    chosen = backend_for(backend, a.data, "a")
    problem = check_contiguous(chosen.capabilities, a, b, offsets, out, num_sms)
    if out is None:
        out = torch.empty((problem.m, problem.n), dtype=torch.bfloat16, device=a.data.device)
    if problem.m > 0:
        chosen.contiguous(a, b, offsets, out, num_sms)
    return out


def grouped_gemm_masked(
    a: Quantized,
    b: Weights,
    counts: Tensor,
    *,
    expected_m: int | None = None,
    out: Tensor | None = None,
    backend: Backend | str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Multiply the first counts[g] rows of each group: out[g, r] = a[g, r] @ b[g].T for r < counts[g].

    a          e4m3 data [G, max_m, K], contiguous, 16-byte aligned, max_m at least 1, K a multiple of 128;
               fp32 scales [G, max_m, K/128], their last two dimensions row- or column-major (`quantize_rows`)
    b          e4m3 data [G, N, K], contiguous, 16-byte aligned, N a multiple of 8, G from 1 to 1024; fp32
               scales [G, ceil(N/128), K/128], contiguous (`quantize_blocks`). Or `FourBits`
    counts     int32 [G] on the same device, each from 0 to max_m; not checked, since that would read the
               device
    expected_m the likely number of rows per group, for choosing a tile; never changes which rows are computed
    out        bf16 [G, max_m, N], contiguous, 16-byte aligned; None: allocated. Rows from counts[g] on are
               never written
    backend    a Backend, its name, or None for the best one for a's device
    num_sms    size of the persistent grid in SMs; None: all of them; any count gives the same bits

    Returns out, without gradients. Between calls, b may be changed in place, never through `.data`, which
    backend "reference" does not notice. Raises ValueError naming expected and got, before anything is
    launched.
    """
    check_quantized("a", a)
    chosen = backend_for(backend, a.data, "a")
    problem = check_masked(chosen.capabilities, a, b, counts, expected_m, out, num_sms)
    if out is None:
        shape = (problem.num_groups, problem.m, problem.n)
        out = torch.empty(shape, dtype=torch.bfloat16, device=a.data.device)
    chosen.masked(a, b, counts, expected_m, out, num_sms)
    return out
