"""`expertd-vllm serve`: answers, the tokens it asks for, its metrics, and a server that ends under it."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.generating import NEW_TOKENS, PROMPTS, Outcome
from tests.running import Running, running_expertd, running_vllm

LAYERS = 3


def complete(vllm: Running, prompt: list[int]) -> list[int]:
    """The tokens after a prompt, chosen greedily."""
    body = {
        "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = json.loads(vllm.ask("/v1/completions", body))["choices"][0]["token_ids"]
    assert len(tokens) == NEW_TOKENS
    return tokens


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ([], 1),
        (["-dp=2", "--api-server-count=1"], 2),
        # With sequence parallel experts.
        (["-tp=2", "-dp=2", "--api-server-count=1", "--enable-expert-parallel"], 4),
    ],
    ids=str,
)
def test_tokens_and_requests(
    flags: list[str],
    processes: int,
    checkpoints: dict[str, Path],
    plain: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    """Each token is asked for once, also while other data parallel ranks run dummy batches; none is lost."""
    model, expected = checkpoints["qwen3_moe"], plain("qwen3_moe")
    bound = expected.distance(plain("qwen3_moe", dtype="float32"))
    with running_expertd(tmp_path, model) as expertd, ExitStack() as stack:
        pool = tmp_path / "servers"  # of one server
        pool.write_text(expertd.url)
        vllm = stack.enter_context(running_vllm(tmp_path, model, f"file:{pool}", *flags))
        texts = [complete(vllm, prompt) for prompt in PROMPTS]
        asked = LAYERS * sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
        calls = LAYERS * NEW_TOKENS * len(PROMPTS)
        assert expertd.total("expertd_batch_tokens_sum", asked) == asked
        assert vllm.total("expertd_vllm_wait_seconds_count", calls) >= calls
        assert vllm.total("expertd_pool_servers", processes) == processes
        assert len(json.loads(expertd.ask("/v1/channels"))["channels"]) == processes

        answered = threading.Semaphore(0)

        def ask(prompt: list[int]) -> list[int]:
            text = complete(vllm, prompt)
            answered.release()
            return text

        with ThreadPoolExecutor(4) as callers:
            asking = [callers.submit(ask, prompt) for prompt in PROMPTS * 8]
            for _ in range(3):
                answered.acquire()
            expertd.kill()
            expertd.start()
        texts += [call.result() for call in asking]
        texts += [complete(vllm, prompt) for prompt in PROMPTS]
        for begin in range(0, len(texts), len(PROMPTS)):
            ties = expected.ties(texts[begin : begin + len(PROMPTS)])
            assert all(margin < 6 * bound for margin in ties)
        assert len(json.loads(expertd.ask("/v1/channels"))["channels"]) == processes
        assert vllm.stop() == 0
