"""Tensors of a GPU in and out: over HTTP, and through memory that client and server share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from expertd_client import AsyncExpertClient, ExpertClient, device_memory
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.fakes import echoing, fake_server
from tests.late import check_late_requests
from tests.waiting import wait_for

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The server's GPU, and its neighbour if there is one."""
    return torch.device("cuda", request.param if torch.cuda.device_count() > request.param else 0)


@pytest.fixture
def client(sharing_server: RunningServer) -> Iterator[ExpertClient]:
    with ExpertClient(sharing_server.url, transport="channel") as made:
        yield made


@pytest.fixture
def over_http(sharing_server: RunningServer) -> Iterator[ExpertClient]:
    with ExpertClient(sharing_server.url, transport="http") as made:
        yield made


def rows(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HIDDEN, generator=generator).to(device, dtype)


def kinds(server: RunningServer) -> set[str]:
    return {str(channel["memory"]) for channel in server.channels()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_stay_on_their_device(
    client: ExpertClient, over_http: ExpertClient, device: torch.device, dtype: torch.dtype
) -> None:
    for count in (1, 64, 0, 300, 5):
        values = rows(count, device, dtype)
        for given in (values, values[::2], values.T.contiguous().T):
            answer = client.infer(MODEL, given)
            assert (answer.device, answer.dtype) == (device, dtype)
            assert torch.equal(answer, over_http.infer(MODEL, given))


def test_the_memory_is_the_gpus(
    client: ExpertClient,
    sharing_server: RunningServer,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.infer(MODEL, rows(5, device))
    assert kinds(sharing_server) == {"cuda"}
    client.close()
    wait_for(lambda: not sharing_server.channels(), "the channel is closed")
    assert caplog.messages == []


def test_routing_from_either_side(
    client: ExpertClient, over_http: ExpertClient, device: torch.device
) -> None:
    values = rows(40, device)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(40)])
    weights = torch.rand(40, TOP_K)
    expected = over_http.infer(MODEL, values, ids, weights)
    for given_ids in (ids, ids.to(device), ids.int().to(device), ids.numpy()):
        for given_weights in (weights, weights.to(device)):
            assert torch.equal(client.infer(MODEL, values, given_ids, given_weights), expected)


def test_out_and_output_dtype(client: ExpertClient, over_http: ExpertClient, device: torch.device) -> None:
    values = rows(33, device, torch.bfloat16)
    expected = over_http.infer(MODEL, values, output_dtype=torch.float32)
    for out in (torch.empty_like(expected), torch.empty(33, HIDDEN)):
        assert client.infer(MODEL, values, out=out) is out
        assert torch.equal(out.to(device), expected)


def test_threads_with_streams_of_their_own(
    client: ExpertClient, over_http: ExpertClient, device: torch.device
) -> None:
    """A place that one stream still copies from must not be written to for another one."""
    batches = [rows(200 + number, device, torch.bfloat16) for number in range(6)]
    expected = [over_http.infer(MODEL, batch) for batch in batches]

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for _ in range(30):
                answer = client.infer(MODEL, batches[number])
                torch.testing.assert_close(answer, expected[number], rtol=0.02, atol=1e-3)

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_host_memory_where_the_driver_refuses(
    sharing_server: RunningServer,
    over_http: ExpertClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(index: int, num_bytes: int) -> None:
        raise device_memory.DeviceMemoryError("cuIpcGetMemHandle: expected CUDA_SUCCESS, got status 801")

    monkeypatch.setattr("expertd_client.channel.opening.GpuAllocation", refused)
    values = rows(9, torch.device("cuda", 0))
    with ExpertClient(sharing_server.url) as client:
        for _ in range(2):
            assert torch.equal(client.infer(MODEL, values), over_http.infer(MODEL, values))
        assert (client.transport, kinds(sharing_server)) == ("channel", {"system"})
    (warning,) = caplog.messages
    assert "memory of GPU 0: cuIpcGetMemHandle: expected CUDA_SUCCESS, got status 801" in warning


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_without_copies(
    over_http: ExpertClient, sharing_server: RunningServer, device: torch.device, dtype: torch.dtype
) -> None:
    datatype = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}[dtype]
    with over_http.open_channel(MODEL, max_tokens=300, datatype=datatype, device=device) as channel:
        assert kinds(sharing_server) == {"cuda"}
        for turn, count in enumerate((300, 1, 64, 299, 300)):
            slot = channel.slots[turn % 4]
            assert (slot.hidden_states.device, slot.hidden_states.dtype) == (device, dtype)
            values = rows(count, device, dtype)
            slot.hidden_states[:count] = values
            output = channel.wait(channel.submit(slot, count))
            assert output.data_ptr() == slot.output.data_ptr()
            assert torch.equal(output, over_http.infer(MODEL, values))


async def test_channels_of_event_loops_without_copies(
    over_http: ExpertClient, sharing_server: RunningServer, device: torch.device
) -> None:
    """What the current stream has yet to write is part of the request."""
    async with (
        AsyncExpertClient(sharing_server.url) as client,
        await client.open_channel(MODEL, max_tokens=300, datatype="BF16", device=device) as channel,
    ):
        assert kinds(sharing_server) == {"cuda"}
        for turn, count in enumerate((300, 1, 64, 299, 300)):
            slot, values = channel.slots[turn % 4], rows(count, device, torch.bfloat16)
            expected = over_http.infer(MODEL, values)
            with torch.cuda.device(device):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            slot.hidden_states[:count] = values
            output = await channel.infer(slot, count)
            assert output.data_ptr() == slot.output.data_ptr()
            assert torch.equal(output, expected)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_timeouts_that_pass_at_about_the_time_of_the_answer(
    over_http: ExpertClient, device: torch.device, where: str
) -> None:
    """The GPU writes outputs and their sequence numbers, whatever the host has said meanwhile."""
    place = device if where == "gpu" else torch.device("cpu")
    with over_http.open_channel(MODEL, max_tokens=256, num_slots=2, device=place) as channel:
        outcomes = check_late_requests(over_http, channel, 100)
        assert outcomes["right"] > 10, outcomes
        assert outcomes["DeadlineError"] > 10, outcomes


def test_memory_outlives_its_channel(over_http: ExpertClient) -> None:
    """Tensors of a closed channel are still memory of ours, freed with the last of them."""
    free, _ = torch.cuda.mem_get_info(0)
    channel = over_http.open_channel(MODEL, max_tokens=4096, num_slots=16, device="cuda:0")
    slot = channel.slots[0]
    channel.close()
    slot.hidden_states[:] = 1
    assert slot.hidden_states.sum().item() == 4096 * HIDDEN
    num_bytes = 16 * 2 * slot.hidden_states.nbytes
    del channel, slot
    wait_for(lambda: torch.cuda.mem_get_info(0)[0] > free - num_bytes // 4, "it is freed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_stay_on_their_device_over_http(dtype: torch.dtype) -> None:
    values = torch.randn(300, 64, device="cuda").to(dtype)
    with fake_server(echoing) as server, ExpertClient(server.url, transport="http") as client:
        for given in (values, values[::3], values[:0], values.T):
            answer = client.infer("m", given)
            assert (answer.device, answer.dtype) == (values.device, dtype)
            assert torch.equal(answer, given)


def test_out_on_either_device() -> None:
    values = torch.randn(300, 64, device="cuda")
    with fake_server(echoing) as server, ExpertClient(server.url, transport="http") as client:
        for out in (torch.empty_like(values), torch.empty(300, 64)):
            assert client.infer("m", values, out=out) is out
            assert torch.equal(out.cpu(), values.cpu())
        on_device = torch.empty_like(values)
        client.infer("m", values.cpu(), out=on_device)
        assert torch.equal(on_device, values)


def test_calls_in_turn_do_not_share_memory() -> None:
    with fake_server(echoing) as server, ExpertClient(server.url, transport="http") as client:
        answers = [client.infer("m", torch.full((64, 64), float(n), device="cuda")) for n in range(50)]
    for number, answer in enumerate(answers):
        assert bool((answer == number).all())
