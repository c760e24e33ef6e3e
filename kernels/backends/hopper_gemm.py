"""Launches the grouped GEMM on Hopper: picks a variant, builds descriptors, keeps what does not change."""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.core import LaunchConfig, launch
from cuda.core._tensor_map import TensorMapL2Promotion  # cuda.core names it nowhere else
from torch import Tensor

from kernels import jit, tiles
from kernels.activation import Swiglu
from kernels.backends.hopper_kernels import LoadedKernels, OnStream, describe_rows
from kernels.claims import ClaimCounters
from kernels.descriptors import DescriptorCache, Rows
from kernels.quantize import Quantized
from kernels.tiles import Layout

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
        extents_are_older: bool = False,
    ) -> None:
        """Write out; extents are offsets or counts, and older than the launch before this one or not.

        claims int32 [2], zeros and as old as extents, is what CTAs share out tiles by; None: the stream's.
        """
        device, handle, stream = on
        num_groups, n, k = b.data.shape
        masked = layout is Layout.MASKED
        launched = self._launch(device, layout, n, k, num_groups, expected_rows, num_sms)
        launch(
            stream,
            launched.grid,
            launched.kernel,
            self._descriptors.get(a.data, launched.box_m),
            self._descriptors.get(b.data, launched.box_n),
            *((self._out_descriptors.get(out, _STORE_BOX),) if launched.stores_boxes else ()),
            a.scales.data_ptr(),
            *map(_uint32, a.scales.stride() if masked else (0, *a.scales.stride())),
            b.scales.data_ptr(),
            extents.data_ptr(),
            out.data_ptr(),
            *launched.sizes,
            _int32(a.data.shape[-2]),
            _int32(a.data.shape[-2] if masked else 0),
            *launched.cut,
            _int32(extents_are_older),
            self._claims.get(device, handle) if claims is None else claims.data_ptr(),
        )

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
        """What is activated of a's sorted rows, quantised; what `multiply` calls older is older."""
        device, _, stream = on
        (num_groups, n2, k), m = b.data.shape, a.data.shape[0]
        n = n2 // 2
        launched = self._launch(device, Layout.CONTIGUOUS, n, k, num_groups, None, num_sms)
        data = torch.empty((m, n), dtype=torch.float8_e4m3fn, device=a.data.device)
        scales = torch.empty((n // tiles.BLOCK_N, m), device=a.data.device)
        launch(
            stream,
            launched.grid,
            launched.kernel,
            self._descriptors.get(a.data, launched.box_m),
            self._descriptors.get(b.data, launched.box_n),
            a.scales.data_ptr(),
            *map(_uint32, (0, *a.scales.stride())),
            b.scales.data_ptr(),
            offsets.data_ptr(),
            data.data_ptr(),
            scales.data_ptr(),
            _uint32(m),
            *map(_float32, activation),
            *launched.sizes,
            _int32(m),
            _int32(0),
            *launched.cut,
            _int32(1),
            claims.data_ptr(),
        )
        return Quantized(data, scales.t())

    def _launch(
        self,
        device: int,
        layout: Layout,
        n: int,
        k: int,
        num_groups: int,
        expected_rows: float | None,
        num_sms: int | None,
    ) -> _Launch:
        """For SwiGLU behind the GEMM where no number of rows is expected."""
        choose = tiles.choose  # in the key, since one that was put in its place chooses otherwise
        key = (choose, device, layout is Layout.MASKED, n, k, num_groups, expected_rows, num_sms)
        kept = self._launches.get(key)
        if kept is None:
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
