"""The Hopper backend: picks a variant, builds its TMA descriptors and launches it through cuda.core."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, TensorMapDescriptorOptions, launch
from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle  # cuda.core names them nowhere else
from cuda.core.utils import StridedMemoryView
from torch import Tensor

from kernels import jit, tiles
from kernels.backends.base import Backend, Progress
from kernels.backends.hopper_layer import LayerKernels
from kernels.claims import ClaimCounters
from kernels.descriptors import DescriptorCache, Rows
from kernels.quantize import Quantized
from kernels.tiles import Layout, TileConfig

# Arguments of 32 bits are NumPy's numbers to cuda.core; the same few come again and again.
_int32 = functools.lru_cache(np.int32)
_uint32 = functools.lru_cache(np.uint32)


_LAUNCHES_KEPT = 4096


class _Launch(NamedTuple):
    """What stays the same from call to call of the same sizes."""

    kernel: Any
    grid: LaunchConfig
    box_m: int
    stores_boxes: bool
    sizes: tuple[np.int32, ...]  # num_groups, n, k
    cut: tuple[np.int32, ...]  # tile_steps, passes


class HopperBackend(Backend):
    """Grouped FP8 GEMMs on a Hopper GPU; kernels are compiled by `warm_up`, else on first use."""

    name: ClassVar[str] = "hopper"
    device_type: ClassVar[str | None] = "cuda"

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, Layout, TileConfig], Any] = {}
        self._descriptors = DescriptorCache(_describe)
        self._out_descriptors = DescriptorCache(_describe_out)
        self._claims = ClaimCounters()
        self._layer = LayerKernels()
        self._streams: dict[tuple[int, int], Stream] = {}
        self._launches: dict[tuple[object, ...], _Launch] = {}

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every variant, in parallel, and load it on the current device."""
        device = torch.cuda.current_device()
        variants = {tiles.source(*variant): variant for variant in tiles.VARIANTS}
        for done, (source, binary) in enumerate(jit.build_all(list(variants)), start=1):
            self._load(device, *variants[source], binary)
            if progress is not None:
                progress(done, len(variants), source.name)

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        offsets: Tensor,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write out [M, N]; see `grouped_gemm_contiguous`."""
        m, num_groups = a.shape[0], b.shape[0]
        strides = (0, *a_scales.stride())
        expected_rows = m / num_groups
        self._run(
            Layout.CONTIGUOUS, a, a_scales, strides, b, b_scales, offsets, out, m, 0, expected_rows, num_sms
        )

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write the first counts[g] rows of each out[g]; see `grouped_gemm_masked`."""
        max_m = a.shape[1]
        strides = a_scales.stride()
        expected_rows = min(expected_m or max_m, max_m)
        self._run(
            Layout.MASKED,
            a,
            a_scales,
            strides,
            b,
            b_scales,
            counts,
            out,
            max_m,
            max_m,
            expected_rows,
            num_sms,
        )

    def _run(
        self,
        layout: Layout,
        a: Tensor,
        a_scales: Tensor,
        scale_strides: tuple[int, ...],
        b: Tensor,
        b_scales: Tensor,
        extents: Tensor,
        out: Tensor,
        limit: int,
        rows_per_group: int,
        expected_rows: float,
        num_sms: int | None,
    ) -> None:
        device = a.get_device()
        if device != torch.cuda.current_device():
            raise ValueError(
                f"a device: expected the current one, cuda:{torch.cuda.current_device()}, got {a.device}"
            )
        num_groups, n, k = b.shape
        launched = self._launch(tiles.choose, device, layout, n, k, num_groups, expected_rows, num_sms)
        stream = torch._C._cuda_getCurrentRawStream(device)  # what torch.cuda.current_stream makes objects of
        launch(
            self._stream(device, stream),
            launched.grid,
            launched.kernel,
            self._descriptors.get(a, launched.box_m),
            self._descriptors.get(b, tiles.BLOCK_N),
            *((self._out_descriptors.get(out, STORE_BOX),) if launched.stores_boxes else ()),
            a_scales.data_ptr(),
            *map(_uint32, scale_strides),
            b_scales.data_ptr(),
            extents.data_ptr(),
            out.data_ptr(),
            *launched.sizes,
            _int32(limit),
            _int32(rows_per_group),
            *launched.cut,
            self._claims.get(device, stream),
        )

    def experts(
        self,
        hidden_states: Tensor,
        group_ids: Tensor,
        weights: Tensor,
        gate_up: Quantized,
        down: Quantized,
        num_sms: int | None,
    ) -> Tensor:
        """The weighted sum of each token's experts, fp32 [T, H]; group_ids and weights [T, S]."""
        device = hidden_states.get_device()
        handle = torch._C._cuda_getCurrentRawStream(device)
        stream = self._stream(device, handle)
        num_groups = down.data.shape[0]
        rows, offsets = self._layer.sort(stream, group_ids, num_groups)
        a = self._layer.quantize(stream, hidden_states, rows)
        activated = self._swiglu(device, handle, a, gate_up, offsets, num_sms)
        out = torch.empty(
            (rows.numel(), hidden_states.shape[1]), dtype=torch.bfloat16, device=hidden_states.device
        )
        self.contiguous(*activated, *down, offsets, out, num_sms)
        return self._layer.combine(stream, out, rows, weights)

    def _swiglu(
        self, device: int, handle: int, a: Quantized, b: Quantized, offsets: Tensor, num_sms: int | None
    ) -> Quantized:
        """silu(gate) * up of a's rows, quantised."""
        (num_groups, n2, k), m = b.data.shape, a.data.shape[0]
        n = n2 // 2
        launched = self._launch(
            tiles.choose_swiglu, device, Layout.CONTIGUOUS, n, k, num_groups, m / num_groups, num_sms
        )
        data = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.data.device)
        scales = torch.empty((n // 128, m), device=a.data.device)
        launch(
            self._stream(device, handle),
            launched.grid,
            launched.kernel,
            self._descriptors.get(a.data, launched.box_m),
            self._descriptors.get(b.data, 64),
            a.scales.data_ptr(),
            *map(_uint32, (0, *a.scales.stride())),
            b.scales.data_ptr(),
            offsets.data_ptr(),
            data.data_ptr(),
            scales.data_ptr(),
            _uint32(m),
            np.float32(1.0),
            np.float32(np.inf),
            *launched.sizes,
            _int32(m),
            _int32(0),
            *launched.cut,
            self._claims.get(device, handle),
        )
        return Quantized(data, scales.t())

    def _launch(
        self,
        choose: Callable[..., tiles.Plan],
        device: int,
        layout: Layout,
        n: int,
        k: int,
        num_groups: int,
        expected_rows: float,
        num_sms: int | None,
    ) -> _Launch:
        """What a call's sizes settle, kept."""
        key = (choose, device, layout is Layout.MASKED, n, k, num_groups, expected_rows, num_sms)
        kept = self._launches.get(key)
        if kept is None:
            all_sms = torch.cuda.get_device_properties(device).multi_processor_count
            sms = min(num_sms or all_sms, all_sms)
            plan = choose(layout, n, k, num_groups, expected_rows, sms)
            config = plan.config
            grid = LaunchConfig(
                grid=sms // config.cluster,
                cluster=config.cluster if config.cluster > 1 else None,
                block=config.threads,
                shmem_size=config.shared_bytes(num_groups, plan.passes),
            )
            sizes = (np.int32(num_groups), np.int32(n), np.int32(k))
            cut = (np.int32(plan.tile_steps), np.int32(plan.passes))
            kernel = self._kernel(device, layout, config)
            kept = _Launch(kernel, grid, config.box_m, not config.swapped, sizes, cut)
            if len(self._launches) >= _LAUNCHES_KEPT:
                self._launches.clear()
            self._launches[key] = kept
        return kept

    def _stream(self, device: int, handle: int) -> Stream:
        """cuda.core's stream of a handle; kept, for from_handle defines a class each time."""
        stream = self._streams.get((device, handle))
        if stream is None:
            stream = self._streams[device, handle] = Stream.from_handle(handle)
        return stream

    def _kernel(self, device: int, layout: Layout, config: TileConfig) -> Any:
        kernel = self._kernels.get((device, layout, config))
        if kernel is None:
            kernel = self._load(device, layout, config, jit.build(tiles.source(layout, config)))
        return kernel

    def _load(self, device: int, layout: Layout, config: TileConfig, binary: jit.Binary) -> Any:
        Device(device).set_current()  # the context that torch uses too
        kernel = ObjectCode.from_cubin(binary.cubin).get_kernel(tiles.source(layout, config).entry)
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            tiles.SHARED_BYTES_LIMIT,
            kernel.handle,
            device,
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"expected {tiles.SHARED_BYTES_LIMIT} bytes of shared memory, got {status.name}"
            )
        self._kernels[device, layout, config] = kernel
        self._claims.prepare(device)
        return kernel


STORE_BOX = 16  # rows of out that one TMA store writes


def _describe_out(rows: Rows, box_rows: int) -> Any:
    """The TMA descriptor of out, rows of N elements, stored box_rows x 64 at a time."""
    view = StridedMemoryView.from_cuda_array_interface(rows, stream_ptr=-1)
    return view.as_tensor_map(options=_options(box_rows, 64, TensorMapL2Promotion.NONE))


def _describe(rows: Rows, box_rows: int) -> Any:
    """The TMA descriptor of rows of K bytes, loaded box_rows x 128 at a time."""
    view = StridedMemoryView.from_cuda_array_interface(rows, stream_ptr=-1)
    return view.as_tensor_map(options=_options(box_rows, tiles.BLOCK_K, TensorMapL2Promotion.L2_256B))


@functools.cache
def _options(rows: int, columns: int, l2_promotion: TensorMapL2Promotion) -> TensorMapDescriptorOptions:
    return TensorMapDescriptorOptions(
        (rows, columns), swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=l2_promotion
    )
