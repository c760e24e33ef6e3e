"""Files of /dev/shm as memory: which are accepted, and what happens when they shrink."""

import ctypes
import mmap
import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from expertd.service.memory import Mapped, RegionError, SystemMemory, Unregister
from expertd.service.memory.system import FOLDER, file_name
from tests.service.shm import shm_file

PAGE = mmap.PAGESIZE


class Device:
    """Records what is registered, and whether it still is."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, memory: Mapped) -> Unregister:
        assert memory.offset % PAGE == 0
        assert memory.offset + memory.num_bytes <= os.fstat(memory.descriptor).st_size
        self.registered[memory.address] = memory.num_bytes
        return lambda: self.registered.__delitem__(memory.address)


@pytest.mark.parametrize("slash", ["", "/"])
def test_bytes_are_copied_both_ways(slash: str) -> None:
    with shm_file() as file:
        file.write(b"abcdefgh", 100)
        memory = SystemMemory(f"{slash}{file.key}", 96, 64, None)
        got = bytearray(4)
        memory.read_into(6, memoryview(got))
        assert got == b"cdef"
        memory.write(8, memoryview(b"XY"))
        assert file.read(8, 100) == b"abcdXYgh"
        assert not memory.in_place
        assert not file.is_mapped(), "the CPU never maps it"
        memory.close()
        memory.close()


def test_a_device_gets_whole_pages_and_the_address_of_the_first_byte() -> None:
    device = Device()
    with shm_file() as file:
        file.write(b"abcdefgh", PAGE + 104)
        memory = SystemMemory(file.key, PAGE + 100, 64, device.register)
        ((address, num_bytes),) = device.registered.items()
        assert (address % PAGE, num_bytes) == (0, 164)
        span = memory.span(4, 8)
        assert (span.address, span.num_bytes, span.device, span.view) == (address + 104, 8, None, None)
        assert ctypes.string_at(span.address, 8) == b"abcdefgh"
        ctypes.memmove(span.address, b"ABCD", 4)
        assert file.read(8, PAGE + 104) == b"ABCDefgh"
        memory.close()
        assert device.registered == {}
        assert not file.is_mapped()
        assert file.times_open() == 0


def test_a_failed_registration_leaves_nothing_behind() -> None:
    def refuse(memory: Mapped) -> Unregister:
        raise RuntimeError("cudaHostRegister: expected 64 bytes to be registered, got 2")

    with shm_file() as file:
        with pytest.raises(
            RegionError, match="byte_size: expected memory that the device can access, got 64"
        ):
            SystemMemory(file.key, 0, 64, refuse)
        assert not file.is_mapped()
        assert file.times_open() == 0


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 4 * PAGE + 1), (4 * PAGE, 1), (2**62, 1), (1, 2**62)])
def test_a_region_past_the_end_is_refused(offset: int, num_bytes: int) -> None:
    with shm_file() as file:
        with pytest.raises(RegionError) as caught:
            SystemMemory(file.key, offset, num_bytes, None)
        assert file.times_open() == 0
    assert re.fullmatch(
        f"offset and byte_size: expected to lie within the {4 * PAGE} bytes of '{file.key}', "
        f"got {num_bytes} bytes at {offset}",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "key", ["", "/", ".", "..", "/..", "...", "a/b", "//a", "a\0b", "\ud800", "a" * 256, "a\n"]
)
def test_keys_that_name_no_file_of_the_folder_are_refused(key: str) -> None:
    with pytest.raises(RegionError, match=r"^key: expected the name of a file in /dev/shm, got '"):
        file_name(key)


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize("make", [link, Path.mkdir, os.mkfifo, unix_socket, lambda path: None])
def test_anything_but_a_regular_file_is_refused(make: Callable[[Path], object]) -> None:
    path = FOLDER / f"expertd-test-{secrets.token_hex(8)}"
    make(path)
    try:
        with pytest.raises(RegionError, match=r"^key: expected .*, got '"):
            SystemMemory(path.name, 0, 1, None)
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [0, 99, 163])
def test_a_file_that_shrank_is_an_error_and_is_never_extended(size: int) -> None:
    device = Device()
    with shm_file() as file:
        copied, mapped = (
            SystemMemory(file.key, 100, 64, None),
            SystemMemory(file.key, 100, 64, device.register),
        )
        os.ftruncate(file.fd, size)
        expected = f"^expected a file of at least 164 bytes, got one that was shrunk to {size}$"
        for use in (
            lambda: copied.read_into(0, memoryview(bytearray(64))),
            lambda: copied.write(0, memoryview(bytes(64))),
            lambda: mapped.span(0, 64),
        ):
            with pytest.raises(RegionError, match=expected):
                use()
        assert os.fstat(file.fd).st_size == size
        os.ftruncate(file.fd, 164)
        copied.write(0, memoryview(bytes(64)))
        for memory in (copied, mapped):
            assert not memory.is_unlinked()
            memory.close()


def test_the_part_that_a_shorter_file_still_has_can_be_used() -> None:
    with shm_file() as file:
        file.write(b"abcd")
        memory = SystemMemory(file.key, 0, 4 * PAGE, None)
        os.ftruncate(file.fd, 4)
        got = bytearray(4)
        memory.read_into(0, memoryview(got))
        assert got == b"abcd"
        memory.close()


def test_an_unlinked_file_is_noticed() -> None:
    with shm_file() as file:
        memory = SystemMemory(file.key, 0, 4, None)
        assert not memory.is_unlinked()
        file.unlink()
        assert memory.is_unlinked()
        memory.close()
