"""Calls that are larger than a server's requests may be are sent in parts, over every transport."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from expertd_client import InvalidRequestError
from tests.callers import AnyCaller, Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer, channels_in, running_server
from tests.rounding import assert_rounded

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(51)
MOST = 100  # tokens
X = RNG.standard_normal((331, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((331, NUM_EXPERTS)), axis=1)[:, :TOP_K]
WEIGHTS = RNG.random((331, TOP_K), dtype=np.float32)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of requests of at most 100 tokens, and of bodies with fewer in FP32."""
    directory = tmp_path_factory.mktemp("limited")
    limits = [f"limits.max_request_tokens={MOST}", f"limits.max_body_bytes={60 * 4 * HIDDEN}"]
    with running_server(directory, channels_in(directory), *limits) as running:
        yield running


@pytest.fixture(params=["channel", "http"])
def client(request: pytest.FixtureRequest, connect: Connect, limited: RunningServer) -> AnyCaller:
    return connect(limited.url, transport=request.param, max_connections=2)


def in_pieces(client: AnyCaller, *inputs: Any) -> Any:
    """The outputs of calls that are small enough."""
    return np.concatenate(
        [client.infer(MODEL, *(each[at : at + 50] for each in inputs)) for at in range(0, 331, 50)]
    )


@pytest.mark.parametrize("size", [MOST + 1, 331])
def test_the_output_is_that_of_one_call(client: AnyCaller, size: int) -> None:
    assert_rounded(client.infer(MODEL, X[:size]), in_pieces(client, X)[:size])
    routed = client.infer(MODEL, X[:size], IDS[:size], WEIGHTS[:size])
    assert_rounded(routed, in_pieces(client, X, IDS, WEIGHTS)[:size])
    pending = client.submit(MODEL, X[:size])
    assert_rounded(pending.wait(), in_pieces(client, X)[:size])


def test_outputs_of_the_callers(client: AnyCaller) -> None:
    expected = in_pieces(client, X)
    out = np.empty_like(X)
    assert client.infer(MODEL, X, out=out) is out
    assert_rounded(out, expected)
    tensor = torch.empty(331, HIDDEN)
    assert client.infer(MODEL, torch.from_numpy(X), out=tensor) is tensor
    assert_rounded(tensor.numpy(), expected)
    assert_rounded(client.infer(MODEL, X, output_dtype="FP16").astype(np.float32), expected)


def test_other_refusals_are_the_callers(client: AnyCaller) -> None:
    with pytest.raises(InvalidRequestError, match="hidden_states: expected"):
        client.infer(MODEL, X[:, :8])
    wrong = IDS.copy()
    wrong[330] = NUM_EXPERTS + 1  # of the last part
    with pytest.raises(InvalidRequestError, match="topk_ids: expected"):
        client.infer(MODEL, X, wrong, WEIGHTS)
    assert client.infer(MODEL, X).shape == X.shape
