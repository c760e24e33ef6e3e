"""What the next step computes: chunks, callers, models; without a device or threads."""

from collections import Counter

import pytest

from expertd.service.engine.chunks import chunk_size
from expertd.service.engine.queues import Queues
from expertd.service.engine.steps import State, Submission
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.parts import Limits
from tests.service.apps import tiny_settings
from tests.service.engine.filled import Filled
from tests.service.runners import EchoRunner, layer_request


@pytest.mark.parametrize(
    ("num_tokens", "most", "sizes"),
    [
        (4096, 1024, [1024, 1024, 1024, 1024]),
        (1100, 1024, [576, 524]),
        (2049, 1024, [704, 704, 641]),
        (1025, 1024, [576, 449]),
        (10, 8, [8, 2]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_chunks_are_about_equal(num_tokens: int, most: int, sizes: list[int]) -> None:
    got = []
    while num_tokens:
        got.append(chunk_size(num_tokens, most))
        num_tokens -= got[-1]
    assert got == sizes


SMALL = {"max_request_tokens": 8, "max_batch_tokens": 8, "prefill_chunk_tokens": 0}


@pytest.mark.parametrize(
    ("limits", "sizes", "steps"),
    [
        pytest.param({}, (32, 20), [[32], [20]], id="long ones alone are computed whole"),
        pytest.param({}, (32, 32, 1, 2), [[1, 2], *[[8]] * 8], id="chunks and others take turns"),
        pytest.param({}, (1, 32), [[1], *[[8]] * 4], id="a long one last"),
        pytest.param({}, (32, 1), [[1], *[[8]] * 4], id="a long one first"),
        pytest.param({"prefill_chunk_tokens": 0}, (32, 1), [[32], [1]], id="no chunks"),
        pytest.param({"join_chunks": True}, (32, 32, 1, 2), [[1, 2, 8], *[[8]] * 7], id="chunks join others"),
        pytest.param(
            {"join_chunks": True},
            (32, *[8] * 6),
            [[8] * 4, [8] * 4, [8], [8]],
            id="others leave room for a chunk that joins them",
        ),
        pytest.param(
            {"join_chunks": True, "prefill_chunk_tokens": 31},
            (32, 31, 31),
            [[31, 1], [31, 1], [30]],
            id="a chunk leaves room for others however large it may be",
        ),
        pytest.param(SMALL, (2,) * 6, [[2] * 4, [2] * 2], id="at most max_batch_tokens in a step"),
        pytest.param(SMALL, (4, 8, 1), [[4], [8], [1]], id="small ones do not overtake a large one"),
    ],
)
def test_steps(limits: dict[str, int], sizes: tuple[int, ...], steps: list[list[int]]) -> None:
    filled = Filled(None, **limits)
    filled.add(*sizes)
    assert filled.rest() == steps


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ([("0", 128)] * 3 + [("1", 128)] * 2, "01010"),
        ([("0", 128), ("0", 128), ("1", 128), ("1", 1), ("1", 1)], "11010"),
    ],
)
def test_models_alternate_but_for_urgent_requests(given: list[tuple[str, int]], order: str) -> None:
    filled = Filled({"0": 1.0, "1": 1.0}, **SMALL)
    for model, priority in given:
        filled.queues[model].note(8, 0.001)
        filled.add(8, model=model, priority=priority)
    assert "".join(filled.chunks()[0].submission.model for _ in given) == order


def test_urgent_requests_come_first_and_equal_ones_in_their_order() -> None:
    filled = Filled(None, **SMALL)
    given = [filled.add(8, priority=priority)[0] for priority in (128, 7, 255, 128, 7, 1)]
    assert filled.queues.remove(given[4])
    order = [given.index(filled.chunks()[0].submission) for _ in range(5)]
    assert order == [5, 1, 0, 3, 2]
    filled.add(4, 8, priority=1)
    filled.add(4, priority=2)
    assert filled.rest() == [[4], [8], [4]], "a less urgent one does not overtake a large one"


def test_others_wait_for_one_chunk_however_often_they_come() -> None:
    filled = Filled()
    filled.add(32, 1)
    steps = []
    for _ in range(6):
        steps.append(filled.step())
        filled.add(1)
    assert steps == [[1], [8], [1, 1], [8], [1, 1], [8]]


def test_requests_that_arrive_while_a_long_one_is_computed_compete_with_the_next() -> None:
    filled = Filled()
    filled.add(32)
    whole = filled.queues.next_step()
    assert [chunk.request.num_tokens for chunk in whole] == [32]
    filled.add(1)
    filled.queues.end(whole[0], b"")
    assert filled.step() == [1]
    filled.add(32)
    assert filled.step() == [8], "others may arrive during this step, too"


def test_requests_one_after_the_other_do_not_compete() -> None:
    filled = Filled()
    for _ in range(3):
        filled.add(1)
        assert filled.step() == [1]
        filled.add(32)
        assert filled.step() == [32]
        filled.queues.just_ended = False  # sources have been polled


def test_requests_stop_competing_after_some_time() -> None:
    filled = Filled()
    filled.add(32, 1)
    assert [filled.step(), filled.step()] == [[1], [8]]
    filled.now = 9.9
    assert filled.step() == [8]
    filled.now = 10.1
    assert filled.step() == [16], "the rest"


def test_requests_of_several_models_compete() -> None:
    filled = Filled({"0": 1.0, "1": 1.0})
    filled.add(32)
    filled.add(1, model="1")
    steps = [filled.step() for _ in range(5)]
    assert sorted(steps) == [[1], [8], [8], [8], [8]]
    assert steps.index([1]) <= 1


@pytest.mark.parametrize("join_chunks", [False, True])
def test_priorities_hold_for_long_requests(join_chunks: bool) -> None:
    filled = Filled(join_chunks=join_chunks)
    filled.add(16, priority=2)
    filled.add(1, priority=3)
    assert filled.step() == [8], "the other one is less urgent"
    filled.add(1, 1, priority=1)
    steps = [[1, 1, 8]] if join_chunks else [[1, 1], [8]]
    assert [filled.step() for _ in steps] == steps
    assert filled.rest() == [[1]]


def test_more_urgent_requests_need_not_wait_for_chunks() -> None:
    filled = Filled()
    filled.add(32, priority=2)
    for _ in range(3):
        filled.add(1, priority=1)
        assert filled.step() == [1]
    assert filled.step() == [8]


def test_callers_share_the_long_requests_of_a_model() -> None:
    filled = Filled()
    filled.add(32, 32, 32, caller=1)
    filled.add(32, caller=2)
    callers = []
    while filled.queues.waiting_models:
        callers += [chunk.submission.caller for chunk in filled.chunks()]
    assert callers == [1, 2, 1, 1]


def test_what_is_left_of_a_removed_request_is_not_computed() -> None:
    filled = Filled()
    first, second = filled.add(32, 32)
    filled.add(1)
    assert [filled.step(), filled.step()] == [[1], [8]]
    assert filled.queues["0"].num_tokens == 56
    assert filled.queues.remove(first)
    assert first.state is State.CANCELLED
    assert (filled.queues["0"].num_requests, filled.queues["0"].num_tokens) == (1, 32)
    assert filled.queues.remove(second)
    assert not filled.queues.waiting_models
    filled.add(32)
    assert filled.rest() == [[8]] * 4, "others may still come"


def test_a_failed_chunk_ends_its_request() -> None:
    filled = Filled()
    filled.add(32, 1)
    assert filled.step() == [1]
    (chunk,) = filled.queues.next_step()
    error = RuntimeError("broken")
    assert filled.queues.end(chunk, error) is error
    assert not filled.queues.waiting_models
    assert filled.queues["0"].num_tokens == 0


@pytest.mark.parametrize(
    ("weights", "seconds", "steps"),
    [((1.0, 3.0), (0.001, 0.001), (10, 30)), ((1.0, 1.0), (0.009, 0.001), (4, 36))],
    ids=["by weight", "long steps are fewer"],
)
def test_models_share_the_devices_time(
    weights: tuple[float, float], seconds: tuple[float, float], steps: tuple[int, int]
) -> None:
    filled = Filled(dict(zip("01", weights, strict=True)))
    for model, of_step in zip("01", seconds, strict=True):
        filled.queues[model].note(32, of_step)
        filled.add(*[32] * 100, model=model)
    models = Counter(filled.queues.next_step()[0].submission.model for _ in range(40))
    assert models == dict(zip("01", steps, strict=True))


def test_a_model_that_was_idle_has_no_claim_to_the_past() -> None:
    filled = Filled({"0": 1.0, "1": 1.0})
    for model in ("0", "1"):
        filled.queues[model].note(32, 0.001)
        filled.add(*[32] * 20, model="0")
    for _ in range(20):
        filled.step()
    filled.add(*[32] * 10, model="1")
    models = [filled.queues.next_step()[0].submission.model for _ in range(10)]
    assert Counter(models) == {"0": 5, "1": 5}
    assert models[0] == "1", "it has had less"


def test_a_step_with_a_chunk_does_not_begin_early() -> None:
    filled = Filled()
    filled.add(32)
    head = filled.queues.large_head(32)
    assert head is not None
    assert head.request.num_tokens == 32
    assert filled.queues.large_head(33) is None
    filled.add(1)
    assert filled.queues.large_head(8) is None


def test_a_step_is_never_larger_than_the_limit_however_much_waits() -> None:
    """Steps of a decode lane are small, and must not begin early: they use the same memory as each other."""
    filled = Filled(prefill_chunk_tokens=0)
    filled.add(*[8] * 20)
    assert filled.queues.large_head(32) is not None
    assert filled.queues.large_head(33) is None


def test_a_request_found_right_after_a_long_ones_step_has_waited_for_it() -> None:
    filled = Filled()
    filled.add(32)
    assert filled.step() == [32]
    filled.add(1)  # by a poll after the step
    filled.queues.just_ended = False
    assert filled.step() == [1]
    filled.add(32)
    assert filled.step() == [8]


def test_a_lane_of_short_requests_has_no_long_one() -> None:
    limits = {"max_request_tokens": 4096, "max_batch_tokens": 4096, "max_queue_tokens": 8192}
    limits["join_chunks"] = True
    decode, _ = lanes_of(tiny_settings(limits, lanes={"decode_max_tokens": 8, "decode_batch_tokens": 256}))
    queues = Queues(decode.limits)
    queues.set_runners({"0": EchoRunner()}, {})
    pending = Submission("0", layer_request([1.0]), lambda _: None)
    queues.add(pending)
    assert not pending.is_long


def test_chunks_of_a_model_that_was_unloaded_still_count() -> None:
    queues = Queues(Limits())
    queues.add_runner("m", EchoRunner(), 1.0)
    queues["m"].num_chunks += 3
    assert queues.remove_runner("m")
    assert queues.num_chunks("m") == 3
    queues.add_runner("m", EchoRunner(), 1.0)
    queues["m"].num_chunks += 1
    assert queues.num_chunks("m") == 4
