"""Tensors of a GPU in and out."""

import pytest
import torch

from expertd_client import ExpertClient
from tests.fakes import echoing, fake_server

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_stay_on_their_device(dtype: torch.dtype) -> None:
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
