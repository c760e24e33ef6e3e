"""Triton's unmodified gRPC client with a real server process, compared with the same server over HTTP."""

import queue
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from tests.service.apps import HIDDEN, MODEL, TOP_K, rows, tiny_settings
from tests.service.grpc.calls import ON
from tests.service.keys import all_keys, bearer
from tests.service.processes import ServerProcess, grpc_address, server_process
from tests.service.waiting import wait_for


def metadata(name: str) -> dict[str, str]:
    """The metadata that sends a name's key; gRPC has its names in lower case."""
    return {key.lower(): value for key, value in bearer(name).items()}


INFER, ADMIN = metadata("infer"), metadata("admin")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    models = [MODEL, {**MODEL, "name": "later", "load": False}]
    keys = all_keys(folder / "keys.yaml")
    settings = tiny_settings(**ON, shared_memory={"enabled": True}, keys=keys, models=models)
    with server_process(settings, folder) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(grpc_address(server)) as client:
        yield client


def tensor(values: npt.NDArray[Any], name: str = "hidden_states", datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


@pytest.fixture(scope="module")
def over_http(server: ServerProcess) -> Any:
    """Has the server compute hidden states, over HTTP."""

    def compute(values: npt.NDArray[Any], datatype: str = "FP32") -> Any:
        made = tritonclient.http.InferInput("hidden_states", list(values.shape), datatype)
        made.set_data_from_numpy(values)
        with tritonclient.http.InferenceServerClient(server.url) as client:
            return client.infer("tiny", [made], headers=bearer("infer")).as_numpy("hidden_states")

    return compute


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert client.get_server_metadata(INFER).name == "expertd"
    tensors = client.get_model_metadata("tiny", headers=INFER)
    assert [(each.name, list(each.shape)) for each in tensors.inputs] == [
        ("hidden_states", [-1, HIDDEN]),
        ("topk_ids", [-1, TOP_K]),
        ("topk_weights", [-1, TOP_K]),
    ]
    assert client.get_model_repository_index(INFER).models[0].state == "READY"
    for name in ("other", "a/b", ""):
        assert not client.is_model_ready(name)
    assert not client.is_model_ready("tiny", "2")


def test_models_are_loaded_and_unloaded(client: Any) -> None:
    def index() -> dict[str, str]:
        return {entry.name: entry.state for entry in client.get_model_repository_index(INFER).models}

    assert not client.is_model_ready("later")
    client.load_model("later", headers=ADMIN)
    assert client.is_model_ready("later")
    assert index() == {"tiny": "READY", "later": "READY"}
    client.infer("later", [tensor(rows(1))], headers=INFER)
    client.unload_model("later", headers=ADMIN)
    assert index() == {"tiny": "READY", "later": "UNAVAILABLE"}
    with pytest.raises(InferenceServerException, match="expected a loaded one, got it unloaded") as caught:
        client.infer("later", [tensor(rows(1))], headers=INFER)
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    refused = {
        "PERMISSION_DENIED": (client.load_model, ("later", INFER)),
        "NOT_FOUND": (client.load_model, ("a/b", ADMIN)),
        "INVALID_ARGUMENT": (client.load_model, ("later", ADMIN, "{}")),
    }
    for status, (call, arguments) in refused.items():
        with pytest.raises(InferenceServerException) as caught:
            call(*arguments)
        assert caught.value.status() == f"StatusCode.{status}"


def test_configuration_and_statistics(client: Any) -> None:
    config = client.get_model_config("tiny", headers=INFER).config
    kinds = [("hidden_states", 11, False), ("topk_ids", 8, True), ("topk_weights", 11, True)]
    assert [(each.name, each.data_type, each.optional) for each in config.input] == kinds
    assert config.parameters["top_k"].string_value == str(TOP_K)
    assert config.parameters["hidden_states_datatypes"].string_value == "BF16,FP16,FP32,FP8,UINT8"
    assert config.instance_group[0].kind == 2

    def success() -> int:
        (entry,) = client.get_inference_statistics("tiny", headers=INFER).model_stats
        return int(entry.inference_stats.success.count)

    before = success()
    client.infer("tiny", [tensor(rows(1))], headers=INFER)
    wait_for(lambda: success() == before + 1, "the request is counted")
    assert client.get_inference_statistics(headers=INFER).model_stats[0].last_inference > 0


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP32", np.float32), ("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)]
)
def test_datatypes(client: Any, over_http: Any, datatype: str, dtype: Any) -> None:
    values = rows(7).astype(dtype)
    result = client.infer("tiny", [tensor(values, datatype=datatype)], request_id="42", headers=INFER)
    answer = result.as_numpy("hidden_states")
    assert result.get_response().id == "42"
    assert answer.dtype == dtype
    np.testing.assert_array_equal(answer, over_http(values, datatype))


def test_given_routing_outputs_priority_and_timeout(client: Any) -> None:
    values, ids = rows(3), np.array([[0, 1], [1, 2], [2, 3]], np.int64)

    def answer(scale: float) -> npt.NDArray[np.float32]:
        weights = np.full((3, TOP_K), scale, np.float32)
        inputs = [tensor(values), tensor(ids, "topk_ids", "INT64"), tensor(weights, "topk_weights")]
        outputs = [triton.InferRequestedOutput("hidden_states")]
        options = {"priority": 1, "timeout": 10_000_000, "client_timeout": 30, "headers": INFER}
        result = client.infer("tiny", inputs, outputs=outputs, **options)
        output: npt.NDArray[np.float32] = result.as_numpy("hidden_states")
        return output

    np.testing.assert_allclose(answer(1.0), 2 * answer(0.5), rtol=1e-5, atol=1e-6)


def test_a_stream(client: Any, over_http: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=INFER)
    try:
        for index in range(4):
            client.async_stream_infer("tiny", [tensor(rows(2, index))], request_id=str(index))
        client.async_stream_infer("tiny", [tensor(rows(65))])
        for index in range(4):
            result, error = answers.get(timeout=60)
            assert error is None
            assert result.get_response().id == str(index)
            direct = over_http(rows(2, index))
            np.testing.assert_allclose(result.as_numpy("hidden_states"), direct, rtol=0.02, atol=0.02)
        assert "at most 64 tokens, got 65" in answers.get(timeout=60)[1].message()
    finally:
        client.stop_stream()


def test_shared_memory(client: Any, over_http: Any) -> None:
    values, key = rows(3), f"/expertd-{secrets.token_hex(8)}"
    region = shared_memory.create_shared_memory_region("both", key, 2 * values.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [values])
        client.register_system_shared_memory("both", key, 2 * values.nbytes, headers=INFER)
        (known,) = client.get_system_shared_memory_status(headers=INFER).regions.values()
        assert (known.name, known.key, known.byte_size) == ("both", key, 2 * values.nbytes)
        made = triton.InferInput("hidden_states", list(values.shape), "FP32")
        made.set_shared_memory("both", values.nbytes)
        output = triton.InferRequestedOutput("hidden_states")
        output.set_shared_memory("both", values.nbytes, offset=values.nbytes)
        result = client.infer("tiny", [made], outputs=[output], headers=INFER)
        assert not result.get_response().raw_output_contents
        parameters = result.get_output("hidden_states").parameters
        assert parameters["shared_memory_region"].string_param == "both"
        answer = shared_memory.get_contents_as_numpy(region, np.float32, [3, HIDDEN], values.nbytes)
        np.testing.assert_array_equal(answer, over_http(values))
        client.unregister_system_shared_memory("both", headers=INFER)
        assert not client.get_system_shared_memory_status(headers=INFER).regions
        with pytest.raises(InferenceServerException) as caught:
            client.get_system_shared_memory_status("both", headers=INFER)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_cuda_shared_memory_is_refused_without_a_gpu(client: Any) -> None:
    assert not client.get_cuda_shared_memory_status(headers=INFER).regions
    client.unregister_cuda_shared_memory(headers=INFER)
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("a", b"A" * 88, 0, 64, headers=INFER)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    for name in ("", "a/b"):
        with pytest.raises(
            InferenceServerException, match="name: expected that of a region, without a slash"
        ):
            client.register_cuda_shared_memory(name, b"A" * 88, 0, 64, headers=INFER)


def test_keys_and_their_rights(client: Any) -> None:
    denied = ((None, "UNAUTHENTICATED"), (metadata("x"), "UNAUTHENTICATED"), (ADMIN, "PERMISSION_DENIED"))
    for headers, status in denied:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("tiny", [tensor(rows(1))], headers=headers)
        assert caught.value.status() == f"StatusCode.{status}"
    with pytest.raises(InferenceServerException, match="Authorization: expected Bearer and a key, got none"):
        client.get_server_metadata()
    with pytest.raises(InferenceServerException, match="key admin: expected the right infer, got admin"):
        client.get_system_shared_memory_status(headers=ADMIN)


@pytest.mark.slow
def test_keys_and_requests_in_front_of_http_processes(tmp_path: Path) -> None:
    settings = tiny_settings(**ON, http_workers=2, keys=all_keys(tmp_path / "keys.yaml"))
    with ExitStack() as stack:
        server = stack.enter_context(server_process(settings, tmp_path))
        client = stack.enter_context(triton.InferenceServerClient(grpc_address(server)))
        assert client.infer("tiny", [tensor(rows(3))], headers=INFER).as_numpy("hidden_states").shape
        with pytest.raises(InferenceServerException) as caught:
            client.get_server_metadata()
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=INFER)
        client.async_stream_infer("tiny", [tensor(rows(2))])
        assert answers.get(timeout=60)[1] is None
        server.terminate()
        assert server.process.wait(60) == 0, "streams that are open do not keep it"
        assert "shutting down" in answers.get(timeout=60)[1].message()
