"""The kernel, compiled for this CPU, and its launches on torch's threads."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertd.kernels.backends.cpu.instructions import Instructions, instructions_of
from expertd.kernels.backends.cpu.kernel import JOB, PIECE, SCRATCH_BYTES, module_for

_PIECE = struct.Struct(f"<{len(PIECE)}q")
_JOB = struct.Struct(f"<{len(JOB)}q")
_ALIGNMENT = 64


class Piece(NamedTuple):
    """Rows of one group. Addresses: of its weights, scales, and bias (0: none); see `kernel.PIECE`."""

    weights: int
    scales: int
    bias: int
    first_row: int
    num_rows: int


class Program:
    """The compiled kernel.

    has  the instructions that it uses, which this CPU must have; None: all that it has

    Raises ImportError without llvmlite, OSError without torch's OpenMP.
    """

    def __init__(self, has: Instructions | None = None) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        self.has = instructions_here() if has is None else has
        self._openmp = openmp()
        thread_num = ctypes.cast(self._openmp.omp_get_thread_num, ctypes.c_void_p)
        llvm.add_symbol("omp_get_thread_num", thread_num.value)
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(llvm.get_host_cpu_name(), features.flatten(), opt=3)
        module = llvm.parse_assembly(str(module_for(self.has)))
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        self._multiply = ctypes.c_void_p(self._engine.get_function_address("multiply"))
        self._own = threading.local()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return torch.bfloat16 if self.has.has_bf16 else torch.float32

    def launch(self, rows: Tensor, k: int, out: Tensor, pieces: Sequence[Piece]) -> None:
        """Multiply pieces of rows by their groups' weights [N, K], transposed.

        rows  `dtype` [R, K], then zeros up to a multiple of BLOCK; PADDING_ROWS behind them may be read
        k     K, a multiple of 16
        out   bf16 [R, N]
        """
        num_threads = torch.get_num_threads()
        packed = ctypes.create_string_buffer(b"".join(_PIECE.pack(*piece) for piece in pieces))
        counter = ctypes.c_int64(0)
        job = _JOB.pack(
            rows.data_ptr(), rows.stride(0) * rows.element_size(), out.data_ptr(), out.stride(0) * 2,
            out.shape[1], k, ctypes.addressof(packed), len(pieces),
            ctypes.addressof(counter), self._scratch(num_threads),
        )  # fmt: skip
        self._openmp.GOMP_parallel(self._multiply, job, num_threads, 0)

    def _scratch(self, num_threads: int) -> int:
        """The address of as much as a launch needs; each thread that launches has its own."""
        need = num_threads * SCRATCH_BYTES + _ALIGNMENT
        scratch = getattr(self._own, "scratch", None)
        if scratch is None or scratch.numel() < need:
            scratch = self._own.scratch = torch.empty(need, dtype=torch.uint8, device="cpu")
        return -(-int(scratch.data_ptr()) // _ALIGNMENT) * _ALIGNMENT


@cache
def program() -> Program:
    """This process's."""
    return Program()


@cache
def instructions_here() -> Instructions:
    """What this CPU has. Raises ImportError without llvmlite."""
    import llvmlite.binding as llvm

    return instructions_of(llvm.get_host_cpu_features())


def openmp() -> Any:
    """The OpenMP library that torch has loaded, so that its threads are the kernel's, too.

    Raises OSError if it is not found.
    """
    own = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    library = ctypes.CDLL(str(own) if own.exists() else own.name)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library
