"""Channels give what HTTP gives, for every kind of tensor."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from expertd_client import InvalidRequestError, UnknownModelError
from tests.callers import AnyCaller, Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(11)
X = RNG.standard_normal((6, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((6, NUM_EXPERTS)), axis=1)[:, :TOP_K]
WEIGHTS = RNG.random((6, TOP_K), dtype=np.float32)


@pytest.fixture
def client(connect: Connect, sharing_server: RunningServer) -> AnyCaller:
    return connect(sharing_server.url, transport="channel")


@pytest.fixture
def over_http(connect: Connect, sharing_server: RunningServer) -> AnyCaller:
    return connect(sharing_server.url)


def same(given: Any, expected: Any) -> None:
    """Also of the same kind and dtype."""
    assert (type(given), given.dtype) == (type(expected), expected.dtype)
    np.testing.assert_array_equal(as_floats(given), as_floats(expected))


def as_floats(values: Any) -> npt.NDArray[Any]:
    floats: npt.NDArray[Any] = values.float().numpy() if isinstance(values, torch.Tensor) else values
    return floats


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays(client: AnyCaller, over_http: AnyCaller, dtype: Any) -> None:
    values = X.astype(dtype)
    for given in (values, values[::2], np.asfortranarray(values)):
        same(client.infer(MODEL, given), over_http.infer(MODEL, given))


def test_bits(client: AnyCaller, over_http: AnyCaller) -> None:
    bits = X.astype(ml_dtypes.bfloat16).view(np.uint16)
    same(client.infer(MODEL, bits), over_http.infer(MODEL, bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors(client: AnyCaller, over_http: AnyCaller, dtype: torch.dtype) -> None:
    values = torch.from_numpy(X).to(dtype)
    wide = torch.from_numpy(np.asfortranarray(X)).to(dtype)
    for given in (values, values[::2], wide, values.clone().requires_grad_()):
        same(client.infer(MODEL, given), over_http.infer(MODEL, given))


@pytest.mark.parametrize("output_dtype", ["FP32", "FP16", "bfloat16"])
def test_output_dtypes(client: AnyCaller, over_http: AnyCaller, output_dtype: str) -> None:
    for given in (X, torch.from_numpy(X).to(torch.float16)):
        answer = client.infer(MODEL, given, output_dtype=output_dtype)
        same(answer, over_http.infer(MODEL, given, output_dtype=output_dtype))


def test_out(client: AnyCaller, over_http: AnyCaller) -> None:
    for given in (X, torch.from_numpy(X)):
        out = np.empty_like(X) if isinstance(given, np.ndarray) else torch.empty_like(given)
        assert client.infer(MODEL, given, out=out) is out
        same(out, over_http.infer(MODEL, given))


def test_routing_by_the_caller(client: AnyCaller, over_http: AnyCaller) -> None:
    expected = over_http.infer(MODEL, X, IDS, WEIGHTS)
    assert np.abs(expected - over_http.infer(MODEL, X)).max() > 0.01
    tensors = torch.from_numpy(IDS), torch.from_numpy(WEIGHTS)
    for ids, weights in (
        (IDS, WEIGHTS),
        (IDS.astype(np.int32), WEIGHTS),
        (np.asfortranarray(IDS), np.asfortranarray(WEIGHTS)),
        tensors,
        (tensors[0].int(), WEIGHTS),
    ):
        same(client.infer(MODEL, X, ids, weights), expected)


def test_no_tokens(client: AnyCaller) -> None:
    assert client.infer(MODEL, X[:0]).shape == (0, HIDDEN)
    assert client.infer(MODEL, X[:0], IDS[:0], WEIGHTS[:0]).shape == (0, HIDDEN)
    assert client.infer(MODEL, torch.zeros(0, HIDDEN)).shape == (0, HIDDEN)


@pytest.mark.parametrize("none", [-1, NUM_EXPERTS])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_without_an_expert_add_nothing(client: AnyCaller, dtype: type, none: int) -> None:
    empty = RNG.random(IDS.shape) < 0.5
    empty[0], empty[1] = True, False
    ids: npt.NDArray[Any] = IDS.astype(dtype)
    weights = WEIGHTS.copy()
    ids[empty], weights[empty] = none, np.nan
    out = client.infer(MODEL, X, ids, weights)
    np.testing.assert_allclose(out, client.infer(MODEL, X, IDS, np.where(empty, 0, WEIGHTS)), atol=1e-5)
    assert not out[0].any()
    assert out[1].any()


def test_calls_of_any_size_follow_each_other(client: AnyCaller, over_http: AnyCaller) -> None:
    many = RNG.standard_normal((3000, HIDDEN), dtype=np.float32)
    for size in (1, 3000, 2, 100, 0, 17, 2999):
        given, expected = client.infer(MODEL, many[:size]), over_http.infer(MODEL, many[:size])
        np.testing.assert_array_equal(given, expected)


def test_refusals(client: AnyCaller) -> None:
    with pytest.raises(UnknownModelError):
        client.infer("other", X)
    with pytest.raises(InvalidRequestError, match=r"hidden_states: expected"):
        client.infer(MODEL, X[:, :8])
    with pytest.raises(InvalidRequestError, match=r"topk_ids: expected"):
        client.infer(MODEL, X, IDS[:, :1], WEIGHTS[:, :1])
    for offset in (1000, 2**32, -(2**40)):  # those of 64 bits must not be cut
        expected = f"0 to {NUM_EXPERTS - 1}, or for no expert -1 or {NUM_EXPERTS}"
        text = rf"^topk_ids: expected {expected}, got {IDS[0, 0] + offset} in token 0, slot 0$"
        with pytest.raises(InvalidRequestError, match=text):
            client.infer(MODEL, X, IDS + offset, WEIGHTS)
    with pytest.raises(InvalidRequestError, match="topk_weights"):
        client.infer(MODEL, X, IDS, WEIGHTS * np.float32("nan"))
    assert client.infer(MODEL, X).shape == X.shape
