"""Device code: rows of a step's requests, from where a request table says and back; one program per token."""

import triton
import triton.language as tl

REQUESTS = tl.constexpr(256)  # of a table, at most
# The layout of kernels/request_table.py, in words of 4 bytes.
HEADER = tl.constexpr(4)
REQUEST = tl.constexpr(12)
IDS = tl.constexpr(2)
WEIGHTS = tl.constexpr(4)
OUT = tl.constexpr(6)
FIRST_TOKEN = tl.constexpr(8)
END_TOKEN = tl.constexpr(9)
DATATYPE = tl.constexpr(10)
HAS_INT64_IDS = tl.constexpr(11)


@triton.jit
def find_request(table, token):
    """(its place in the table, the token's row in it) of a token that is no padding."""
    number = tl.arange(0, REQUESTS)
    words = table.to(tl.pointer_type(tl.int32))
    # All at once, since a read of host memory takes more than a microsecond; those past the last are old.
    first = tl.load(words + HEADER + REQUEST * number + FIRST_TOKEN)
    end = tl.load(words + HEADER + REQUEST * number + END_TOKEN)
    is_mine = (number < tl.load(words + 1)) & (first <= token) & (token < end)
    row = token - tl.sum(tl.where(is_mine, first, 0), 0)
    return words + HEADER + REQUEST * tl.sum(tl.where(is_mine, number, 0), 0), row.to(tl.int64)


@triton.jit
def address(request, WORD: tl.constexpr):
    """An address in the table."""
    return tl.load((request + WORD).to(tl.pointer_type(tl.int64)))


@triton.jit
def gather_rows(
    table, hidden_states, topk_ids, topk_weights, h, top_k, num_experts,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write hidden_states bf16 [T, h] and, unless top_k is 0, topk_ids and topk_weights [T, top_k].

    Ids that name no expert become -1, and those of padding.
    """
    token, slot = tl.program_id(0), tl.arange(0, SLOTS)
    is_slot, place = slot < top_k, tl.program_id(0).to(tl.int64) * top_k + slot
    if token < tl.load(table.to(tl.pointer_type(tl.int32))):
        request, row = find_request(table, token)
        from_row = tl.multiple_of(address(request, 0), 16).to(tl.pointer_type(tl.bfloat16)) + row * h
        for first in range(0, h, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(from_row + column, mask=column < h)
            tl.store(hidden_states + token.to(tl.int64) * h + column, values, mask=column < h)
        if top_k > 0:
            given = row * top_k + slot
            if tl.load(request + HAS_INT64_IDS) != 0:
                wide = tl.load(
                    address(request, IDS).to(tl.pointer_type(tl.int64)) + given, mask=is_slot, other=-1
                )
            else:
                narrow = address(request, IDS).to(tl.pointer_type(tl.int32)) + given
                wide = tl.load(narrow, mask=is_slot, other=-1).to(tl.int64)
            id = tl.where((wide >= 0) & (wide < num_experts), wide, -1).to(tl.int32)
            weights = address(request, WEIGHTS).to(tl.pointer_type(tl.float32)) + given
            tl.store(topk_ids + place, id, mask=is_slot)
            tl.store(topk_weights + place, tl.load(weights, mask=is_slot, other=0.0), mask=is_slot)
    else:
        tl.store(topk_ids + place, -1, mask=is_slot)


@triton.jit
def write_row(to, row, values, column, h):
    """Write columns of a row of the dtype of `to`."""
    tl.store(to + row * h + column, values.to(to.dtype.element_ty), mask=column < h)


@triton.jit
def scatter_rows(table, rows, h, BLOCK: tl.constexpr):
    """Write rows fp32 [T, h] to the requests, each in its datatype."""
    token = tl.program_id(0)
    if token < tl.load(table.to(tl.pointer_type(tl.int32))):
        request, row = find_request(table, token)
        out, datatype = tl.multiple_of(address(request, OUT), 16), tl.load(request + DATATYPE)
        for first in range(0, h, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(rows + token.to(tl.int64) * h + column, mask=column < h)
            if datatype == 0:
                write_row(out.to(tl.pointer_type(tl.bfloat16)), row, values, column, h)
            elif datatype == 1:
                write_row(out.to(tl.pointer_type(tl.float16)), row, values, column, h)
            else:
                write_row(out.to(tl.pointer_type(tl.float32)), row, values, column, h)
