"""A server on a GPU, whose callers keep tensors in shared memory and on GPUs, through tritonclient."""

import base64
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.http as triton

from expertd.kernels import quantize_rows
from expertd.service.settings.model import Settings
from tests.service.apps import binary_request, json_request
from tests.service.gpus import devices_of_servers
from tests.service.processes import ServerProcess, server_process
from tests.service.regions import CUDA, SYSTEM, place, region_input, region_output
from tests.service.shm import shm_file
from tests.service.waiting import wait_for

pytestmark = pytest.mark.gpu

HIDDEN, TOP_K, EXPERTS = 512, 4, 16
GPUS = range(max(1, torch.cuda.device_count()))
BYTES = {"BF16": 2, "FP32": 4}
URL = "/v2/models/layer/infer"


@pytest.fixture(scope="module", params=devices_of_servers())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One for each number of GPUs."""
    model = {
        "name": "layer",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
    }
    given = {"backend": "hopper", "models": [model], "shared_memory": {"enabled": True}}
    settings = Settings.model_validate(given | {"devices": request.param})
    with server_process(settings, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.url}", timeout=60) as http:
        yield http


def tokens(num_tokens: int, datatype: str) -> bytes:
    values = torch.randn(num_tokens, HIDDEN)
    if datatype == "FP32":
        return values.numpy().tobytes()
    return values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def routing(num_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    ids = torch.rand(num_tokens, EXPERTS).argsort(1)[:, :TOP_K].to(torch.int32).numpy()
    return np.ascontiguousarray(ids), torch.rand(num_tokens, TOP_K).numpy()


def in_body(http: httpx.Client, hidden: bytes, datatype: str, given: Any = None) -> bytes:
    """The output of a request that carries its tensors."""
    count = len(hidden) // (HIDDEN * BYTES[datatype])
    tensors = {"hidden_states": (datatype, [count, HIDDEN], hidden)}
    if given is not None:
        tensors["topk_ids"] = ("INT32", [count, TOP_K], given[0].tobytes())
        tensors["topk_weights"] = ("FP32", [count, TOP_K], given[1].tobytes())
    body, length = binary_request(tensors, parameters={"binary_data_output": True})
    answer = http.post(URL, content=body, headers={"Inference-Header-Content-Length": str(length)})
    assert answer.status_code == 200, answer.text
    return answer.content[int(answer.headers["inference-header-content-length"]) :]


def named(
    region: str,
    count: int,
    datatype: str,
    out: str,
    out_offset: int,
    routed: bool = False,
    seconds: float = 0,
) -> bytes:
    """A request with hidden states at 0 of `region`, and ids and weights, if given, right behind them.

    seconds  its timeout; 0: none. With a short one, the output is copied to its place after the step
    """
    size = count * HIDDEN * BYTES[datatype]
    inputs = [region_input(region, [count, HIDDEN], 0, datatype=datatype, size=size)]
    if routed:
        inputs.append(region_input(region, [count, TOP_K], size, "topk_ids", "INT32"))
        inputs.append(region_input(region, [count, TOP_K], size + 4 * count * TOP_K, "topk_weights"))
    parameters = {"timeout": int(1e6 * seconds)}
    return json_request(*inputs, outputs=region_output(out, size, out_offset), parameters=parameters)


@contextmanager
def cuda_region(server: ServerProcess, name: str, data: bytes, device_id: int) -> Iterator[Any]:
    """A registered region with `data`, allocated by this process."""
    from tritonclient.utils import cuda_shared_memory

    region = cuda_shared_memory.create_shared_memory_region(name, len(data), device_id)
    cuda_shared_memory.set_shared_memory_region(region, [np.frombuffer(data, np.uint8)])
    with triton.InferenceServerClient(server.url) as client:
        handle = cuda_shared_memory.get_raw_handle(region)
        client.register_cuda_shared_memory(name, handle.decode(), device_id, len(data))
        try:
            yield region
        finally:
            client.unregister_cuda_shared_memory(name)
            cuda_shared_memory.destroy_shared_memory_region(region)


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("device_id", GPUS)
def test_fp8_values_and_scales_in_cuda_memory(
    server: ServerProcess, http: httpx.Client, device_id: int, count: int
) -> None:
    """The bits are those of a request with the same tensors in its body."""
    made = quantize_rows(torch.randn(count, HIDDEN))
    values, scales = made.data.view(torch.uint8).numpy(), made.scales.contiguous().numpy()
    tensors = {
        "hidden_states": ("UINT8", [count, HIDDEN], values.tobytes()),
        "hidden_states_scale": ("FP32", list(scales.shape), scales.tobytes()),
    }
    body, length = binary_request(tensors, parameters={"binary_data_output": True})
    answer = http.post(URL, content=body, headers={"Inference-Header-Content-Length": str(length)})
    assert answer.status_code == 200, answer.text
    expected = answer.content[int(answer.headers["inference-header-content-length"]) :]
    data = values.tobytes() + scales.tobytes()
    with (
        cuda_region(server, "in", data, device_id),
        cuda_region(server, "out", bytes(len(expected)), device_id) as target,
    ):
        inputs = [
            region_input("in", [count, HIDDEN], 0, datatype="UINT8", size=values.nbytes),
            region_input("in", list(scales.shape), values.nbytes, "hidden_states_scale"),
        ]
        body = json_request(*inputs, outputs=region_output("out", len(expected), 0))
        for _ in range(3):
            answer = http.post(URL, content=body)
            assert answer.status_code == 200, answer.text
            assert contents(target, len(expected)) == expected


def zero(region: Any, size: int) -> None:
    from tritonclient.utils import cuda_shared_memory

    cuda_shared_memory.set_shared_memory_region(region, [np.zeros(size, np.uint8)])


def contents(region: Any, size: int) -> bytes:
    from tritonclient.utils import cuda_shared_memory

    return bytes(cuda_shared_memory.get_contents_as_numpy(region, np.uint8, [size]).tobytes())


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("datatype", BYTES)
@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("device_id", GPUS)
def test_cuda_memory_gives_the_same_bits(
    server: ServerProcess, http: httpx.Client, device_id: int, count: int, datatype: str, routed: bool
) -> None:
    hidden, given = tokens(count, datatype), routing(count)
    expected = in_body(http, hidden, datatype, given if routed else None)
    data = hidden + given[0].tobytes() + given[1].tobytes()
    with (
        cuda_region(server, "in", data, device_id) as source,
        cuda_region(server, "out", bytes(len(hidden) + 64), device_id) as target,
    ):
        for seconds in (0, 0.9):
            zero(target, len(hidden) + 64)
            answer = http.post(URL, content=named("in", count, datatype, "out", 0, routed, seconds))
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["parameters"]["shared_memory_region"] == "out"
            assert contents(target, len(hidden) + 64) == expected + bytes(64)
        assert contents(source, len(data)) == data
    assert http.get(f"{CUDA}/status").json() == []


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("datatype", BYTES)
@pytest.mark.parametrize("count", [1, 7, 300])
def test_system_memory_gives_the_same_bits(
    http: httpx.Client, count: int, datatype: str, routed: bool
) -> None:
    hidden, given = tokens(count, datatype), routing(count)
    expected = in_body(http, hidden, datatype, given if routed else None)
    with shm_file(1 << 22) as file:
        file.write(hidden + given[0].tobytes() + given[1].tobytes())
        register = {"key": file.key, "byte_size": 1 << 22}
        assert http.post(f"{SYSTEM}/region/r/register", json=register).status_code == 200
        for seconds in (0, 0.9):
            file.write(bytes(len(hidden) + 64), 1 << 21)
            answer = http.post(URL, content=named("r", count, datatype, "r", 1 << 21, routed, seconds))
            assert answer.status_code == 200, answer.text
            assert file.read(len(hidden) + 64, 1 << 21) == expected + bytes(64)
        assert http.post(f"{SYSTEM}/unregister").status_code == 200


def test_an_id_outside_the_range_names_no_expert(server: ServerProcess, http: httpx.Client) -> None:
    hidden, (ids, weights) = tokens(7, "BF16"), routing(7)
    weights[:, 1] = 0
    expected = in_body(http, hidden, "BF16", (ids, weights))
    before = slots_without_expert(http)
    for outside in (-1, EXPERTS, 2**31 - 1):
        ids[:, 1], weights[:, 1] = outside, np.nan
        data = hidden + ids.tobytes() + weights.tobytes()
        with (
            cuda_region(server, "in", data, 0),
            cuda_region(server, "out", bytes(len(hidden)), 0) as target,
        ):
            answer = http.post(URL, content=named("in", 7, "BF16", "out", 0, routed=True))
            assert answer.status_code == 200, answer.text
            got = torch.frombuffer(bytearray(contents(target, len(hidden))), dtype=torch.bfloat16)
        want = torch.frombuffer(bytearray(expected), dtype=torch.bfloat16)
        torch.testing.assert_close(got, want)
    wait_for(lambda: slots_without_expert(http) == before + 3 * 7, "the slots are counted")


def slots_without_expert(http: httpx.Client) -> int:
    found = re.search(r"^expertd_slots_without_expert_total\{.*\} (.*)$", http.get("/metrics").text, re.M)
    assert found is not None
    return int(float(found[1]))


def test_what_cannot_be_opened_is_refused(server: ServerProcess, http: httpx.Client) -> None:
    def refused(handle: bytes, device_id: int, num_bytes: int) -> str:
        raw = {"b64": base64.b64encode(handle).decode()}
        body = {"raw_handle": raw, "device_id": device_id, "byte_size": num_bytes}
        answer = http.post(f"{CUDA}/region/bad/register", json=body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"])

    from tritonclient.utils import cuda_shared_memory

    assert refused(bytes(64), 0, 1).startswith("raw_handle: expected a handle of another process's memory")
    with cuda_region(server, "one", bytes(4096), 0) as region:
        handle = base64.b64decode(cuda_shared_memory.get_raw_handle(region))
        assert refused(handle, 0, 1 << 30).startswith("byte_size: expected at most the allocation's ")
        # The handle tells which GPU it is: the caller may count them otherwise.
        raw = {"b64": base64.b64encode(handle).decode()}
        again = {"raw_handle": raw, "device_id": len(GPUS), "byte_size": 4096}
        assert http.post(f"{CUDA}/region/two/register", json=again).status_code == 200, "counted"
        assert http.post(f"{CUDA}/region/two/unregister").status_code == 200
        size = 2 * HIDDEN
        given = {**region_input("one", [1, HIDDEN], 0, datatype="BF16"), "parameters": place("one", size, 0)}
        assert http.post(URL, content=json_request(given)).status_code == 200, "still open"
    assert len(in_body(http, tokens(3, "BF16"), "BF16")) == 3 * size


_CALLER = """
import sys
from tritonclient.utils import cuda_shared_memory
region = cuda_shared_memory.create_shared_memory_region("x", 1 << 20, 0)
print(cuda_shared_memory.get_raw_handle(region).decode(), flush=True)
sys.stdin.read()
"""


def test_a_caller_that_is_killed_takes_nothing_with_it(http: httpx.Client) -> None:
    process = subprocess.Popen([sys.executable, "-c", _CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    handle = process.stdout.readline().decode().strip()
    body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 1 << 20}
    assert http.post(f"{CUDA}/region/dead/register", json=body).status_code == 200
    request = named("dead", 7, "BF16", "dead", 1 << 19)
    assert http.post(URL, content=request).status_code == 200
    process.kill()
    process.communicate()
    assert http.post(URL, content=request).status_code == 200, "the mapping outlives its creator"
    assert http.post(f"{CUDA}/unregister").status_code == 200
    assert len(in_body(http, tokens(3, "BF16"), "BF16")) == 6 * HIDDEN


def test_files_that_are_truncated_under_load_never_stop_the_server(
    server: ServerProcess, http: httpx.Client
) -> None:
    stop = threading.Event()
    with shm_file(1 << 22) as file:

        def truncate() -> None:
            random = np.random.default_rng(0)
            while not stop.is_set():
                os.ftruncate(file.fd, int(random.integers(1 << 22)))
                os.ftruncate(file.fd, 1 << 22)

        register = {"key": file.key, "byte_size": 1 << 22}
        statuses = set()
        thread = threading.Thread(target=truncate)
        thread.start()
        try:
            for _ in range(20):
                statuses.add(http.post(f"{SYSTEM}/region/r/register", json=register).status_code)
                for count in (1, 300):
                    body = named("r", count, "BF16", "r", 1 << 21, routed=True)
                    statuses.add(http.post(URL, content=body).status_code)
                assert http.post(f"{SYSTEM}/region/r/unregister").status_code == 200
        finally:
            stop.set()
            thread.join()
        assert statuses <= {200, 400}
    assert server.process.poll() is None
    assert len(in_body(http, tokens(300, "BF16"), "BF16")) == 300 * 2 * HIDDEN
