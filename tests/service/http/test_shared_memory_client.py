"""A real server and the unmodified tritonclient utilities; callers that truncate files or die."""

import os
import re
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from expertd.service.settings.loader import load_settings
from tests.paths import DEMO, ROOT
from tests.service.apps import HIDDEN, json_request, rows
from tests.service.processes import ServerProcess, server_process
from tests.service.regions import SYSTEM, enabled, region_input, region_output
from tests.service.shm import shm_file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(enabled(), tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url) as client:
        yield client


def tensor(values: npt.NDArray[Any], name: str = "hidden_states", datatype: str = "FP32") -> Any:
    return triton.InferInput(name, list(values.shape), datatype)


def test_all_tensors_in_one_region(client: Any) -> None:
    values, ids = rows(7), np.tile(np.array([2, 0], np.int32), (7, 1))
    weights = np.full((7, 2), 0.5, np.float32)
    inputs = [tensor(values), tensor(ids, "topk_ids", "INT32"), tensor(weights, "topk_weights")]
    for given, array in zip(inputs, (values, ids, weights), strict=True):
        given.set_data_from_numpy(array)
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
            given = tensor(shown["hidden_states"])
            given.set_data_from_numpy(shown["hidden_states"])
            expected = client.infer("demo", [given]).as_numpy("hidden_states")
    np.testing.assert_array_equal(shown["result"], expected)


@pytest.mark.slow
def test_files_that_are_truncated_under_load_never_stop_the_server(server: ServerProcess) -> None:
    """An access to a mapping of the file would be a SIGBUS, which ends the process."""
    size = 4 * 64 * HIDDEN
    given = region_input("r", [64, HIDDEN])
    body = json_request(given, outputs=region_output("r", size, size))
    statuses: list[int] = []
    stop = threading.Event()
    with shm_file(2 * size) as file, httpx.Client(base_url=f"http://{server.url}", timeout=30) as http:
        register = {"key": file.key, "byte_size": 2 * size}
        assert http.post(f"{SYSTEM}/region/r/register", json=register).status_code == 200

        def truncate() -> None:
            random = np.random.default_rng(0)
            while not stop.is_set():
                os.ftruncate(file.fd, int(random.integers(2 * size)))
                os.ftruncate(file.fd, 2 * size)

        def infer() -> list[int]:
            with httpx.Client(base_url=f"http://{server.url}", timeout=30) as own:
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
