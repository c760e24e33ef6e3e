"""Triton's unmodified client with a real server process, compared with the same layer run directly."""

import os
import re
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from expertd.service.engine.loading import load
from expertd.service.engine.steps import Runner
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.loader import load_settings
from tests.paths import DEMO, ROOT
from tests.service.apps import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, json_request, rows, tiny_settings
from tests.service.processes import ServerProcess, server_process
from tests.service.regions import SYSTEM, region_input, region_output
from tests.service.shm import shm_file
from tests.service.waiting import wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = [MODEL, {**MODEL, "name": "later", "load": False}]
    settings = tiny_settings(models=models, shared_memory={"enabled": True})
    with server_process(settings, tmp_path_factory.mktemp("server")) as process:
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


def test_all_tensors_in_one_region(client: Any) -> None:
    values, ids = rows(7), np.tile(np.array([2, 0], np.int32), (7, 1))
    weights = np.full((7, 2), 0.5, np.float32)
    inputs = [tensor(values), tensor(ids, "topk_ids", "INT32"), tensor(weights, "topk_weights")]
    expected = client.infer("tiny", inputs).as_numpy("hidden_states")

    key = f"/expertd-test-{secrets.token_hex(8)}"
    region = shared_memory.create_shared_memory_region("all", key, 1 << 16)
    try:
        shared_memory.set_shared_memory_region(region, [values, ids, weights])
        client.register_system_shared_memory("all", key, 1 << 16)
        assert client.get_system_shared_memory_status("all") == [
            {"name": "all", "key": key, "offset": 0, "byte_size": 1 << 16}
        ]
        offset = 0
        for given, array in zip(inputs, (values, ids, weights), strict=True):
            given.set_shared_memory("all", array.nbytes, offset)
            offset += array.nbytes
        np.testing.assert_array_equal(client.infer("tiny", inputs).as_numpy("hidden_states"), expected)
        output = triton.InferRequestedOutput("hidden_states")
        output.set_shared_memory("all", values.nbytes, 8192)
        result = client.infer("tiny", inputs, outputs=[output])
        assert result.get_output("hidden_states")["parameters"]["shared_memory_region"] == "all"
        got = shared_memory.get_contents_as_numpy(region, np.float32, [7, HIDDEN], 8192)
        np.testing.assert_array_equal(got, expected)
        client.unregister_system_shared_memory("all")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="expected a registered region, got 'all'"):
            client.infer("tiny", inputs)
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_the_example_of_the_document_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "transports.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    settings = load_settings(DEMO)
    given_in_the_text = {"enabled": True, "key_prefix": "expertd-"}
    assert "--set 'shared_memory={enabled: true, key_prefix: expertd-}'" in text
    allowed = settings.shared_memory.model_copy(update=given_in_the_text)
    with server_process(settings.model_copy(update={"shared_memory": allowed}), tmp_path) as server:
        shown: dict[str, Any] = {}
        own = code.replace('"/expertd-mine"', f'"/expertd-mine-{os.getpid()}"')
        assert own != code
        exec(own.replace("127.0.0.1:8000", server.url), shown)
        with triton.InferenceServerClient(server.url) as client:
            given = [tensor(shown["hidden_states"])]
            expected = client.infer("demo", given).as_numpy("hidden_states")
    np.testing.assert_array_equal(shown["result"], expected)


@pytest.mark.thorough
def test_files_that_are_truncated_under_load_never_stop_the_server(server: ServerProcess) -> None:
    """An access to a mapping of the file would be a SIGBUS, which ends the process."""
    size = 4 * 64 * HIDDEN
    given = region_input("r", [64, HIDDEN])
    body = json_request(given, outputs=region_output("r", size, size))
    statuses: list[int] = []
    stop = threading.Event()
    with shm_file(2 * size) as file, httpx.Client(base_url=f"http://{server.url}", timeout=60) as http:
        register = {"key": file.key, "byte_size": 2 * size}
        assert http.post(f"{SYSTEM}/region/r/register", json=register).status_code == 200

        def truncate() -> None:
            random = np.random.default_rng(0)
            while not stop.is_set():
                os.ftruncate(file.fd, int(random.integers(2 * size)))
                os.ftruncate(file.fd, 2 * size)

        def infer() -> list[int]:
            with httpx.Client(base_url=f"http://{server.url}", timeout=60) as own:
                answers = [own.post("/v2/models/tiny/infer", content=body) for _ in range(150)]
            for answer in answers:
                if answer.status_code == 400:
                    assert "got one that was shrunk to " in answer.json()["error"]
            return [answer.status_code for answer in answers]

        with ThreadPoolExecutor(5) as pool:
            pool.submit(truncate)
            try:
                for done in [pool.submit(infer) for _ in range(4)]:
                    statuses += done.result()
            finally:
                stop.set()
        assert set(statuses) == {200, 400}, "some were hit, some not"
        assert server.process.poll() is None
        file.write(rows(64))
        answer = http.post("/v2/models/tiny/infer", content=body)
        assert answer.status_code == 200, answer.text
        direct = http.post("/v2/models/tiny/infer", content=json_request(given)).json()["outputs"][0]["data"]
        np.testing.assert_allclose(file.floats(64, HIDDEN, size).ravel(), np.array(direct, np.float32))
        assert http.post(f"{SYSTEM}/unregister").status_code == 200
