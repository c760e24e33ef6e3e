"""Launches csrc/grouped_gemm.cu as planned, with tensor maps and a tile counter."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper import plans, tiles
from expertd.kernels.backends.hopper.launch import Kernels, OnStream, cuda_core, multiprocessors
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.hopper.rates import Rates, rates
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache, describe_rows
from expertd.kernels.backends.hopper.tile_counters import TileCounters
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.kernels.jit import Source, Variant
from expertd.kernels.ops.activation import Activation, OtherGlu
from expertd.kernels.ops.quantize import Quantized
from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK

# cuda.core takes 32-bit arguments as NumPy scalars; the same few values recur.
_int32 = functools.lru_cache(np.int32)
_uint32 = functools.lru_cache(np.uint32)
_float32 = functools.lru_cache(np.float32)

_STORE_BOX = 16  # rows of out per TMA store
_KEPT = 4096

Choose = Callable[[Layout, int, int, int, float, int, bool, Rates], GemmPlan]
"""`plans.choose`, or another function with its signature."""


def _variant(layout: Layout, config: TileConfig) -> Variant:
    defines = {
        "MASKED": int(layout is Layout.MASKED),
        "SWAP_AB": int(config.swap_ab),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "BOX_M": config.box_m,
        "SWIGLU": int(config.swiglu),
        "OTHER_GLU": int(config.other_glu),
        "CTAS_PER_SM": config.ctas,
        "STORAGE_BYTES": config.storage_bytes,
    }
    named = tuple((name, str(value)) for name, value in defines.items())
    source = Source(f"{layout.value}_{config.name}", "grouped_gemm.cu", "grouped_gemm", named)
    return Variant(source, config.threads, config.shared_bytes)


VARIANTS = {
    (layout, config): _variant(layout, config)
    for layout, config in (
        *((layout, config) for layout in Layout for config in tiles.CONFIGS),
        *(
            (Layout.CONTIGUOUS, config)
            for config in (
                tiles.SWIGLU,
                tiles.SWIGLU_FEW,
                tiles.SWIGLU_FEW_TWICE,
                tiles.GLU,
                tiles.GLU_FEW,
                tiles.GLU_FEW_TWICE,
            )
        ),
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

    kernel: Any
    launch_config: Any
    box_m: int
    box_n: int
    stores_boxes: bool  # of out, through a tensor map
    masked: bool
    sizes: tuple[np.int32, ...]  # num_groups, n, k
    cut: tuple[np.int32, ...]  # tile_steps, tall_first


def _rule(activation: Activation, bias: Tensor | None, other: bool) -> tuple[Any, ...]:
    """The kernel's arguments for the activation; `other`: the kernel has all rules, see GluRule."""
    of_every = _float32(activation.alpha), _float32(activation.limit)
    if not other:
        return of_every
    offset, after = 0.0, False
    if isinstance(activation, OtherGlu):
        offset, after = activation.up_offset, activation.clamp_after
    return *of_every, 0 if bias is None else bias.data_ptr(), _float32(offset), _int32(after)


class GroupedGemm:
    """The GEMM of both layouts, and the GEMM with SwiGLU in its epilogue, on every device."""

    def __init__(self, kernels: Kernels, choose: Choose = plans.choose) -> None:
        self.tile_counters = TileCounters()
        self._kernels = kernels
        self._choose = choose
        self._tensor_maps = TensorMapCache(describe_rows)
        self._out_tensor_maps = TensorMapCache(functools.partial(describe_rows, l2_promotion=False))
        self._chosen = functools.lru_cache(_KEPT)(self._choose_and_prepare)
        self._planned = functools.lru_cache(_KEPT)(self._prepare)

    def multiply(
        self,
        on: OnStream,
        layout: Layout,
        a: Quantized,
        b: Quantized,
        groups: Groups,
        out: Tensor,
        expected_m: float,
        num_sms: int | None,
        columns: range | None = None,
    ) -> None:
        """Write out, bf16: each group's rows of a times its b. A group is likely to have expected_m rows.

        columns: those to write, from a multiple of 256 to another one or to n; None: all.
        """
        num_groups, n, k = b.data.shape
        columns = columns or range(n)
        prepared = self._chosen(on.device, layout, n, k, num_groups, expected_m, num_sms, len(columns))
        out_map = (self._out_tensor_maps.get(out, _STORE_BOX),) if prepared.stores_boxes else ()
        self._launch(on, prepared, a, b, groups, columns, out.data_ptr(), *out_map)

    def multiply_swiglu(
        self,
        on: OnStream,
        a: Quantized,
        b: Quantized,
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
        (num_groups, n2, k), m = b.data.shape, a.data.shape[0]
        n = n2 // 2
        other = bias is not None or isinstance(activation, OtherGlu)
        sms = multiprocessors(on.device, num_sms)
        plan = plans.choose_swiglu(expected_m, sms, other, rates(on.device))
        prepared = self._planned(on.device, Layout.CONTIGUOUS, n, k, num_groups, plan, num_sms)
        data = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.data.device)
        scales = torch.empty((n // SCALE_BLOCK, m), dtype=torch.float32, device=a.data.device)
        self._launch(
            on, prepared, a, b, groups, range(n),
            data.data_ptr(), scales.data_ptr(), _uint32(m), *_rule(activation, bias, other),
        )  # fmt: skip
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
    ) -> _Prepared:
        sms = multiprocessors(device, num_sms)
        plan = self._choose(layout, columns, k, num_groups, expected_m, sms, columns < n, rates(device))
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
        kernel = self._kernels.get(device, variant)
        self.tile_counters.prepare(device)
        launch_config = cuda_core().LaunchConfig(
            grid=multiprocessors(device, num_sms) // config.cluster * config.ctas,
            cluster=config.cluster if config.cluster > 1 else None,
            block=variant.threads,
            shmem_size=config.shared_bytes(num_groups),
            programmatic_stream_serialization=True,
        )
        whole_k = -(-k // SCALE_BLOCK) * SCALE_BLOCK  # TMA reads zeros past the last column
        sizes = (np.int32(num_groups), np.int32(n), np.int32(whole_k))
        cut = (np.int32(plan.tile_steps), np.int32(plan.tall_first))
        stores_boxes, masked = not config.swap_ab and not config.swiglu, layout is Layout.MASKED
        return _Prepared(
            kernel, launch_config, config.box_m, config.out_block_n, stores_boxes, masked, sizes, cut
        )

    def _launch(
        self,
        on: OnStream,
        prepared: _Prepared,
        a: Quantized,
        b: Quantized,
        groups: Groups,
        columns: range,
        *outputs: Any,
    ) -> None:
        kernel, launch_config, box_m, box_n, _, masked, sizes, cut = prepared
        rows, *strides = a.data.shape[-2], *a.scales.stride()
        counter = groups.tile_counter
        cuda_core().launch(
            on.stream,
            launch_config,
            kernel,
            self._tensor_maps.get(a.data, box_m),
            self._tensor_maps.get(b.data, box_n),
            a.scales.data_ptr(),
            *map(_uint32, strides if masked else (0, *strides)),
            b.scales.data_ptr(),
            groups.extents.data_ptr(),
            *sizes,
            _int32(rows),
            _int32(rows if masked else 0),
            *cut,
            _int32(columns.start),
            _int32(len(columns)),
            _int32(groups.ready),
            *outputs,
            self.tile_counters.get(on.device, on.handle) if counter is None else counter.data_ptr(),
        )
