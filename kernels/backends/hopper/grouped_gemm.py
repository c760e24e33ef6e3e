"""Launches csrc/grouped_gemm.cu as planned, with tensor maps and a tile counter."""

import functools
import struct
from collections.abc import Callable
from ctypes import sizeof
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertd.kernels.backends.hopper import parameters, plans, tiles
from expertd.kernels.backends.hopper.launch import Grid, Kernels, PackedLaunch, multiprocessors
from expertd.kernels.backends.hopper.packed_weights import PackedCache
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.hopper.rates import Rates, rates
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache, pack_rows
from expertd.kernels.backends.hopper.tile_counters import TileCounters
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Source, Variant
from expertd.kernels.ops.activation import Activation, OtherGlu
from expertd.kernels.ops.four_bits import FourBits, Weights, columns_of, format_of, group_size_of
from expertd.kernels.ops.quantize import Quantized
from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK
from expertd.weight_format import WeightFormat

_STORE_BOX = 16  # rows of out per TMA store
_KEPT = 4096
_MAP_BYTES = sizeof(parameters.TensorMapWords)
_NO_MAP = bytes(_MAP_BYTES)

Choose = Callable[[Layout, int, int, int, float, int, bool, Rates, WeightFormat, int], GemmPlan]
"""`plans.choose`, or another function with its signature."""


def _variant(layout: Layout, config: TileConfig) -> Variant:
    defines = {
        "EPILOGUE": config.epilogue,
        "CONTIGUOUS": layout is Layout.CONTIGUOUS,
        "SWAP_AB": config.swap_ab,
        "GLU": config.swiglu,
        "WEIGHTS": config.weights.value,
        "GROUP_SIZE": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "BOX_M": config.box_m,
        "CTAS_PER_SM": config.ctas,
        "ARRIVALS": 1,
        "STORAGE_BYTES": config.storage_bytes,
    }
    named = tuple(
        (name, str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in defines.items()
    )
    source = Source(f"{layout.value}_{config.name}", "grouped_gemm.cu", "grouped_gemm", named)
    return Variant(source, config.threads, config.shared_bytes)


_FOUR_BITS = tiles.FOUR_BITS.values()
_PLAIN = (*tiles.CONFIGS, *(config for each in _FOUR_BITS for config in each.plain))
_ACTIVATED = (
    tiles.SWIGLU,
    tiles.SWIGLU_FEW,
    tiles.SWIGLU_FEW_TWICE,
    tiles.GLU,
    tiles.GLU_FEW,
    tiles.GLU_FEW_TWICE,
    *(config for each in _FOUR_BITS for config in (*each.swiglu, *each.other_glu)),
)
VARIANTS = {
    (layout, config): _variant(layout, config)
    for layout, config in dict.fromkeys(
        (
            *((layout, config) for layout in Layout for config in _PLAIN),
            *((Layout.CONTIGUOUS, config) for config in _ACTIVATED),
        )
    )
}
"""Variants by layout and tile."""


class Groups(NamedTuple):
    """The rows of each group, and what a launch may assume about them.

    extents       int32: offsets [G + 1] (contiguous) or counts [G] (masked)
    ready         extents were complete before the preceding launch began, so they are read without waiting
    tile_counter  int32 [2], zero, for this launch alone; None: the stream's own
    """

    extents: Tensor
    ready: bool = False
    tile_counter: Tensor | None = None


class _Prepared(NamedTuple):
    """The part of a launch that depends only on its sizes and plan."""

    launch: PackedLaunch
    packer: struct.Struct
    config: TileConfig
    masked: bool
    sizes: tuple[int, int, int]  # num_groups, n, k
    cut: tuple[int, bool]  # tile_steps, tall_first


def _arguments(activation: Activation, bias: Tensor | None, other: bool) -> tuple[Any, ...]:
    """The kernel's arguments for the activation; `other`: the kernel has all rules."""
    alpha, limit = activation.alpha, activation.limit
    if not other:
        return alpha, limit
    offset, after = 0.0, False
    if isinstance(activation, OtherGlu):
        offset, after = activation.up_offset, activation.clamp_after
    return alpha, limit, 0 if bias is None else bias.data_ptr(), offset, after


class GroupedGemm:
    """The GEMM of both layouts, and the GEMM with SwiGLU in its epilogue, on every device."""

    def __init__(self, kernels: Kernels, choose: Choose = plans.choose) -> None:
        self.tile_counters = TileCounters()
        self.packed_weights = PackedCache()
        self._kernels = kernels
        self._choose = choose
        self._tensor_maps = TensorMapCache(pack_rows)
        self._out_tensor_maps = TensorMapCache(functools.partial(pack_rows, l2_promotion=False))
        self._chosen = functools.lru_cache(_KEPT)(self._choose_and_prepare)
        self._planned = functools.lru_cache(_KEPT)(self._prepare)

    def multiply(
        self,
        on: OnStream,
        layout: Layout,
        a: Quantized,
        b: Weights,
        groups: Groups,
        out: Tensor,
        expected_m: float,
        num_sms: int | None,
        columns: range | None = None,
    ) -> None:
        """Write out, bf16: each group's rows of a times its b. A group is likely to have expected_m rows.

        columns: those to write, from a multiple of 256 to another one or to n; None: all.
        """
        (num_groups, n), k = b.data.shape[:2], columns_of(b)
        columns = columns or range(n)
        prepared = self._chosen(
            on.device,
            layout,
            n,
            k,
            num_groups,
            expected_m,
            num_sms,
            len(columns),
            format_of(b),
            group_size_of(b),
        )
        stores_boxes = not prepared.config.swap_ab
        out_map = self._out_tensor_maps.get(out, _STORE_BOX).packed if stores_boxes else _NO_MAP
        self._launch(on, prepared, a, b, groups, columns, out_map, out.data_ptr())

    def multiply_swiglu(
        self,
        on: OnStream,
        a: Quantized,
        b: Weights,
        groups: Groups,
        activation: Activation,
        expected_m: float,
        num_sms: int | None,
        bias: Tensor | None = None,
    ) -> Quantized:
        """Permuted rows [M, I], activated and quantized: a [M, K] times b [G, 2I, K], gate rows first.

        A group is likely to have expected_m rows. bias: bf16 [G, 2I], added before the activation; the
        preceding launch must not write it.
        """
        (num_groups, n2), k, m = b.data.shape[:2], columns_of(b), a.data.shape[0]
        n = n2 // 2
        other = bias is not None or isinstance(activation, OtherGlu)
        sms = multiprocessors(on.device, num_sms)
        weights = format_of(b), group_size_of(b)
        plan = plans.choose_swiglu(expected_m, sms, other, rates(on.device), *weights)
        prepared = self._planned(on.device, Layout.CONTIGUOUS, n, k, num_groups, plan, num_sms)
        data = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.data.device)
        scales = torch.empty((n // SCALE_BLOCK, m), dtype=torch.float32, device=a.data.device)
        output = data.data_ptr(), scales.data_ptr(), m, *_arguments(activation, bias, other)
        self._launch(on, prepared, a, b, groups, range(n), _NO_MAP, *output)
        return Quantized(data, scales.t())

    def _choose_and_prepare(
        self,
        device: int,
        layout: Layout,
        n: int,
        k: int,
        num_groups: int,
        expected_m: float,
        num_sms: int | None,
        columns: int,
        weights: WeightFormat,
        group_size: int,
    ) -> _Prepared:
        sms, part = multiprocessors(device, num_sms), columns < n
        plan = self._choose(
            layout, columns, k, num_groups, expected_m, sms, part, rates(device), weights, group_size
        )
        return self._prepare(device, layout, n, k, num_groups, plan, num_sms)

    def _prepare(
        self,
        device: int,
        layout: Layout,
        n: int,
        k: int,
        num_groups: int,
        plan: GemmPlan,
        num_sms: int | None,
    ) -> _Prepared:
        config, variant = plan.config, VARIANTS[layout, plan.config]
        clusters = multiprocessors(device, num_sms) // config.cluster * config.ctas
        grid = Grid(clusters, config.cluster, config.shared_bytes(num_groups))
        launch = self._kernels.packed_launch(device, variant, grid)
        self.tile_counters.prepare(device)
        whole_k = -(-k // SCALE_BLOCK) * SCALE_BLOCK  # TMA reads zeros past the last column
        return _Prepared(
            launch,
            parameters.PACKERS[config.epilogue],
            config,
            layout is Layout.MASKED,
            (num_groups, n, whole_k),
            (plan.tile_steps, plan.tall_first),
        )

    def _launch(
        self,
        on: OnStream,
        prepared: _Prepared,
        a: Quantized,
        b: Weights,
        groups: Groups,
        columns: range,
        out_map: bytes,
        *output: Any,
    ) -> None:
        launch, packer, config, masked, sizes, cut = prepared
        rows, *strides = a.data.shape[-2], *a.scales.stride()
        if not masked:
            strides = [0, *strides]
        counter = groups.tile_counter
        b_map, b_scales = self._operand(b, config)
        packed = packer.pack(
            self._tensor_maps.get(a.data, config.box_m).packed,
            b_map,
            out_map,
            a.scales.data_ptr(), *strides, b_scales,
            groups.extents.data_ptr(), *sizes, rows, rows if masked else 0, *cut, columns.start, len(columns),
            *output,
            groups.ready,
            self.tile_counters.get(on.device, on.handle) if counter is None else counter.data_ptr(),
        )  # fmt: skip
        launch(on.handle, packed)

    def _operand(self, b: Weights, config: TileConfig) -> tuple[bytes, int]:
        """The tensor map of b, or its address packed, and the address of its scales."""
        if isinstance(b, FourBits):
            packed = self.packed_weights.get(b, pairs=config.swiglu)
            address = packed.data.data_ptr().to_bytes(8, "little")
            return address.ljust(_MAP_BYTES, b"\0"), packed.scales.data_ptr()
        return self._tensor_maps.get(b.data, config.out_block_n).packed, b.scales.data_ptr()
