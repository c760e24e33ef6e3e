"""What ranks and their front end tell each other: rows of other nodes, messages, links, and rings."""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from expertd.service.memory import Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.messages import NOWHERE, receive, send
from expertd.service.ranks.nodes.link import MessageKind, NodeLink, outputs_of, pack, unpack
from expertd.service.ranks.rendezvous import on_this_machine
from expertd.service.ranks.ring import Bell, Ring, RingFullError, ring_bytes
from expertd.service.ranks.worker.own_steps import BYTES
from expertd.service.settings.parts import MAX_PARTITION_NAME, MAX_PARTITIONS

HIDDEN, TOP_K = 128, 2


def request(num_tokens: int, datatype: str, output: str, ids: str | None, seed: int) -> LayerRequest:
    """A request with random bytes, and memory for its output."""
    random = np.random.default_rng(seed)
    routing = [None, None] if ids is None else [BYTES[ids] * TOP_K, 4 * TOP_K]
    sizes = [BYTES[datatype] * HIDDEN, *routing]
    tensors = [None if size is None else random.bytes(num_tokens * size) for size in sizes]
    assert tensors[0] is not None
    size = num_tokens * HIDDEN * BYTES[output]
    memory = Span(0, size, None, memoryview(bytearray(size)))
    return LayerRequest(
        num_tokens, tensors[0], datatype, tensors[1], ids or "INT32", tensors[2], output, memory
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_go_there_and_back(count: int) -> None:
    kinds = [("FP32", "FP32", None), ("BF16", "FP32", "INT32"), ("FP16", "BF16", "INT64")]
    requests = [request(n + 1, *kinds[n % 3], seed=n) for n in range(count)]
    requests.insert(0, LayerRequest(0, b"", "FP32", None, "INT32", None, "FP32"))
    step = pack(7, 1, requests, HIDDEN, 2)
    assert (step.command.number, step.command.model) == (7, 1)
    assert step.outputs == outputs_of(step.command, HIDDEN)
    assert step.outputs.start == len(step.inputs), "they follow the inputs"
    memory = np.zeros(step.outputs.stop, np.uint8)
    memory[: len(step.inputs)] = step.inputs
    expected = []
    for sent, placed in zip(requests, step.command.requests, strict=True):
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            tensor, place = getattr(sent, name), getattr(placed, name)
            if tensor is None:
                assert place == NOWHERE
            else:
                assert place.region == 2
                assert memory[place.offset : place.offset + len(tensor)].tobytes() == tensor
        rows = np.random.default_rng(9).bytes(sent.num_tokens * HIDDEN * BYTES[sent.output_datatype])
        expected.append(rows)
        memory[placed.output.offset : placed.output.offset + len(rows)] = np.frombuffer(rows, np.uint8)
    unpack(memory[step.outputs.start :], step, requests)
    got = [host_view(sent.output).tobytes() for sent in requests if sent.output is not None]
    assert got == expected[1:]


@pytest.mark.parametrize("letter", ["x", "\u00fc", "\U0001f642", "\x1b"])
def test_a_long_error_is_cut_to_what_a_message_takes(letter: str) -> None:
    with contextlib.ExitStack() as stack:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank, front_end = (stack.enter_context(each) for each in pair)
        send(rank, "failed", letter * 100_000, True)
        (word, error, expected), descriptors = receive(front_end)
    assert (word, expected, descriptors) == ("failed", True, [])
    assert len(error) == 600
    assert set(error) == {letter}


def test_a_message_takes_every_set_of_partitions() -> None:
    sizes = {f"{number:02}" + 62 * "\x1b": 10**6 for number in range(MAX_PARTITIONS)}
    assert {len(name) for name in sizes} == {MAX_PARTITION_NAME}
    named = [(name, sms, sms) for name, sms in sizes.items()]
    with contextlib.ExitStack() as stack:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank, front_end = (stack.enter_context(each) for each in pair)
        send(front_end, "partitions", sizes)
        assert receive(rank) == (["partitions", sizes], [])
        send(rank, "partitions", 600 * "\x1b", [100 * "\x1b", 132, 8, named])
        assert receive(front_end)[0][2][3] == [list(each) for each in named]
        with pytest.raises(ValueError, match=r"^message: expected at most 32768 bytes, got \d+$"):
            send(rank, [[600 * "x"]] * 60)


Links = tuple[NodeLink, NodeLink]


@pytest.fixture
def links() -> Iterator[Links]:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    rendezvous = on_this_machine(store.port)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(NodeLink, rendezvous, 1, 3, end) for end in (0, 1)]
        yield ends[0].result(60), ends[1].result(60)


@pytest.mark.parametrize("text_bytes", [1, 4072, 4073, 100_000])
@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20])
def test_a_message_arrives_as_it_was_sent(links: Links, text_bytes: int, num_bytes: int) -> None:
    text = bytes(torch.randint(256, (text_bytes,), dtype=torch.uint8).tolist())
    payload = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    for sender, receiver in (links, links[::-1]):
        thread = threading.Thread(target=sender.send, args=(MessageKind.STEP, text, payload))
        thread.start()
        assert receiver.receive() == (MessageKind.STEP, text, num_bytes)
        got = torch.empty(num_bytes, dtype=torch.uint8)
        receiver.take(got)
        assert torch.equal(got, payload)
        thread.join(60)


def test_words_arrive_in_order_whichever_thread_says_them(links: Links) -> None:
    sender, receiver = links

    def say(who: int) -> None:
        for count in range(50):
            sender.tell("word", who, count)

    threads = [threading.Thread(target=say, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    heads = [receiver.receive() for _ in range(150)]
    for thread in threads:
        thread.join(60)
    assert {head.kind for head in heads} == {MessageKind.CONTROL}
    for who in range(3):
        assert [head.words for head in heads if head.words[1] == who] == [["word", who, n] for n in range(50)]


_SLOTS, _BYTES = 4, 1000
_PROGRAM = Path(__file__).with_name("ring_program.py")


def _sides() -> tuple[Ring, Ring]:
    """The writer's and the reader's side of a new ring."""
    memory = memoryview(bytearray(ring_bytes(_SLOTS, _BYTES)))
    return Ring(memory, _SLOTS, _BYTES), Ring(memory, _SLOTS, _BYTES)


def test_messages_come_in_order_and_whole() -> None:
    writer, reader = _sides()
    assert reader.take() is None
    sent = [bytes([number]) * (number * 61 % (_BYTES + 1)) for number in range(100)]
    got = []
    for message in sent:
        writer.put(message)
        assert not reader.is_empty()
        got.append(reader.take())
        assert reader.is_empty()
    assert got == sent


def test_a_full_ring_refuses_and_keeps_what_it_has() -> None:
    writer, reader = _sides()
    for number in range(_SLOTS):
        writer.put(bytes([number]))
    with pytest.raises(RingFullError, match="expected room for a message, got 4 that nobody took"):
        writer.put(b"x")
    assert reader.take() == b"\0"
    writer.put(b"\4")
    assert [reader.take() for _ in range(_SLOTS)] == [b"\1", b"\2", b"\3", b"\4"]
    assert reader.take() is None


def test_wrong_sizes_are_refused() -> None:
    writer, reader = _sides()
    with pytest.raises(ValueError, match="message: expected at most 1000 bytes, got 1001"):
        writer.put(bytes(_BYTES + 1))
    assert reader.take() is None
    writer.put(bytes(_BYTES))
    assert reader.take() == bytes(_BYTES)
    with pytest.raises(ValueError, match=r"memory: expected .* bytes, got 64"):
        Ring(memoryview(bytearray(64)), _SLOTS, _BYTES)


def test_a_bell_ends_a_wait_that_began_before_or_after_it() -> None:
    bell, rung = Bell(), threading.Event()
    rung.set()
    bell.ring()
    assert bell.wait(rung.is_set, 0.0, 10.0)
    rung.clear()
    assert not bell.wait(rung.is_set, 0.0, 0.01), "a past ring is no condition"

    def ring() -> None:
        rung.set()
        bell.ring()

    timer = threading.Timer(0.05, ring)
    timer.start()
    assert bell.wait(rung.is_set, 0.0, 3600.0)
    timer.join()


@dataclass
class Peer:
    """A process that answers each number with the next one."""

    there: Ring
    back: Ring
    their_bell: Bell
    our_bell: Bell

    def send(self, number: int, rest: bytes = b"") -> None:
        self.there.put(number.to_bytes(8, "little") + rest)
        self.their_bell.ring()

    def receive(self) -> tuple[int, bytes]:
        assert self.our_bell.wait(lambda: not self.back.is_empty(), 50e-6, 20.0), "no answer"
        message = self.back.take()
        assert message is not None
        return int.from_bytes(message[:8], "little"), message[8:]


@contextmanager
def _peer() -> Iterator[Peer]:
    middle = ring_bytes(_SLOTS, _BYTES)
    memory = os.memfd_create("expertd-test")
    os.ftruncate(memory, 2 * middle)
    view = memoryview(mmap.mmap(memory, 2 * middle))
    there, back = (Ring(part, _SLOTS, _BYTES) for part in (view[:middle], view[middle:]))
    our_bell, their_bell = Bell(), Bell()
    descriptors = (memory, our_bell.descriptor, their_bell.descriptor)
    arguments = [sys.executable, str(_PROGRAM), *map(str, (_SLOTS, _BYTES, *descriptors))]
    process = subprocess.Popen(arguments, pass_fds=descriptors)
    os.close(memory)
    try:
        yield Peer(there, back, their_bell, our_bell)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_two_processes_exchange_every_message_in_order() -> None:
    with _peer() as peer:
        sent = 0
        for answered in range(1, 3001):
            while sent < 3000 and sent - answered + 1 < 2:  # two in flight, as steps
                sent += 1
                peer.send(sent, bytes([sent % 251]) * (sent % 900))
            assert peer.receive() == (answered + 1, bytes([answered % 251]) * (answered % 900))
        peer.send(0)
