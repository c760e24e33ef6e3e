"""Copies between any memory that the GPU can reach, by address."""

import torch


class Copies:
    """Copies to enqueue together; those that continue the one before become one."""

    def __init__(self) -> None:
        self._copies: list[list[int]] = []  # destination, source, bytes
        self._last_owner: object = None

    def add(self, to: int, source: int, num_bytes: int, owner: object) -> None:
        """Copy `num_bytes` from address `source`, of a GPU or of pinned memory, to address `to`.

        owner  the same object for copies whose destinations are in one allocation, and whose sources are
               in one. Only these become one, for CUDA refuses a copy across two. None: stays alone
        """
        if to == source or num_bytes == 0:
            return
        if self._copies and owner is not None and owner is self._last_owner:
            last_to, last_source, last_bytes = self._copies[-1]
            if last_to + last_bytes == to and last_source + last_bytes == source:
                self._copies[-1][2] += num_bytes
                return
        self._copies.append([to, source, num_bytes])
        self._last_owner = owner

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Start all copies on `stream`."""
        from cuda.bindings import driver  # a CPU has neither

        for to, source, num_bytes in self._copies:
            (status,) = driver.cuMemcpyAsync(to, source, num_bytes, stream.cuda_stream)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(
                    f"cuMemcpyAsync: expected {num_bytes} bytes to be copied, got {status.name}"
                )

    def __len__(self) -> int:
        return len(self._copies)
