"""Regions by name: bounds, uses, and what a request may do with them."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expertd.service.memory import (
    Arena,
    DeviceMemory,
    NoBlockError,
    Region,
    RegionError,
    Regions,
    RegionSlice,
    RegionUses,
    Span,
    SystemMemory,
    host_view,
    nothing_to_register,
)
from tests.service.shm import ShmFile, shm_file

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE


def add(regions: Regions, name: str, memory: SystemMemory | DeviceMemory, num_bytes: int = SIZE) -> Region:
    kind = "system" if isinstance(memory, SystemMemory) else "cuda"
    regions.reserve(name, num_bytes)
    region = Region(name, kind, num_bytes, memory, {})  # type: ignore[arg-type]
    regions.add(region)
    return region


def gpu_memory(address: int = 1 << 20, device: int = 0) -> DeviceMemory:
    return DeviceMemory(Span(address, SIZE, device), lambda: None)


@contextmanager
def two_files(in_place: bool) -> Iterator[tuple[Regions, ShmFile]]:
    """Regions "a" and "b", the halves of one file, and "gpu"."""
    regions = Regions(8, 8 * SIZE)
    register = nothing_to_register if in_place else None
    with shm_file(2 * SIZE) as file:
        memories = [SystemMemory(file.key, offset, SIZE, register) for offset in (0, SIZE)]
        for name, memory in zip("ab", memories, strict=True):
            add(regions, name, memory)
        add(regions, "gpu", gpu_memory())
        yield regions, file
        for memory in memories:
            memory.close()


def uses_of(regions: Regions, arena_bytes: int = SIZE) -> RegionUses:
    return RegionUses(regions, Arena(arena_bytes).take)


def test_a_name_is_taken_from_its_reservation_until_its_region_is_removed() -> None:
    regions = Regions(8, 8 * SIZE)
    regions.reserve("a", 1)
    with pytest.raises(RegionError, match=r"^name: expected one that is not registered yet, got 'a'$"):
        regions.reserve("a", 1)
    with pytest.raises(RegionError, match=r"^expected a registered region, got 'a'$"):
        regions.use("a")
    regions.forget("a")
    region = add(regions, "a", gpu_memory())
    with pytest.raises(RegionError, match="not registered yet"):
        regions.reserve("a", 1)
    regions.remove(region, lambda: None)
    regions.reserve("a", 1)


def test_regions_count_until_they_are_forgotten() -> None:
    regions = Regions(2, 2 * SIZE)
    first, second = add(regions, "a", gpu_memory()), add(regions, "b", gpu_memory())
    assert regions.totals("cuda") == (2, 2 * SIZE)
    assert regions.totals("system") == (0, 0)
    regions.remove(first, lambda: None)
    expected = r"^region: expected at most shared_memory\.max_regions \(2\) regions, got one more$"
    with pytest.raises(RegionError, match=expected):
        regions.reserve("c", 1)
    regions.forget(first)
    with pytest.raises(RegionError, match=rf"max_bytes \({2 * SIZE}\) in all regions, got {2 * SIZE + 1}$"):
        regions.reserve("c", SIZE + 1)
    regions.reserve("c", SIZE)
    assert regions.of_kind("cuda") == [second]


def test_a_region_is_idle_when_its_last_use_ends() -> None:
    regions = Regions(8, 8 * SIZE)
    region = add(regions, "a", gpu_memory())
    idle: list[str] = []
    assert regions.use("a") is regions.use("a") is region
    regions.remove(region, lambda: idle.append("now"))
    regions.release(region)
    assert idle == []
    with pytest.raises(RegionError):
        regions.use("a")
    regions.release(region)
    assert idle == ["now"]


def test_a_region_is_abandoned_when_unused_for_a_time_or_its_file_is_unlinked() -> None:
    with two_files(in_place=False) as (regions, file):
        region = regions.use("a")
        file.unlink()
        assert not region.is_abandoned(0), "a request uses it"
        regions.release(region)
        assert region.is_abandoned(3600)
        gpu = regions.use("gpu")
        assert not gpu.is_abandoned(0)
        regions.release(gpu)
        assert not gpu.is_abandoned(3600)
        gpu.last_used -= 3601
        assert gpu.is_abandoned(3600)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_bytes", [16, SIZE - 16])
def test_inputs_are_read_in_place_or_copied(in_place: bool, num_bytes: int) -> None:
    with two_files(in_place) as (regions, file):
        content = bytes(range(256)) * (SIZE // 256)
        file.write(content)
        uses = uses_of(regions)
        hidden = uses.input(RegionSlice("x", "a", 16, num_bytes), 16, copied=False)
        routing = uses.input(RegionSlice("y", "a", 4, 8), 4, copied=True)
        gpu = uses.input(RegionSlice("z", "gpu", 32, 16), 16, copied=True)
        uses.load()
        assert isinstance(hidden, Span) is in_place
        if not in_place:
            assert host_view(hidden) == content[16 : 16 + num_bytes]
        file.write(bytes(SIZE))
        assert host_view(routing) == content[4:12], "a private copy"
        assert gpu == Span((1 << 20) + 32, 16, 0)
        assert uses.load_bytes == 8 + (0 if in_place else num_bytes)
        uses.release()


@pytest.mark.parametrize(("in_place", "later"), [(False, False), (True, True), (True, False)])
def test_the_output_is_stored_where_the_device_did_not_write_it(in_place: bool, later: bool) -> None:
    with two_files(in_place) as (regions, file):
        uses = uses_of(regions)
        span = uses.output(RegionSlice("out", "b", 32, 64), 16, 48, later=later)
        if in_place and not later:
            assert span is not None
            assert (span.num_bytes, uses.store_bytes) == (48, 0)
            uses.store(span)
        else:
            assert (span, uses.store_bytes) == (None, 48)
            uses.store(b"x" * 48)
            assert file.read(66, SIZE + 31) == b"\0" + b"x" * 48 + bytes(17)
        uses.release()


def test_an_output_is_stored_in_a_gpus_memory_if_this_process_can_write_to_it() -> None:
    written: list[tuple[int, bytes]] = []
    memory = DeviceMemory(
        Span(1 << 30, SIZE, 0),
        lambda: None,
        write=lambda offset, data: written.append((offset, bytes(data))),
    )
    with two_files(in_place=True) as (regions, _):
        add(regions, "writable", memory)
        uses = uses_of(regions)
        place = RegionSlice("out", "writable", 32, 64)
        assert uses.output(place, 16, 48) == Span((1 << 30) + 32, 48, 0)
        assert uses.output(place, 16, 48, later=True) is None
        uses.store(memoryview(b"x" * 48))
        assert written == [(32, b"x" * 48)]
        other = RegionSlice("out", "gpu", 32, 64)
        assert uses_of(regions).output(other, 16, 48, later=True) == Span((1 << 20) + 32, 48, 0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (RegionSlice("x", "c", 0, 16), "expected a registered region, got 'c'"),
        (
            RegionSlice("x", "a", SIZE - 16, 32),
            f"expected to lie within the {SIZE} bytes of region 'a', got 32 bytes at {SIZE - 16}",
        ),
        (
            RegionSlice("x", "a", 2**62, 16),
            f"expected to lie within the {SIZE} bytes of region 'a', got 16 bytes at {2**62}",
        ),
        (RegionSlice("x", "a", 8, 16), "expected to begin at a multiple of 16 bytes, got 8"),
        (RegionSlice("x", "gpu", 24, 16), "expected to begin at a multiple of 16 bytes, got 24"),
    ],
)
def test_a_wrong_place_is_refused(in_place: bool, place: RegionSlice, expected: str) -> None:
    with two_files(in_place) as (regions, _):
        uses = uses_of(regions)
        with pytest.raises(RegionError) as caught:
            uses.input(place, 16, copied=False)
        assert str(caught.value) == expected
        with pytest.raises(RegionError) as caught:
            uses.output(place, 16, 16)
        assert str(caught.value) == expected
        uses.release()
        assert all(region.uses == 0 for region in regions.of_kind("system"))


def test_the_output_must_fit_and_stay_apart_from_the_inputs() -> None:
    with two_files(in_place=True) as (regions, file), shm_file(SIZE) as other:
        memory = SystemMemory(other.key, 0, SIZE, None)
        add(regions, "other", memory)
        uses = uses_of(regions)
        with pytest.raises(RegionError, match=r"^expected shared_memory_byte_size of at least 65, got 64$"):
            uses.output(RegionSlice("out", "a", 0, 64), 16, 65)
        uses.input(RegionSlice("input x", "b", 0, 64), 16, copied=False)
        uses.input(RegionSlice("input y", "gpu", 64, 64), 16, copied=False)
        overlap = "^expected memory apart from the inputs, got an overlap with input "
        for place in (
            RegionSlice("", "b", 48, 16),
            RegionSlice("", "gpu", 112, 16),
            RegionSlice("", "gpu", 48, 32),
        ):
            with pytest.raises(RegionError, match=overlap):
                uses.output(place, 16, place.num_bytes)
        # "b" begins in the file where "a" ends: a longer region over both would reach it.
        whole = SystemMemory(file.key, 0, 2 * SIZE, nothing_to_register)
        add(regions, "whole", whole, 2 * SIZE)
        with pytest.raises(RegionError, match=overlap):
            uses.output(RegionSlice("", "whole", SIZE + 48, 16), 16, 16)
        # Ranks may open the same memory at several addresses.
        for number, name in enumerate(("one", "again")):
            add(regions, name, DeviceMemory(Span(number << 40, SIZE, 0), lambda: None, b"a handle"))
        uses.input(RegionSlice("input z", "one", 0, 64), 16, copied=False)
        with pytest.raises(RegionError, match=overlap):
            uses.output(RegionSlice("", "again", 48, 16), 16, 16)
        uses.output(RegionSlice("", "again", 64, 16), 16, 16)
        for place in (
            RegionSlice("", "b", 64, 16),
            RegionSlice("", "gpu", 48, 16),
            RegionSlice("", "other", 0, 64),
        ):
            uses.output(place, 16, place.num_bytes)
        uses.release()
        whole.close()
        memory.close()


def test_a_copy_without_room_in_the_arena_is_refused() -> None:
    with two_files(in_place=False) as (regions, _):
        arena = Arena(SIZE)
        first, second = RegionUses(regions, arena.take), RegionUses(regions, arena.take)
        first.input(RegionSlice("x", "a", 0, SIZE), 16, copied=False)
        with pytest.raises(NoBlockError):
            second.input(RegionSlice("x", "a", 0, SIZE), 16, copied=False)
        second.release()
        assert arena.used_bytes == SIZE
        first.release()
        assert arena.used_bytes == 0
