"""Triton's unmodified client with a real server process, compared with the same layer run directly."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from expertd.service.engine.loading import load
from expertd.service.engine.steps import Runner
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest
from tests.service.apps import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, rows, tiny_settings
from tests.service.processes import ServerProcess, server_process
from tests.service.waiting import wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = [MODEL, {**MODEL, "name": "later", "load": False}]
    with server_process(tiny_settings(models=models), tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load(tiny_settings(), lambda: False).runners["tiny"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url, concurrency=8) as client:
        yield client


def tensor(
    values: npt.NDArray[Any], name: str = "hidden_states", datatype: str = "FP32", binary: bool = True
) -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def expected(runner: Runner, values: npt.NDArray[Any], datatype: str = "FP32") -> npt.NDArray[Any]:
    """The layer's output, without HTTP."""
    request = LayerRequest(len(values), values.tobytes(), datatype, None, "INT32", None, "FP32")
    return np.frombuffer(host_view(runner.begin([request]).finish().outputs[0]), np.float32).reshape(
        values.shape
    )


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "expertd"
    assert client.get_model_metadata("tiny")["versions"] == ["1"]
    assert client.get_model_repository_index()[0]["state"] == "READY"


def test_models_are_loaded_and_unloaded(client: Any) -> None:
    def index() -> dict[str, str]:
        return {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}

    assert index() == {"tiny": "READY", "later": "UNAVAILABLE"}
    assert not client.is_model_ready("later")
    with pytest.raises(InferenceServerException, match="expected a loaded one, got it unloaded") as caught:
        client.infer("later", [tensor(rows(1))])
    assert caught.value.status() == "404"
    client.load_model("later")
    assert client.is_model_ready("later")
    assert index() == {"tiny": "READY", "later": "READY"}
    same = [client.infer(name, [tensor(rows(1))]).as_numpy("hidden_states") for name in ("tiny", "later")]
    assert np.array_equal(*same)
    client.unload_model("later")
    assert not client.is_model_ready("later")
    client.load_model("later")
    client.unload_model("later", unload_dependents=True)
    assert index()["later"] == "UNAVAILABLE"
    with pytest.raises(InferenceServerException, match="models are loaded as configured, got config"):
        client.load_model("later", config="{}")
    with pytest.raises(InferenceServerException, match="model: expected tiny or later, got 'none'") as caught:
        client.load_model("none")
    assert caught.value.status() == "404"


def test_configuration_and_statistics(client: Any) -> None:
    config = client.get_model_config("tiny")
    assert config == client.get_model_config("tiny", "1")
    assert config["input"][0]["dims"] == [-1, HIDDEN]
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_config("other")
    assert caught.value.status() == "404"
    client.infer("tiny", [tensor(rows(1))])
    wait_for(lambda: client.get_inference_statistics("tiny")["model_stats"][0]["execution_count"], "a step")
    assert len(client.get_inference_statistics()["model_stats"]) == 2


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_fp32(client: Any, runner: Runner, binary_in: bool, binary_out: bool | None) -> None:
    values = rows(7)
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput("hidden_states", binary_data=binary_out)]
    result = client.infer("tiny", [tensor(values, binary=binary_in)], outputs=outputs, request_id="42")
    assert result.get_response()["id"] == "42"
    np.testing.assert_allclose(
        result.as_numpy("hidden_states"), expected(runner, values), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_sixteen_bit_datatypes(client: Any, runner: Runner, datatype: str, dtype: Any) -> None:
    values = rows(7).astype(dtype)
    answer = client.infer("tiny", [tensor(values, datatype=datatype)]).as_numpy("hidden_states")
    assert answer.dtype == dtype
    direct = expected(runner, values, datatype)
    np.testing.assert_allclose(answer.astype(np.float32), direct, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Any, runner: Runner, algorithm: str) -> None:
    values = rows(7)
    result = client.infer(
        "tiny",
        [tensor(values)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_allclose(
        result.as_numpy("hidden_states"), expected(runner, values), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_concurrent_requests_get_their_own_rows(client: Any, runner: Runner) -> None:
    sent = [rows(1 + i % 5, seed=i) for i in range(64)]
    waiting = [client.async_infer("tiny", [tensor(values)]) for values in sent]
    for values, request in zip(sent, waiting, strict=True):
        answer = request.get_result().as_numpy("hidden_states")
        np.testing.assert_allclose(answer, expected(runner, values), rtol=0.02, atol=0.02)


def wrong_requests() -> list[tuple[str, list[Any], str, str]]:
    """Model, inputs, and the status and text of the refusal."""
    ids = tensor(np.array([[0, NUM_EXPERTS + 1]], np.int32), "topk_ids", "INT32")
    weights = tensor(np.ones((1, TOP_K), np.float32), "topk_weights")
    shape = f"shape of input hidden_states: expected [1, {HIDDEN}], got [1, 5]"
    datatype = "datatype of input hidden_states: expected BF16, FP16, FP32, FP8 or UINT8, got 'INT32'"
    return [
        ("other", [tensor(rows(1))], "404", "model: expected tiny or later, got 'other'"),
        ("tiny", [tensor(rows(1), "input")], "400", "name of an input: expected hidden_states"),
        ("tiny", [tensor(rows(1)[:, :5])], "400", shape),
        ("tiny", [tensor(rows(1).astype(np.int32), datatype="INT32")], "400", datatype),
        ("tiny", [tensor(rows(65))], "400", "at most 64 tokens, got 65"),
        ("tiny", [tensor(rows(4096))], "413", "at most 1048576 bytes"),
        ("tiny", [tensor(rows(1)), ids, weights], "400", "topk_ids"),
    ]


def test_errors_reach_the_caller_and_the_next_request_works(client: Any) -> None:
    for model, inputs, status, text in wrong_requests():
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, inputs)
        assert caught.value.status() == status
        assert text in caught.value.message()
        assert client.infer("tiny", [tensor(rows(1))]).as_numpy("hidden_states").shape == (1, HIDDEN)
