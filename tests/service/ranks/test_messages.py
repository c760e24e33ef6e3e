"""A rank's rows in memory of another node: all inputs there once, outputs back where they belong."""

import contextlib
import socket

import numpy as np
import pytest

from expertd.service.memory import Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.messages import NOWHERE, receive, send
from expertd.service.ranks.nodes.link import outputs_of, pack, unpack
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
