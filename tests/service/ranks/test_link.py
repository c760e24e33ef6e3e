"""The link between a rank and its proxy, both ends in this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from expertd.service.ranks.nodes.link import Link, MessageKind
from expertd.service.ranks.rendezvous import on_this_machine

Links = tuple[Link, Link]


@pytest.fixture
def links() -> Iterator[Links]:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    rendezvous = on_this_machine(store.port)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(Link, rendezvous, 1, 3, end) for end in (0, 1)]
        yield ends[0].result(20), ends[1].result(20)


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
        thread.join(5)


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
        thread.join(5)
    assert {head.kind for head in heads} == {MessageKind.CONTROL}
    for who in range(3):
        assert [head.words for head in heads if head.words[1] == who] == [["word", who, n] for n in range(50)]
