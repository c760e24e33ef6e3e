"""`expertd-vllm serve`: answers, the tokens it asks for, its metrics, and a server that ends under it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.running import Running, running_expertd, running_vllm

LAYERS = 3
NEW_TOKENS = 8
PROMPTS = [[number] * (3 + number) for number in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    directory = tmp_path_factory.mktemp("model") / "small"
    make_checkpoint(directory)
    return directory


def complete(vllm: Running, prompt: list[int]) -> str:
    """The text after a prompt, chosen greedily."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    text: str = json.loads(vllm.ask("/v1/completions", body))["choices"][0]["text"]
    assert len(text.split()) == NEW_TOKENS
    return text


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ([], 1),
        (["-dp=2"], 2),
        (["-tp=2", "-dp=2", "--enable-expert-parallel"], 4),  # with sequence parallel experts
    ],
    ids=str,
)
def test_tokens_and_requests(flags: list[str], processes: int, model: Path, tmp_path: Path) -> None:
    """Each token is asked for once, also while other data parallel ranks run dummy batches; none is lost."""
    with (
        running_expertd(tmp_path, model) as expertd,
        running_vllm(tmp_path, model, expertd.url, *flags) as vllm,
    ):
        texts = [complete(vllm, prompt) for prompt in PROMPTS]
        asked = sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
        assert expertd.total("expertd_batch_tokens_sum") == LAYERS * asked
        assert vllm.total("expertd_vllm_wait_seconds_count") >= LAYERS * NEW_TOKENS * len(PROMPTS)
        assert len(json.loads(expertd.ask("/v1/channels"))["channels"]) == processes

        answered = threading.Semaphore(0)

        def ask(prompt: list[int]) -> None:
            complete(vllm, prompt)
            answered.release()

        with ThreadPoolExecutor(4) as callers:
            calls = [callers.submit(ask, prompt) for prompt in PROMPTS * 4]
            for _ in range(3):
                answered.acquire()
            expertd.kill()
            expertd.start()
        for call in calls:
            call.result()
        assert [complete(vllm, prompt) for prompt in PROMPTS] == texts
        assert len(json.loads(expertd.ask("/v1/channels"))["channels"]) == processes
        assert vllm.stop() == 0
