"""Blocks of the arena: distinct, reused, merged when freed, and bounded."""

import mmap
import os
import random

import pytest

from expertd.service.memory import Arena, Block, Mapped, Span, Unregister, host_view

GRAIN = 64 * 1024


@pytest.mark.parametrize("gives_back", [False, True])
def test_blocks_do_not_overlap_and_keep_their_bytes(gives_back: bool) -> None:
    arena = Arena(64 * GRAIN)
    random.seed(0)
    blocks: list[tuple[Block, bytes]] = []
    freed = 0
    for step in range(400):
        if gives_back:
            if step % 7 == 0:
                arena.begin_period()
            freed += arena.give_back(random.randrange(1, 16) * GRAIN)
        if blocks and random.random() < 0.5:
            block, written = blocks.pop(random.randrange(len(blocks)))
            assert block.view == written
            block.release()
        elif (taken := arena.take(size := random.randrange(1, 8 * GRAIN))) is not None:
            content = random.randbytes(size)
            taken.view[:] = content
            blocks.append((taken, content))
    for block, written in blocks:
        assert block.view == written
        block.release()
    assert arena.used_bytes == 0
    assert (freed > 0) is gives_back
    assert arena.take(64 * GRAIN) is not None, "freed neighbors are merged"


def test_a_full_arena_gives_nothing_until_a_block_is_released() -> None:
    arena = Arena(2 * GRAIN)
    first, second = arena.take(GRAIN), arena.take(1)
    assert first is not None
    assert second is not None
    assert arena.take(1) is None
    first.release()
    first.release()
    assert arena.used_bytes == GRAIN
    assert arena.take(GRAIN + 1) is None
    assert arena.take(GRAIN) is not None


def test_a_block_is_extended_into_the_free_memory_behind_it() -> None:
    arena = Arena(8 * GRAIN)
    first = arena.take(100)
    assert first is not None
    first.view[:] = bytes(range(100))
    assert first.extend(GRAIN)
    assert arena.used_bytes == GRAIN, "it fits where it is"
    assert first.extend(3 * GRAIN + 1)
    assert len(first.view) == 3 * GRAIN + 1
    assert bytes(first.view[:100]) == bytes(range(100))
    assert arena.used_bytes == 4 * GRAIN
    behind = arena.take(2 * GRAIN)
    assert behind is not None
    assert behind.span.address == first.span.address + 4 * GRAIN
    assert not first.extend(4 * GRAIN + 1), "the memory behind it is in use"
    assert not behind.extend(4 * GRAIN + 1), "it would be larger than the arena"
    assert behind.extend(4 * GRAIN)
    first.release()
    behind.release()
    assert arena.used_bytes == 0
    assert arena.take(8 * GRAIN) is not None


def test_the_memory_is_registered_once_and_can_be_mapped_elsewhere() -> None:
    calls: list[tuple[int, int]] = []

    def register(memory: Mapped) -> Unregister:
        assert os.fstat(memory.descriptor).st_size == memory.num_bytes
        calls.append((memory.address, memory.num_bytes))
        return lambda: calls.append((0, 0))

    arena = Arena(3 * GRAIN, register)
    block = arena.take(10)
    assert block is not None
    address, num_bytes = calls[0]
    assert num_bytes == 3 * GRAIN
    assert address <= block.span.address < address + num_bytes
    block.view[:] = b"0123456789"
    with mmap.mmap(arena.fd, arena.num_bytes) as elsewhere:
        offset = block.span.address - address
        assert elsewhere[offset : offset + 10] == b"0123456789"
    arena.close()
    assert calls[1:] == [(0, 0)]


def test_parts_of_a_span_lie_inside_it() -> None:
    content = memoryview(bytearray(b"0123456789"))
    span = Span(1000, 10, None, content)
    part = span.part(2, 3)
    assert (part.address, part.num_bytes) == (1002, 3)
    assert bytes(host_view(part)) == b"234"
    for offset, size in ((-1, 2), (8, 3), (11, 0), (0, -1)):
        with pytest.raises(ValueError, match="span: expected a part of 10 bytes"):
            span.part(offset, size)


def held_bytes(arena: Arena) -> int:
    """Bytes of the arena for which there are pages."""
    return os.fstat(arena.fd).st_blocks * 512


def taken(arena: Arena, num_bytes: int) -> Block:
    """A block with something in each page."""
    block = arena.take(num_bytes)
    assert block is not None
    block.view[:] = b"\x01" * num_bytes
    return block


def test_memory_that_a_period_did_not_need_is_given_back() -> None:
    arena = Arena(64 * GRAIN)
    kept, large = taken(arena, 2 * GRAIN), taken(arena, 30 * GRAIN)
    large.release()
    assert arena.give_back(64 * GRAIN) == 0, "no period has ended"
    arena.begin_period()
    assert arena.give_back(64 * GRAIN) == 0, "the period before needed it"
    arena.begin_period()
    assert [arena.give_back(20 * GRAIN) for _ in range(3)] == [20 * GRAIN, 10 * GRAIN, 0]
    assert held_bytes(arena) == 2 * GRAIN
    assert kept.view == b"\x01" * (2 * GRAIN)
    kept.release()
    arena.begin_period()
    arena.begin_period()
    assert arena.give_back(64 * GRAIN) == 2 * GRAIN
    assert held_bytes(arena) == 0
    assert bytes(taken(arena, GRAIN).view[:2]) == b"\x01\x01", "it can be used again"


def test_memory_that_is_taken_again_is_not_given_back() -> None:
    arena = Arena(64 * GRAIN)
    taken(arena, 30 * GRAIN).release()
    arena.begin_period()
    arena.begin_period()
    again = taken(arena, 10 * GRAIN)
    assert arena.give_back(64 * GRAIN) == 20 * GRAIN
    assert again.view == b"\x01" * (10 * GRAIN)


def test_registered_memory_is_never_given_back() -> None:
    arena = Arena(8 * GRAIN, register=lambda memory: lambda: None)
    taken(arena, 8 * GRAIN).release()
    arena.begin_period()
    arena.begin_period()
    assert arena.give_back(8 * GRAIN) == 0
    assert held_bytes(arena) == 8 * GRAIN
