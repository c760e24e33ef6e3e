"""Both clients with a real server, compared with its answers in JSON."""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from expertd_client import (
    ExpertClient,
    ExpertError,
    InvalidRequestError,
    ModelStatus,
    ServerUnreachableError,
    UnknownModelError,
)
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer, running_server
from tests.rounding import assert_rounded

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(7)
X = RNG.standard_normal((5, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((5, NUM_EXPERTS)), axis=1)[:, :TOP_K]
WEIGHTS = RNG.random((5, TOP_K), dtype=np.float32)


def in_json(url: str, **arrays: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The layer's output by plain JSON."""
    kinds = {"f": "FP32", "i": "INT64"}
    inputs = [
        {"name": name, "shape": values.shape, "datatype": kinds[values.dtype.kind], "data": values.tolist()}
        for name, values in arrays.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/{MODEL}/infer", body, timeout=60) as response:
        output = json.load(response)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> npt.NDArray[np.float32]:
    return in_json(server.url, hidden_states=X)


def test_what_a_server_says_about_itself(connect: Connect, server: RunningServer) -> None:
    client = connect(server.url)
    assert client.live()
    assert client.ready()
    assert client.ready(MODEL)
    about = client.server()
    assert (about.name, "binary_tensor_data" in about.extensions) == ("expertd", True)
    assert client.models() == [ModelStatus(MODEL, True, "")]
    model = client.metadata(MODEL)
    assert (model.name, model.hidden_size, model.top_k, model.datatype) == (MODEL, HIDDEN, TOP_K, "FP32")
    assert (model.num_experts, model.num_shared_experts, model.shared_experts) == (NUM_EXPERTS, 0, "none")
    assert model.weight_format == "FP8"
    assert model.max_request_tokens is not None
    assert re.fullmatch("[0-9a-f]{64}", model.weights_id or "")
    with pytest.raises(UnknownModelError, match=r"^model: expected demo, got 'other'"):
        client.metadata("other")
    assert client.ready("other") is False
    with pytest.raises(InvalidRequestError, match=r"^model: expected a name, got ''$"):
        client.ready("")


def test_arrays(connect: Connect, server: RunningServer, expected: npt.NDArray[np.float32]) -> None:
    client = connect(server.url)
    answer = client.infer(MODEL, X)
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)
    out = np.empty_like(X)
    assert client.infer(MODEL, X, out=out) is out
    np.testing.assert_array_equal(out, answer)


def test_routing_by_the_caller(connect: Connect, server: RunningServer) -> None:
    given = in_json(server.url, hidden_states=X, topk_ids=IDS, topk_weights=WEIGHTS)
    client = connect(server.url)
    for ids in (IDS, IDS.astype(np.int32), torch.from_numpy(IDS)):
        np.testing.assert_allclose(client.infer(MODEL, X, ids, WEIGHTS), given, rtol=1e-5, atol=1e-6)
    assert np.abs(given - in_json(server.url, hidden_states=X)).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors(connect: Connect, server: RunningServer, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(X).to(dtype)
    answer = connect(server.url).infer(MODEL, tensor)
    assert (type(answer), answer.dtype) == (torch.Tensor, dtype)
    rounded = in_json(
        server.url, hidden_states=tensor.float().numpy()
    )  # rounding may change a token's experts
    np.testing.assert_allclose(answer.float().numpy(), rounded, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_in_and_out(
    connect: Connect, server: RunningServer, expected: npt.NDArray[np.float32], dtype: Any
) -> None:
    client = connect(server.url)
    answer = client.infer(MODEL, X.astype(dtype))
    assert answer.dtype == dtype
    rounded = in_json(server.url, hidden_states=X.astype(dtype).astype(np.float32))
    np.testing.assert_allclose(answer.astype(np.float32), rounded, rtol=0.02, atol=0.01)
    answer = client.infer(MODEL, X, output_dtype=dtype)
    assert answer.dtype == dtype
    np.testing.assert_allclose(answer.astype(np.float32), expected, rtol=0.01, atol=1e-3)


def test_refusals(connect: Connect, server: RunningServer) -> None:
    client = connect(server.url)
    with pytest.raises(UnknownModelError) as unknown:
        client.infer("other", X)
    assert unknown.value.status == 404
    with pytest.raises(InvalidRequestError, match="expected") as shape:
        client.infer(MODEL, X[:, :7])
    assert shape.value.status == 400
    with pytest.raises(InvalidRequestError, match="topk_ids: expected") as values:
        client.infer(MODEL, X, IDS + 1000, WEIGHTS)
    assert values.value.status == 400
    assert client.infer(MODEL, X).shape == X.shape


def test_many_threads(server: RunningServer, expected: npt.NDArray[np.float32]) -> None:
    with ExpertClient(server.url, transport="http") as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.infer(MODEL, X), range(200)))
    for answer in answers:
        assert_rounded(answer, expected)


def test_large_requests_in_parallel(server: RunningServer) -> None:
    tokens = RNG.standard_normal((2000, HIDDEN), dtype=np.float32)  # 4 MB each way, more than sockets buffer
    with ExpertClient(server.url, transport="http") as client, ThreadPoolExecutor(3) as pool:
        whole = client.infer(MODEL, tokens)
        for part, answer in zip(
            (tokens[:900], tokens, tokens[100:]),
            pool.map(lambda x: client.infer(MODEL, x), (tokens[:900], tokens, tokens[100:])),
            strict=True,
        ):
            start = 100 if len(part) == 1900 else 0
            assert_rounded(answer, whole[start : start + len(part)])


def test_a_server_that_ends(connect: Connect, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        client = connect(server.url)
        client.infer(MODEL, X)
        server.process.terminate()
        server.process.wait(60)
        with pytest.raises(ExpertError) as caught:
            client.infer(MODEL, X)
        assert type(caught.value) is ServerUnreachableError
        assert not client.live()
