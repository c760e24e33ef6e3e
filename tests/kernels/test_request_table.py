"""The table of requests: its layout in memory, and the kernels that read it."""

import re
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.kernels import Backend, resolve_backend
from expertd.kernels.request_table import MAX_REQUESTS, RequestRows, RequestTable
from tests.kernels.helpers import fresh_generator
from tests.paths import ROOT

HEADER = (ROOT / "kernels/csrc/request_table.cuh").read_text()


def test_the_reference_backend_captures_no_graphs() -> None:
    backend = resolve_backend("reference")
    rows = torch.zeros(1, 128)
    for call in (Backend.gather_rows, Backend.scatter_rows):
        arguments: Any = (None, rows, None, None) if call is Backend.gather_rows else (rows, None)
        with pytest.raises(RuntimeError, match="backend: expected one with request tables, got 'reference'"):
            call(backend, *arguments)


def test_both_sides_agree_about_the_fields() -> None:
    """The device's struct has the fields that the host packs, in the same order."""
    request = re.search(r"struct alignas\(16\) Request \{(.*?)\};", HEADER, re.DOTALL)
    assert request is not None
    fields = re.findall(r"(u64|u32) ([\w, ]+);", request[1])
    names = [(kind, name.strip()) for kind, listed in fields for name in listed.split(",")]
    assert names == [
        *(("u64", name) for name in ("hidden_states", "topk_ids", "topk_weights", "out")),
        *(("u32", name) for name in ("first_token", "end_token", "out_datatype", "has_int64_ids")),
    ]
    assert struct.calcsize("<QQQQIIII") == 48


def test_more_requests_than_there_is_room_for_are_refused() -> None:
    """Before anything is written: the table may be read for the step before."""
    contents = bytearray(b"\1" * 64)
    table: Any = SimpleNamespace(_bytes=memoryview(contents))
    request = RequestRows(1, 16, 32, torch.float32)
    with pytest.raises(ValueError, match=r"^requests: expected at most 256, got 257$"):
        RequestTable.write(table, [request] * (MAX_REQUESTS + 1))
    assert contents == b"\1" * 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton"])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 40], [1] * MAX_REQUESTS, []])
def test_rows_are_gathered_and_scattered(sizes: list[int], name: str) -> None:
    """Rows of requests follow each other, padding stays as it was, and nothing else is written."""
    h, top_k, num_experts, most = 256, 5, 1 << 19, MAX_REQUESTS + 3
    backend, table, generator = resolve_backend(name), RequestTable(), fresh_generator()
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    requests, outs = [], []
    for index, size in enumerate(sizes):
        rows = torch.randn(size, h, generator=generator).to(torch.bfloat16)
        ids = torch.randint(-3, 1 << 20, (size, top_k), generator=generator)
        ids = ids if index % 2 else ids.int()
        weights = torch.randn(size, top_k, generator=generator)
        placed = [x.pin_memory() if index % 3 else x.cuda() for x in (rows, ids, weights)]
        out = torch.full((size + 1, h), 7, dtype=dtypes[index % 3])
        outs.append(out.pin_memory() if index % 2 else out.cuda())
        requests.append((placed, outs[-1], index % 2 == 1))
    table.write(
        [
            RequestRows(
                len(rows),
                rows.data_ptr(),
                out.data_ptr(),
                out.dtype,
                ids.data_ptr(),
                weights.data_ptr(),
                wide,
            )
            for (rows, ids, weights), out, wide in requests
        ]
    )
    assert int(table.end_token) == sum(sizes)
    hidden_states = torch.full((most, h), 9, dtype=torch.bfloat16, device="cuda")
    topk_ids = torch.full((most, top_k), 9, dtype=torch.int32, device="cuda")
    topk_weights = torch.full((most, top_k), 9.0, device="cuda")
    backend.gather_rows(table, hidden_states, topk_ids, topk_weights, num_experts)
    end = sum(sizes)
    for tensor, part in ((hidden_states, 0), (topk_ids, 1), (topk_weights, 2)):
        wanted = [request[0][part].cpu() for request in requests]
        if part == 1:
            wanted = [ids.where((ids >= 0) & (ids < num_experts), -1) for ids in wanted]
        assert torch.equal(
            tensor[:end].cpu(),
            torch.cat([w.to(tensor.dtype) for w in wanted]) if wanted else tensor[:0].cpu(),
        )
    assert (topk_ids[end:] == -1).all()
    assert (hidden_states[end:] == 9).all()
    results = torch.randn(most, h, device="cuda")
    backend.scatter_rows(results, table)
    torch.cuda.synchronize()
    start = 0
    for size, out in zip(sizes, outs, strict=True):
        assert torch.equal(out[:size].cpu(), results[start : start + size].to(out.dtype).cpu())
        assert (out[size:] == 7).all()
        start += size


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "ids", "expected"),
    [
        (torch.int64, [1 << 32, (1 << 32) + 5, -(1 << 40), 6, (1 << 32) - 1, 8], [-1, -1, -1, 6, -1, -1]),
        (torch.int64, [-1, -(1 << 63), (1 << 63) - 1, 7, 9, 0], [-1, -1, -1, 7, -1, 0]),
        (torch.int32, [-1, -(1 << 31), (1 << 31) - 1, 7, 8, 0], [-1, -1, -1, 7, -1, 0]),
    ],
)
def test_ids_outside_the_experts_name_none(dtype: torch.dtype, ids: list[int], expected: list[int]) -> None:
    table, given = RequestTable(), torch.tensor([ids], dtype=dtype).cuda()
    rows, weights = torch.zeros(1, 128, dtype=torch.bfloat16).cuda(), torch.full((1, 6), torch.nan).cuda()
    out = torch.empty_like(rows)
    addresses = rows.data_ptr(), out.data_ptr(), out.dtype, given.data_ptr(), weights.data_ptr()
    table.write([RequestRows(1, *addresses, dtype == torch.int64)])
    topk_ids = torch.full((1, 6), 99, dtype=torch.int32, device="cuda")
    backend = resolve_backend("hopper")
    backend.gather_rows(table, torch.empty_like(rows), topk_ids, torch.empty_like(weights), 8)
    assert topk_ids.tolist() == [expected]


@pytest.mark.gpu
def test_more_slots_than_threads_are_refused() -> None:
    wide = torch.empty(1, 257, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="topk_ids top_k: expected at most 256, got 257"):
        resolve_backend("hopper").gather_rows(RequestTable(), torch.empty(1, 128, device="cuda"), wide, wide)
