"""Device calls: both sides agree about memory, and the client has the PTX of its kernels."""

import re
import struct

import pytest

from expertd.device_calls import FIELD_BITS, MAX_SLOTS, REFUSED, header
from expertd.kernels import Backend, device_calls, resolve_backend
from expertd.kernels.request_table import MAX_REQUESTS
from expertd_client.channel import device_channel
from expertd_client.channel.layout import MODEL, REQUEST, WORD_BYTES
from tests.kernels.device_call_ptx import PTX, SOURCE, compiled
from tests.paths import ROOT

SERVERS, CALLERS = (ROOT / "kernels/csrc/device_calls.cuh").read_text(), SOURCE.read_text()
_SIZES = {"u64": "Q", "u32": "I"}


def fields(source: str, name: str) -> list[tuple[str, str]]:
    """(type, name) of a struct's fields."""
    body = re.search(rf"struct (?:alignas\(16\) )?{name} \{{(.*?)\}};", source, re.DOTALL)
    assert body is not None
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", body[1])
    listed = re.findall(r"(u64|u32) ([^;]+);", text)
    return [(kind, field.strip()) for kind, names in listed for field in names.split(",")]


def packing(source: str, name: str) -> str:
    """The format of `struct`, without counts of arrays."""
    return "<" + "".join(_SIZES[kind] for kind, _ in fields(source, name))


def test_both_sides_have_one_header() -> None:
    for source in (SERVERS, CALLERS):
        assert f"kFieldBits = {FIELD_BITS}, kSequenceShift = 2 * kFieldBits;" in source
        assert "kSequences = 1ull << (64 - kSequenceShift);" in source
    assert header(2**40 - 1, 2**12 - 1, 2**12 - 1) == 2**64 - 1
    assert [header(1, 0, 0), header(0, 0, 1), header(0, 1, 0)] == [1 << 24, 1 << 12, 1]
    refused = re.findall(r"kRefused = 1ull << (\d+)", SERVERS + CALLERS)
    assert refused == ["63", "63"]
    assert REFUSED == 1 << 63


def test_slots_have_the_fields_that_the_host_packs() -> None:
    names = [name for _, name in fields(SERVERS, "CallSlot")]
    assert names == [
        *("header", "hidden_states", "topk_ids", "topk_weights", "answer", "out", "layers", "sequence"),
        *("max_tokens", "num_models", "out_datatype", "unused"),
    ]
    assert device_calls._SLOT.size == struct.calcsize(packing(SERVERS, "CallSlot")) == 80
    assert "kMaxCalls = kMostRequests;" in SERVERS
    assert f"kMostRequests = {MAX_SLOTS};" in (ROOT / "kernels/csrc/request_table.cuh").read_text()
    assert MAX_SLOTS == MAX_REQUESTS


def test_places_have_the_fields_that_the_client_packs() -> None:
    names = [name for _, name in fields(CALLERS, "CallPlace")]
    assert names == [
        *("header", "hidden_states", "topk_ids", "topk_weights", "answer", "out", "failure", "on_host"),
        *("limit", "sequence", "blocks", "holds", "is_line", "unused"),
    ]
    assert device_channel._PLACE.format == "<10Q3I4x"
    assert device_channel._PLACE.size == struct.calcsize(packing(CALLERS, "CallPlace"))


def test_kernels_write_the_fields_of_a_request_line() -> None:
    assert f"kNumTokensOffset = {WORD_BYTES}," in CALLERS
    assert f"kModelOffset = {WORD_BYTES + REQUEST.size - MODEL.size};" in CALLERS


def test_steps_have_the_fields_that_the_host_writes() -> None:
    listed = re.search(r"struct CallStep \{(.*?)CallAnswer answers", SERVERS, re.DOTALL)
    assert listed is not None
    kinds = re.findall(r"^    (u64|u32) ([^;]+);", listed[1], re.M)
    names = [(kind, name.strip()) for kind, many in kinds for name in many.split(",")]
    assert [name for _, name in names[:4]] == ["until_word", "counts", "on_host", "taken"]
    first = struct.calcsize("<" + "".join(_SIZES[kind] for kind, _ in names))
    assert first == device_calls._STEP.size + device_calls._OF_STEP_BYTES
    assert struct.calcsize(packing(SERVERS, "CallAnswer")) == 16
    assert first + 16 * MAX_SLOTS == device_calls._STEP_BYTES
    assert re.search(r"CallLayer \{\s+u32 number;.*\s+u16 top_k, num_experts;", SERVERS)
    assert device_calls._LAYER.format == "<IHH"


def test_the_reference_backend_has_no_device_calls() -> None:
    backend = resolve_backend("reference")
    assert not backend.capabilities.device_calls
    with pytest.raises(RuntimeError, match="backend: expected one with device calls, got 'reference'"):
        Backend.call_graph(backend, None, (), ())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="backend: expected one with device calls, got 'reference'"):
        Backend.answer_calls(backend, None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="backend: expected one with device calls, got 'reference'"):
        Backend.call_experts(backend, *[None] * 7)  # type: ignore[arg-type]


def test_the_ptx_is_of_the_source() -> None:
    """Else run `python -m tests.kernels.device_call_ptx`."""
    ours, theirs = compiled(), PTX.read_bytes()
    same_compiler = re.findall(rb"// Cuda compilation tools[^\n]*", ours + theirs)
    if len(set(same_compiler)) == 1:
        assert ours == theirs
    for name in (b"send_call", b"wait_call"):
        assert b".visible .entry %b(" % name in theirs
