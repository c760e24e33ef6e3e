"""The soak of a pool that vLLM calls, without vLLM: the texts that it expects, and which server goes."""

import threading
from typing import Any

import pytest

from tests.soak import vllm
from tests.soak.vllm import CANDIDATES, MARGIN, PROMPTS, Given, Text, VllmSoak, known_texts


class FakeVllm:
    """Says as many different words as its prompt's number modulo 5; of some prompts, not always the same."""

    def __init__(self, unsteady: int, unclear: int = 0) -> None:
        self._unsteady, self._unclear = unsteady, unclear
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._turns = 0

    def alone(self, client: Any, prompt: str) -> Text:
        number = self._numbers.setdefault(prompt, len(self._numbers))
        is_clear = number >= self._unsteady + self._unclear or number < self._unsteady
        return Text(self.said(number), MARGIN if is_clear else 0.9 * MARGIN)

    def text(self, client: Any, prompt: str) -> str:
        number = self._numbers[prompt]
        with self._lock:
            self._turns += 1
            return self.said(number) + (str(self._turns) if number < self._unsteady else "")

    @staticmethod
    def said(number: int) -> str:
        return " ".join(f"w{number}-{word}" for word in range(1 + number % 5))


def test_expected_texts_are_clear_and_of_many_words() -> None:
    fake: Any = FakeVllm(unsteady=10, unclear=20)
    texts = known_texts(fake, callers=3)
    assert len(texts) == PROMPTS
    numbers = [fake._numbers[prompt] for prompt in texts]
    assert min(numbers) >= 30
    assert {text: FakeVllm.said(number) for text, number in zip(texts, numbers, strict=True)} == texts
    lengths = sorted((len(FakeVllm.said(number).split()) for number in range(30, CANDIDATES)), reverse=True)
    assert sorted((len(text.split()) for text in texts.values()), reverse=True) == lengths[:PROMPTS]


def test_texts_that_depend_on_the_batch_are_refused() -> None:
    fake: Any = FakeVllm(unsteady=CANDIDATES - 1)
    assert len(known_texts(fake, callers=3)) == 1
    fake = FakeVllm(unsteady=CANDIDATES)
    with pytest.raises(RuntimeError, match=f"clear texts: expected some, got none of {CANDIDATES}"):
        known_texts(fake, callers=3)


def test_the_server_that_computes_more_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = VllmSoak(1.0, 1.0, late=1.0, seed=0)
    one: Any = "one"
    two: Any = "two"
    soak.servers = [(one, 1), (two, 2)]
    counts = {"one": [100.0, 101.0], "two": [5.0, 9.0]}
    monkeypatch.setattr(vllm, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(vllm, "_computed", lambda server: counts[server].pop(0))
    assert soak.chosen()[1] == 2


@pytest.mark.parametrize(
    ("transport", "gpus", "waits"),
    [("device", ["1"], ["stop"]), ("channel", ["1"], ["stop"]), ("http", ["1"], []), ("channel", [], [])],
)
def test_calls_in_memory_of_a_gpu_wait_for_a_server_that_is_stopped(
    transport: str, gpus: list[str], waits: list[str]
) -> None:
    assert Given("python", "expertd", transport, "0", gpus, 4, 8, []).waits == waits
