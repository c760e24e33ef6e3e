"""The public function for all experts of a layer: checks arguments and calls a backend."""

from collections.abc import Iterable

import torch
from torch import Tensor

from expertd.kernels.backends import Backend, backend_for
from expertd.kernels.expert_checks import check_experts, check_experts_in_parts, checked_parts
from expertd.kernels.ops.activation import SILU, Activation
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import Weights
from expertd.kernels.ops.parts import ExpertPart, GroupTable
from expertd.kernels.ops.permute import write_no_rows
from expertd.kernels.ops.quantize import HiddenStates, values_of
from expertd.kernels.stages import Stages


def fused_experts(
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    out: Tensor | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
    backend: Backend | str | None = None,
    num_sms: int | None = None,
    offsets: Tensor | None = None,
    stages: Stages | None = None,
) -> Tensor:
    """Sum each token's experts: out[t] = sum over s of topk_weights[t, s] * ffn(topk_ids[t, s], t).

    ffn(g, t) is the SwiGLU FFN (silu(gate) * up) @ down[g].T, where gate and up are the halves of
    hidden_states[t] @ gate_up[g].T; another `activation` replaces silu(gate) * up, and `biases` are added to
    both products.

    hidden_states  bfloat16, float16 or float32 [T, H], any strides; H a multiple of 16, at least 128. Or
                   Quantized: e4m3 [T, H] with fp32 scales [T, H/128], any strides; H a multiple of 128
    topk_ids       int32 [T, top_k] on the same device, contiguous; top_k at least 1 (with a column for each
                   shared expert among the G), T * top_k below 2**31. A token may name an expert twice. An id
                   outside 0 to G - 1 names no expert held here: its slot adds nothing, whatever its weight
    topk_weights   fp32 [T, top_k], contiguous
    gate_up        e4m3 [G, 2I, H], the gate's rows first, with fp32 scales [G, 2I/128, ceil(H/128)] (one per
                   128x128 block, `quantize_blocks`); I a multiple of 128, G from 1 to 1024. Or `FourBits`,
                   if the backend takes their format; then H is a multiple of 32
    down           e4m3 [G, H, I] with fp32 scales [G, ceil(H/128), I/128]; data of both contiguous and
                   16-byte aligned, scales contiguous. Or `FourBits`
    out            float32, bfloat16 or float16 [T, H], contiguous and 16-byte aligned, to write to; None: a
                   new one of float32
    activation     a Swiglu or an OtherGlu: alpha finite, limit above 0
    biases         contiguous and 16-byte aligned; None: there are none
    backend        a Backend, its name, or None for the best one for the device
    num_sms        SMs for the GEMMs; None: all of them. Every count from 2 on gives the same bits; with 1,
                   backend "hopper" rounds to bf16 before the activation and gives different bits
    offsets        int32 [G + 1] on the device, or in pinned memory of the host: where to write how many rows
                   (token and slot) the groups before each have; their differences are the groups' rows
    stages         notified of the call's stages: on Hopper, where launches then no longer overlap, "sort",
                   "quantize", "gate_up", "down" and "combine"; else "sort", "ffn" and "combine". None: nobody

    Returns out, summed in fp32 in the order of slots. Activations are rounded to FP8 before each GEMM
    (`quantize_rows`), except on a CPU, where they are rounded to bf16. Quantized hidden
    states are multiplied as they are (on a CPU, as `dequantize_rows` has them in bf16). An expert's output
    is rounded to bf16 before it is weighted. NaN in a token stays in its own row. Has no gradients. Weights
    may be changed between calls in place (`copy_`), never through `.data`, which backend "reference" does not
    notice; or tell it by `Backend.weights_changed`. Raises ValueError (name, expected, got) before anything
    is launched.
    """
    rows = values_of(hidden_states)
    chosen = backend_for(backend, rows, "hidden_states")
    operands = hidden_states, topk_ids, topk_weights, gate_up, down
    check_experts(chosen.capabilities, *operands, out, activation, num_sms, offsets, biases)
    if out is None:
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        if offsets is not None:
            write_no_rows(offsets, rows.device)
        return out
    chosen.experts(*operands, out, activation, num_sms, offsets, biases, stages)
    return out


def fused_experts_in_parts(
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    parts: Iterable[ExpertPart],
    num_groups: int,
    *,
    num_experts: int | None = None,
    out: Tensor | None = None,
    activation: Activation = SILU,
    backend: Backend | str | None = None,
    num_sms: int | None = None,
    offsets: Tensor | None = None,
    table: GroupTable | None = None,
) -> Tensor:
    """As `fused_experts`, with weights that come one part after another, and bitwise its result.

    parts        experts of groups that follow each other, `num_groups` in all, all with biases or none. The
                 next one is asked for once the launches with the one before are on the stream: it may have
                 the stream wait for what fills its memory, also where an earlier part was
    topk_ids     int32 [T, top_k]: groups of all parts; others name none
    num_groups   at most 1024
    num_experts  the experts among which the tokens are divided, to choose tiles by; None: num_groups
    table        finds the groups of topk_ids, which are other ids then; None: they are groups

    The other arguments are those of `fused_experts`. A part is checked when it comes: ValueError (name,
    expected, got) may be raised after others were launched.
    """
    rows = values_of(hidden_states)
    chosen = backend_for(backend, rows, "hidden_states")
    can, operands = chosen.capabilities, (hidden_states, topk_ids, topk_weights)
    check_experts_in_parts(can, *operands, num_groups, out, activation, num_sms, offsets, table)
    if out is None:
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    checked = checked_parts(can, parts, num_groups, rows.shape[1], rows.device)
    if rows.shape[0] == 0:
        for _ in checked:
            """Launches nothing."""
        if offsets is not None:
            write_no_rows(offsets, rows.device)
        return out
    chosen.experts_in_parts(
        *operands, checked, num_groups, num_experts or num_groups, out, activation, num_sms, offsets, table
    )
    return out
