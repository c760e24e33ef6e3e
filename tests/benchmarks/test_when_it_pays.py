"""The arithmetic of docs/when-it-pays.md, with figures that are easy to add up."""

import pytest

from benchmarks.engines import when_it_pays
from benchmarks.engines.when_it_pays import CONTEXT, GPU_BYTES, Measured, Model

LAYERS = {"a layer": {1: 1.0, 16: 4.0, 64: 4.0, 1024: 52.0}}  # from 64 on, 0.05 s a token
KNOWN = Measured(LAYERS, call=0.5, memory=1e6)
MODEL = Model("model", 10, 1024, 512, 8, "a layer", 2_000_000, 100)
OF_A_SEQUENCE = CONTEXT * 100 / 1e6  # seconds of attention


def test_experts_take_what_was_measured_and_what_lies_between() -> None:
    def seconds(own: float) -> float:
        return when_it_pays.expert_seconds(MODEL, 8 * own, KNOWN)

    assert [seconds(own) for own in (0.5, 1, 8.5, 64, 544, 1024)] == [1.0, 1.0, 2.5, 4.0, 28.0, 52.0]
    with pytest.raises(ValueError, match=r"^tokens: expected at most 1024 on each GPU, got 1025$"):
        seconds(1025)


def test_a_part_of_the_experts_takes_a_part_of_the_weights_time_or_as_long_as_the_products() -> None:
    def seconds(part: float, own: float) -> float:
        return when_it_pays.part_seconds(MODEL, 8 * own / part, KNOWN, part)

    assert [seconds(0.5, own) for own in (1, 20, 64, 544)] == [2.0, 2.0, 4.0, 28.0]
    assert seconds(0.1, 1) == 1.0  # which even one token takes


def test_in_one_batch_attention_and_experts_add_up() -> None:
    way = when_it_pays.apart(MODEL, 1, 1, KNOWN)
    wire = when_it_pays.wire_seconds(MODEL, 1)
    assert way.sequences == 1
    assert way.step == pytest.approx(10 * (2.0 + OF_A_SEQUENCE + 1.0 + 0.5 + wire))


def test_of_two_batches_that_take_turns_the_longer_half_counts() -> None:
    """With 8 tokens on each expert GPU for each of attention's 8 GPUs."""
    model = MODEL._replace(attention=0)
    way = when_it_pays.apart(model, 8, 32, KNOWN)
    assert way.sequences == 8 * 32
    assert way.step == pytest.approx(10 * 2 * 16 * OF_A_SEQUENCE)


def test_a_gpu_has_as_many_sequences_as_its_memory() -> None:
    known, each = KNOWN._replace(memory=1e12), MODEL.layers * MODEL.cached * CONTEXT
    model = MODEL._replace(attention=int(0.05 * GPU_BYTES), gpus=2)
    room = int((GPU_BYTES / 2 - model.expert_bytes) / each)
    assert model.room(model.expert_bytes) == room
    known = known._replace(layers={"a layer": {1: 1.0, 10**6: 1.0}})
    way = when_it_pays.inside(model, 2, 10 * room, known)
    assert way.sequences == 2 * room
    assert way.step == pytest.approx(10 * (1.0 + (model.attention + room * each / 10) / 1e12))
