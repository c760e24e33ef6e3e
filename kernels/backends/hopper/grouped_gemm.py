"""Launches the grouped GEMM on Hopper: picks a variant, builds descriptors, keeps what does not change."""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.core import LaunchConfig, Stream, launch
from cuda.core._tensor_map import TensorMapL2Promotion  # cuda.core names it nowhere else
from torch import Tensor

from expertd.kernels import jit
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.launch import LoadedKernels, OnStream, describe_rows
from expertd.kernels.backends.hopper.tensor_maps import DescriptorCache, Rows
from expertd.kernels.backends.hopper.tile_counters import ClaimCounters
from expertd.kernels.ops.activation import Swiglu
from expertd.kernels.ops.quantize import Quantized
from expertd.layout import Layout

# Arguments of 32 bits are NumPy's numbers to cuda.core; the same few come again and again.
_int32 = functools.lru_cache(np.int32)
_uint32 = functools.lru_cache(np.uint32)
_float32 = functools.lru_cache(np.float32)

_STORE_BOX = 16  # rows of out that one TMA store writes
_LAUNCHES_KEPT = 4096


class _Launch(NamedTuple):
    """What stays the same from call to call of the same sizes."""

    kernel: Any
    grid: LaunchConfig
    masked: bool
    box_m: int
    box_n: int
    stores_boxes: bool
    sizes: tuple[np.int32, ...]  # num_groups, n, k
    cut: tuple[np.int32, ...]  # tile_steps, passes


class GroupedGemm:
    """Both layouts' GEMM, and the one with SwiGLU behind it, on the devices where they were used."""

    def __init__(self, kernels: LoadedKernels) -> None:
        self._kernels = kernels
        self._descriptors = DescriptorCache(describe_rows)
        self._out_descriptors = DescriptorCache(_describe_out)
        self._claims = ClaimCounters()
        self._launches: dict[tuple[object, ...], _Launch] = {}

    def load(self, device: int, source: jit.Source, binary: jit.Binary) -> None:
        """Bring a variant onto a device, with what its launches count by."""
        self._kernels.load(device, source, binary, tiles.SHARED_BYTES_LIMIT)
        self._claims.prepare(device)

    def multiply(
        self,
        on: OnStream,
        layout: Layout,
        a: Quantized,
        b: Quantized,
        extents: Tensor,
        out: Tensor,
        expected_rows: float,
        num_sms: int | None,
        *,
        claims: Tensor | None = None,
    ) -> None:
        """Write out; extents are offsets or counts.

        claims, int32 [2] of zeros, is what CTAs share out tiles by; it and extents are older
        than the launch before this one. None: the stream has a pair, and extents may be new.
        """
        device, handle, stream = on
        num_groups, n, k = b.data.shape
        launched = self._launch(device, layout is Layout.MASKED, n, k, num_groups, expected_rows, num_sms)
        maps = (self._out_descriptors.get(out, _STORE_BOX),) if launched.stores_boxes else ()
        older = claims is not None
        pair = self._claims.get(device, handle) if claims is None else claims.data_ptr()
        self._start(stream, launched, a, b, extents, maps, (out.data_ptr(),), older, pair)

    def swiglu(
        self,
        on: OnStream,
        a: Quantized,
        b: Quantized,
        offsets: Tensor,
        claims: Tensor,
        activation: Swiglu,
        num_sms: int | None,
    ) -> Quantized:
        """What is activated of a's sorted rows, quantized; offsets and claims as in `multiply`."""
        device, _, stream = on
        (num_groups, n2, k), m = b.data.shape, a.data.shape[0]
        n = n2 // 2
        launched = self._launch(device, False, n, k, num_groups, None, num_sms)
        data = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.data.device)
        scales = torch.empty((n // tiles.BLOCK_N, m), device=a.data.device)
        outputs = data.data_ptr(), scales.data_ptr(), _uint32(m), *map(_float32, activation)
        self._start(stream, launched, a, b, offsets, (), outputs, True, claims.data_ptr())
        return Quantized(data, scales.t())

    def _start(
        self,
        stream: Stream,
        launched: _Launch,
        a: Quantized,
        b: Quantized,
        extents: Tensor,
        out_maps: tuple[Any, ...],
        outputs: tuple[Any, ...],
        extents_are_older: bool,
        claims: int,
    ) -> None:
        rows, *strides = a.data.shape[-2], *a.scales.stride()
        launch(
            stream,
            launched.grid,
            launched.kernel,
            self._descriptors.get(a.data, launched.box_m),
            self._descriptors.get(b.data, launched.box_n),
            a.scales.data_ptr(),
            *map(_uint32, strides if launched.masked else (0, *strides)),
            b.scales.data_ptr(),
            extents.data_ptr(),
            *launched.sizes,
            _int32(rows),
            _int32(rows if launched.masked else 0),
            *launched.cut,
            _int32(extents_are_older),
            *outputs,
            *out_maps,
            claims,
        )

    def _launch(
        self,
        device: int,
        masked: bool,
        n: int,
        k: int,
        num_groups: int,
        expected_rows: float | None,
        num_sms: int | None,
    ) -> _Launch:
        """For SwiGLU behind the GEMM where no number of rows is expected."""
        choose = tiles.choose  # in the key, since one that was put in its place chooses otherwise
        key = (choose, device, masked, n, k, num_groups, expected_rows, num_sms)
        kept = self._launches.get(key)
        if kept is None:
            layout = Layout.MASKED if masked else Layout.CONTIGUOUS
            all_sms = torch.cuda.get_device_properties(device).multi_processor_count
            sms = min(num_sms or all_sms, all_sms)
            if expected_rows is None:
                plan = tiles.SWIGLU
            else:
                plan = choose(layout, n, k, num_groups, expected_rows, sms)
            config, source = plan.config, tiles.source(layout, plan.config)
            if not self._kernels.loaded(device, source):
                self.load(device, source, jit.build(source))
            grid = LaunchConfig(
                grid=sms // config.cluster,
                cluster=config.cluster if config.cluster > 1 else None,
                block=config.threads,
                shmem_size=config.shared_bytes(num_groups, plan.passes),
                programmatic_stream_serialization=True,
            )
            kept = _Launch(
                self._kernels.get(device, source),
                grid,
                masked,
                config.box_m,
                config.box_n,
                not config.swapped and not config.swiglu,
                (np.int32(num_groups), np.int32(n), np.int32(k)),
                (np.int32(plan.tile_steps), np.int32(plan.passes)),
            )
            if len(self._launches) >= _LAUNCHES_KEPT:
                self._launches.clear()
            self._launches[key] = kept
        return kept


def _describe_out(rows: Rows, box_rows: int) -> Any:
    """The TMA descriptor of out, rows of N elements, stored box_rows x 64 at a time."""
    return describe_rows(rows, box_rows, l2_promotion=TensorMapL2Promotion.NONE)
