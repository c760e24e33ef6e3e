"""What is checked before anything is sent: arguments, limits, and URLs of servers."""

import pickle
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd_client import (
    DeadlineError,
    ExpertClient,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
)
from expertd_client.address import parse_address
from expertd_client.calls import layer_call
from tests.fakes import echoing, fake_server

X = np.zeros((2, 8), np.float32)
IDS = np.zeros((2, 3), np.int32)
WEIGHTS = np.zeros((2, 3), np.float32)
READ_ONLY = np.zeros((2, 8), np.float32)
READ_ONLY.flags.writeable = False
FLOATS = "float32, float16 or bfloat16"
CONTIGUOUS = "writable contiguous memory, got a view or read-only memory"


TENSOR = torch.zeros(2, 8)
ROUTED = {"topk_ids": IDS, "topk_weights": WEIGHTS}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"hidden_states": [[1.0]]}, "hidden_states: expected a NumPy array or a torch tensor, got list"),
        ({"hidden_states": X[0]}, "shape of hidden_states: expected [tokens, columns], got [8]"),
        ({"hidden_states": X.astype(float)}, f"dtype of hidden_states: expected {FLOATS}, got float64"),
        ({"hidden_states": X.astype(">f4")}, f"dtype of hidden_states: expected {FLOATS}, got >f4"),
        ({"hidden_states": IDS}, f"dtype of hidden_states: expected {FLOATS}, got int32"),
        ({"hidden_states": TENSOR.double()}, f"dtype of hidden_states: expected {FLOATS}, got float64"),
        ({"hidden_states": TENSOR.to(torch.uint16)}, f"hidden_states: expected {FLOATS}, got uint16"),
        (
            {"hidden_states": TENSOR.to("meta")},
            "hidden_states: expected torch.strided with memory, got torch.str",
        ),
        (
            {"hidden_states": TENSOR.to_sparse()},
            "expected torch.strided with memory, got torch.sparse_coo on cpu",
        ),
        ({"hidden_states": TENSOR, "out": TENSOR.to("meta")}, "out: expected torch.strided with memory, got"),
        (
            {"hidden_states": TENSOR, "out": TENSOR.to_sparse()},
            "out: expected torch.strided with memory, got",
        ),
        ({"topk_ids": IDS}, "topk_ids and topk_weights: expected both or neither, got topk_ids alone"),
        ({"topk_weights": WEIGHTS}, "expected both or neither, got topk_weights alone"),
        ({**ROUTED, "topk_ids": IDS[:1]}, "shape of topk_ids: expected [2, 3], got [1, 3]"),
        ({**ROUTED, "topk_weights": WEIGHTS[:, :2]}, "shape of topk_weights: expected [2, 3], got [2, 2]"),
        ({**ROUTED, "topk_ids": IDS.astype(np.uint16)}, "topk_ids: expected int32 or int64, got uint16"),
        ({**ROUTED, "topk_ids": WEIGHTS}, "dtype of topk_ids: expected int32 or int64, got float32"),
        ({**ROUTED, "topk_weights": IDS}, "dtype of topk_weights: expected float32, got int32"),
        ({"priority": 256}, "priority: expected an integer from 0 to 255, got 256"),
        ({"priority": 1.0}, "priority: expected an integer from 0 to 255, got 1.0"),
        ({"output_dtype": "FP8"}, f"output_dtype: expected {FLOATS}, got FP8"),
        ({"output_dtype": np.int64}, f"output_dtype: expected {FLOATS}, got "),
        ({"output_dtype": torch.int8}, f"output_dtype: expected {FLOATS}, got torch.int8"),
        ({"output_dtype": object()}, f"output_dtype: expected {FLOATS}, got <object"),
        ({"hidden_states": TENSOR, "output_dtype": np.uint16}, f"{FLOATS} with torch tensors, got uint16"),
        ({"out": [0]}, "out: expected a NumPy array like hidden_states, got list"),
        ({"out": TENSOR}, "out: expected a NumPy array like hidden_states, got Tensor"),
        ({"hidden_states": TENSOR, "out": X}, "out: expected a torch tensor like hidden_states, got ndarray"),
        ({"out": X[:1]}, "shape of out: expected [2, 8], got [1, 8]"),
        ({"out": X.astype(float)}, f"dtype of out: expected {FLOATS}, got float64"),
        ({"out": X, "output_dtype": "FP16"}, "dtype of out: expected output_dtype's, float16, got float32"),
        ({"out": np.zeros((2, 16), np.float32)[:, ::2]}, f"out: expected {CONTIGUOUS}"),
        ({"out": READ_ONLY}, f"out: expected {CONTIGUOUS}"),
        ({"hidden_states": TENSOR, "out": torch.zeros(8, 2).T}, f"out: expected {CONTIGUOUS}"),
        ({"model": ""}, "model: expected a name, got ''"),
        ({"model": None}, "model: expected a name, got None"),
        ({"model": "\ud800"}, "model: expected a name, got '\\ud800'"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        layer_call(**{"model": "m", "hidden_states": X, **given})
    assert text in str(caught.value)
    assert caught.value.status is None


def test_wrong_arguments_are_not_sent() -> None:
    with fake_server(echoing) as server, ExpertClient(server.url, transport="http") as client:
        with pytest.raises(ValueError, match=r"^shape of hidden_states: expected"):
            client.infer("m", X[0])
        with pytest.raises(ValueError, match=r"^model: expected a name, got ''"):
            client.metadata("")
    assert server.num_connections == 0


@pytest.mark.parametrize(
    ("given", "dtype", "datatype"),
    [
        (np.float32, np.float32, "FP32"),
        (np.dtype(np.float16), np.float16, "FP16"),
        ("FP16", np.float16, "FP16"),
        ("float32", np.float32, "FP32"),
        ("bf16", ml_dtypes.bfloat16, "BF16"),
        ("bfloat16", ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, "BF16"),
        (torch.bfloat16, ml_dtypes.bfloat16, "BF16"),
        (torch.float16, np.float16, "FP16"),
        (np.uint16, np.uint16, "BF16"),
        (None, np.float32, "FP32"),
    ],
)
def test_output_dtypes_of_arrays(given: object, dtype: Any, datatype: str) -> None:
    output = layer_call("m", X, output_dtype=given).output
    assert output.datatype == datatype
    assert output.result().dtype == np.dtype(dtype)
    assert len(output.memory()) == output.result().nbytes


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(None, torch.float16), ("FP32", torch.float32), (np.float32, torch.float32), ("BF16", torch.bfloat16)],
)
def test_output_dtypes_of_tensors(given: object, dtype: torch.dtype) -> None:
    output = layer_call("m", torch.zeros(2, 8, dtype=torch.float16), output_dtype=given).output
    assert output.result().dtype == dtype
    assert len(output.memory()) == output.result().nbytes


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    text = r"^output_dtype: expected uint16 \(the bits\) where ml_dtypes is not installed, got bfloat16$"
    with pytest.raises(InvalidRequestError, match=text):
        layer_call("m", X, output_dtype="BF16")


@pytest.mark.parametrize(
    "values",
    [
        np.arange(32, dtype=np.float32).reshape(4, 8)[::2],
        np.asfortranarray(np.arange(16, dtype=np.float32).reshape(2, 8)),
        np.arange(16, dtype=np.float32).reshape(2, 8)[:, ::-1],
        np.broadcast_to(np.float32(3), (2, 8)),
        torch.arange(16, dtype=torch.float32).reshape(8, 2).T,
        torch.arange(16, dtype=torch.bfloat16).reshape(2, 8).requires_grad_(),
        torch.zeros(0, 8),
        np.zeros((0, 8), np.float16),
    ],
)
def test_memory_of_any_layout(values: Any) -> None:
    with fake_server(echoing) as server, ExpertClient(server.url, transport="http") as client:
        answer = client.infer("m", values)
    assert type(answer) is type(values)
    assert (answer.dtype, answer.shape) == (values.dtype, values.shape)
    assert bool((answer == values).all())


def test_outs_dtype_is_the_outputs() -> None:
    assert layer_call("m", X, out=np.empty((2, 8), np.float16)).output.datatype == "FP16"
    assert layer_call("m", X, out=np.empty((2, 8), np.uint16)).output.datatype == "BF16"
    bits = np.empty((2, 8), np.uint16)
    output = layer_call("m", X, output_dtype="BF16", out=bits).output
    assert (output.datatype, output.result() is bits) == ("BF16", True)
    halves = torch.empty(2, 8, dtype=torch.bfloat16)
    assert layer_call("m", torch.zeros(2, 8), out=halves).output.datatype == "BF16"


def test_what_is_sent() -> None:
    with fake_server(echoing) as server, ExpertClient(f"{server.url}/base/", transport="http") as client:
        client.infer("a/b ü?", X, IDS.astype(np.int64), torch.zeros(2, 3))
    (request,) = server.requests
    assert request.line == "POST /base/v2/models/a%2Fb%20%C3%BC%3F/infer HTTP/1.1"
    assert request.headers["host"] == server.url.removeprefix("http://")
    assert request.headers["user-agent"].startswith("expertd-client/")
    inputs = {entry["name"]: (entry["datatype"], entry["shape"]) for entry in request.json["inputs"]}
    assert inputs == {
        "hidden_states": ("FP32", [2, 8]),
        "topk_ids": ("INT64", [2, 3]),
        "topk_weights": ("FP32", [2, 3]),
    }
    assert request.json["parameters"]["binary_data_output"] is True
    assert len(request.tensors) == 4 * 16 + 8 * 6 + 4 * 6


@pytest.mark.parametrize(("name", "value"), [("max_connections", 0), ("max_retries", -1)])
def test_limits_that_cannot_work(name: str, value: int) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequestError, match=rf"^{name}: expected at least {value + 1}, got {value}$"):
        ExpertClient("http://x", **options)


def test_errors_are_also_the_standard_ones() -> None:
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(DeadlineError, TimeoutError)
    assert issubclass(ServerUnreachableError, ConnectionError)


@pytest.mark.parametrize(
    "error", [ServerBusyError("full", 503, 2.0), DeadlineError("late"), ExpertError("failed", 500)]
)
def test_errors_survive_pickling(error: ExpertError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_gpu_that_torch_does_not_have() -> None:
    """Whatever torch raises: it asserts if it was built without CUDA."""
    with ExpertClient("http://127.0.0.1:1") as client:
        with pytest.raises(
            InvalidRequestError, match=r"^device: expected one that torch has, got cuda:99: \S"
        ):
            client.open_channel("m", max_tokens=1, device="cuda:99")
        with pytest.raises(ServerUnreachableError):
            client.open_channel("m", max_tokens=1, device="cpu")


def test_a_device_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = r"^device: expected None where torch is missing, got cpu$"
    with ExpertClient("http://127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match=text):
        client.open_channel("m", max_tokens=1, device="cpu")


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "authority", "local"),
    [
        ("http://localhost:8000", "localhost", 8000, None, "localhost:8000", True),
        ("http://127.0.0.2:1", "127.0.0.2", 1, None, "127.0.0.2:1", True),
        ("http://[::1]:8000/", "::1", 8000, None, "[::1]:8000", True),
        ("http://experts", "experts", 80, None, "experts", False),
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, None, "10.0.0.1:8000", False),
        ("unix:/run/e.sock", "localhost", 80, "/run/e.sock", "localhost", True),
        ("unix:///run/e.sock", "localhost", 80, "/run/e.sock", "localhost", True),
    ],
)
def test_addresses(url: str, host: str, port: int, path: str | None, authority: str, local: bool) -> None:
    address = parse_address(url)
    assert (address.host, address.port, address.path) == (host, port, path)
    assert (address.authority, address.is_local, address.base) == (authority, local, "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "https://",
        "ftp://localhost:8000",
        "http://",
        "http://:80",
        "http://a:b",
        "http://a:99999",
        "http://[::1",
        "http://user@a",
        "http://a..b",
        f"http://{64 * 'a'}",
        "http://a?x=1",
        "http://a#x",
        "http://a b",
        "http://a\r\nX: y",
        "http://ü",
        "unix:",
        "unix:relative",
        "unix://",
        None,
        b"http://a",
    ],
)
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^url: expected http://host:port, https://host:port or unix:/path, got "
    ):
        ExpertClient(url)
