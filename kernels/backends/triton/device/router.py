"""Device code: a router's logits, and each token's experts and their weights by them.

The order of sums depends on the router's shape alone: 128 columns in the tensor cores, the sums of 1024
columns one after another in fp32, then those. There is one size of tiles, so a token's bits depend on it and
on the router alone.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(128)  # added up by the tensor cores
LOWEST = tl.constexpr(-0x80000000)  # less than the key of any number
MIN_SUM = tl.constexpr(1e-20)  # see kernels/ops/router.py


@triton.jit
def router_logits(
    tokens, router, logits, num_tokens, num_experts, k,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write logits [parts, num_tokens, num_experts], to be added up: tokens [.., k] times router [.., k].

    A program has one part, PART columns.
    """
    part = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    of_k = tl.arange(0, COLUMNS)
    from_token = tokens + tl.minimum(token, num_tokens - 1)[:, None].to(tl.int64) * k + of_k[None, :]
    from_expert = router + tl.minimum(expert, num_experts - 1)[:, None].to(tl.int64) * k + of_k[None, :]
    total = tl.zeros((EXPERTS, TOKENS), tl.float32)
    for first in tl.range(part * PART, tl.minimum((part + 1) * PART, k), COLUMNS, num_stages=STAGES):
        is_k = (of_k < k - first)[None, :]
        rows = tl.load(from_token + first, mask=is_k, other=0.0)
        weights = tl.load(from_expert + first, mask=is_k, other=0.0)
        # Not a plain sum, which Triton would let the tensor cores add up, with fewer bits. Experts come
        # first, as the larger side of Hopper's needs 64 rows.
        total = tl.fma(tl.dot(weights, tl.trans(rows)), tl.full(total.shape, 1.0, tl.float32), total)
    places = logits + (part.to(tl.int64) * num_tokens + token[None, :]) * num_experts + expert[:, None]
    tl.store(places, total, mask=(token < num_tokens)[None, :] & (expert < num_experts)[:, None])


@triton.jit
def key_of(values):
    """int32 that sorts as fp32 values other than -0 do in torch.sort, where NaN is above all."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """The value with this key; of NaN a NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(keys, index, COUNT: tl.constexpr):
    """(the largest key, the lowest index that has it) of int32 [COUNT], index its places."""
    # Both in one number: what is left of COUNT behind the key
    largest = tl.max((keys.to(tl.int64) << 32) | (COUNT - 1 - index).to(tl.int64), 0)
    return (largest >> 32).to(tl.int32), COUNT - 1 - (largest & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def without_other_groups(keys, expert, num_experts, num_groups, topk_group, EXPERTS: tl.constexpr):
    """keys, LOWEST outside the topk_group best groups, by the sum of a group's two best experts."""
    size, group = num_experts // num_groups, tl.arange(0, 32)
    of_groups = tl.full((32,), LOWEST, tl.int32)
    for each in range(num_groups):
        here = tl.where(expert // size == each, keys, LOWEST)
        key, place = first_largest(here, expert, EXPERTS)
        score = value_of(key)
        if size > 1:
            score += value_of(tl.max(tl.where(expert == place, LOWEST, here), 0))
        of_groups = tl.where(group == each, key_of(score), of_groups)
    beats = of_groups[None, :] > of_groups[:, None]
    beats |= (of_groups[None, :] == of_groups[:, None]) & (group[None, :] < group[:, None])
    is_chosen = tl.sum(beats.to(tl.int32), 1) < topk_group
    chosen = tl.sum(tl.where(is_chosen, 1 << group, 0), 0)  # a bit for each
    return tl.where(((chosen >> (expert // size)) & 1) != 0, keys, LOWEST)


@triton.jit
def route_tokens(
    logits, bias, end_token, topk_ids, topk_weights,
    parts, num_experts, top_k, is_softmax, is_bias_on_logits, renormalize, factor, num_groups, topk_group,
    has_bias, has_end,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write topk_ids and topk_weights [T, top_k] by logits [parts, T, num_experts]; a program has a token.

    The rules are those of kernels/ops/router.py. Tokens from end_token on get no experts.
    """
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_expert, place = expert < num_experts, logits + token * num_experts + expert
    scores = tl.zeros((EXPERTS,), tl.float32)
    for _ in range(parts):
        scores += tl.load(place, mask=is_expert, other=0.0)
        place += tl.num_programs(0).to(tl.int64) * num_experts
    biases = tl.load(bias + expert, mask=expert < num_experts * has_bias, other=0.0)
    if is_bias_on_logits != 0:
        scores += biases
        biases = tl.zeros((EXPERTS,), tl.float32)
    if is_softmax != 0:
        largest = tl.max(tl.where(is_expert, scores, float("-inf")), 0)
        scores = tl.where(is_expert, tl.exp(scores - largest), 0.0)
        scores /= tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    keys = tl.where(is_expert, key_of(scores + biases), LOWEST)
    if topk_group < num_groups:
        keys = without_other_groups(keys, expert, num_experts, num_groups, topk_group, EXPERTS)
    ids, weights = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for each in range(top_k):
        _, chosen = first_largest(keys, expert, EXPERTS)
        is_chosen = expert == chosen
        ids = tl.where(slot == each, chosen, ids)
        weights = tl.where(slot == each, tl.sum(tl.where(is_chosen, scores, 0.0), 0), weights)
        keys = tl.where(is_chosen, LOWEST, keys)
    if renormalize != 0:
        weights /= tl.sum(weights, 0) + tl.where(is_softmax != 0, 0.0, MIN_SUM)
    if token >= tl.load(end_token, mask=has_end != 0, other=0x7FFFFFFF):
        ids = tl.full((SLOTS,), -1, tl.int32)
    tl.store(topk_ids + token * top_k + slot, ids, mask=slot < top_k)
    tl.store(topk_weights + token * top_k + slot, weights * factor, mask=slot < top_k)
