"""What controls the lanes learns from the events of steps: on lanes and joined, what requests really took."""

import pytest

from expertd.service.engine.lane_choice import JOINED, Choice, Expected, State
from tests.service.engine.lane_devices import PREFILL_TOKENS, QWEN, Phase
from tests.service.engine.lane_simulation import SAMPLE_SECONDS, SETTLING_SAMPLES, Simulation

BOTH = Phase(60, 64, True)
CHUNKS = Choice(0, 1024)


def simulation(choice: Choice, target_ms: float = 0.5) -> Simulation:
    """One whose present choice is this."""
    simulated = Simulation(QWEN, target_ms / 1e3)
    simulated.control.state = State(Expected(choice, 0.0, 1.0), "start")
    return simulated


def measured(simulated: Simulation) -> dict[str, float]:
    samples = [sample for metric in simulated.control.metrics() for sample in metric.samples]
    return {sample.name.removeprefix("expertd_lanes_"): sample.value for sample in samples}


@pytest.mark.parametrize("choice", [JOINED, CHUNKS, Choice(48)])
async def test_what_short_requests_took_is_learned(choice: Choice) -> None:
    simulated = simulation(choice)
    for _ in range(SETTLING_SAMPLES + 1):
        await simulated.serve(BOTH)
        simulated.control.state = State(simulated.control.state.expected, "start")  # it stays
    now = measured(simulated)
    assert now["measured_decode_seconds"] == pytest.approx(QWEN.took[choice][64])
    assert now["expected_decode_seconds"] == pytest.approx(QWEN.took[choice][64]), "as measured"
    assert simulated.control._load.given[choice].prefill_rate == pytest.approx(
        QWEN.shares[choice] * PREFILL_TOKENS / QWEN.prefill, rel=0.01
    )


async def test_long_requests_of_a_joined_step_say_nothing_of_decode() -> None:
    simulated = simulation(JOINED)
    for _ in range(25):
        simulated.control.step_done("prefill", 4160, 0.6e-3, [0.4e-3, 5.0, 0.3e-3], [32, 4096, 32])
    simulated.arrived.requests[0] += 50
    await simulated.control.sample(SAMPLE_SECONDS)
    assert measured(simulated)["measured_decode_seconds"] == pytest.approx(1e-3)


async def test_too_few_requests_say_nothing() -> None:
    simulated = simulation(JOINED)
    for _ in range(19):
        simulated.control.step_done("prefill", 64, 0.6e-3, [0.4e-3], [64])
    simulated.arrived.requests[0] += 19
    await simulated.control.sample(SAMPLE_SECONDS)
    assert measured(simulated)["measured_decode_seconds"] == 0


async def test_chunks_do_not_say_what_prefill_takes_alone() -> None:
    """Their steps take as long as the host needs."""
    simulated = simulation(Choice(48), target_ms=1.0)
    for _ in range(SETTLING_SAMPLES + 1):
        await simulated.serve(BOTH)
    alone = simulated.control._load.prefill
    assert alone is not None
    assert alone.seconds == pytest.approx(QWEN.prefill, rel=0.1)
    simulated.control.state = State(Expected(CHUNKS, 0.0, 1.0), "start")
    await simulated.serve(BOTH)
    assert simulated.control._load.prefill == pytest.approx(alone)


async def test_what_whole_requests_take_follows_their_size_in_chunks() -> None:
    simulated = simulation(Choice(48), target_ms=1.0)
    for _ in range(SETTLING_SAMPLES + 1):
        await simulated.serve(BOTH)
    decode, whole = simulated.control._load.decode, simulated.control._load.prefill
    assert decode is not None
    assert whole is not None
    simulated.control.state = State(Expected(CHUNKS, 0.0, 1.0), "start")
    simulated.arrived.requests[1] += 100
    simulated.arrived.tokens[1] += 100 * 1024
    await simulated.control.sample(SAMPLE_SECONDS)
    smaller = simulated.control._load.prefill
    assert smaller is not None
    slope = (whole.seconds - decode.seconds) / (whole.tokens - decode.tokens)
    assert smaller == pytest.approx((1024, decode.seconds + slope * (1024 - decode.tokens)))


async def test_the_rate_of_prefill_is_that_while_there_is_some() -> None:
    """A sample in which it was there for a fifth of the time says the same, and how much is asked for."""
    simulated = simulation(Choice(48))
    for _ in range(SETTLING_SAMPLES + 1):
        await simulated.serve(BOTH)
    before = measured(simulated)["measured_prefill_ratio"]
    arrived, long = simulated.arrived, simulated.long
    count = round(0.2 * SAMPLE_SECONDS * QWEN.shares[Choice(48)] / QWEN.prefill)  # requests in a fifth of it
    arrived.requests[1] += count
    arrived.tokens[1] += count * PREFILL_TOKENS
    long.seconds += 0.2 * SAMPLE_SECONDS
    long.tokens += count * PREFILL_TOKENS
    await simulated.control.sample(SAMPLE_SECONDS)
    assert measured(simulated)["measured_prefill_ratio"] == pytest.approx(before, rel=0.01)
    assert simulated.control._load.asked == pytest.approx(0.2 * before, rel=0.01)


async def test_chunks_that_disappoint_are_left_for_a_split() -> None:
    simulated = simulation(Choice(48), target_ms=1.35)
    simulated.control._refused = {Choice(16), Choice(32)}
    choices = []
    for _ in range(40):
        await simulated.serve(BOTH)
        choices.append(simulated.choice)
    assert {choice for choice in choices if choice.chunk_tokens}, "arithmetic is for chunks"
    assert set(choices[15:]) == {Choice(48)}


async def test_looks_after_a_change_measure_nothing() -> None:
    """Requests waited for it, and the GPU's clock is not steady yet."""
    simulated = simulation(Choice(48), target_ms=1.35)
    for _ in range(20):
        if simulated.choice != Choice(48):
            break
        await simulated.serve(BOTH)
    tried = simulated.choice
    assert tried != Choice(48)
    for _ in range(2):
        await simulated.serve(BOTH)
        assert tried not in simulated.control._load.given
    await simulated.serve(BOTH)
    assert tried in simulated.control._load.given


@pytest.mark.parametrize("split", [16, 32, 48, 64, 80])
async def test_looks_after_prefill_has_begun_decide_nothing(split: int) -> None:
    """Decode alone has been here; what its requests take in the first second beside prefill is no sign."""
    took = QWEN.took[Choice(split)][64]
    simulated = simulation(Choice(split), target_ms=1.1e3 * took)
    await simulated.serve(Phase(60, 64, False))
    for _ in range(SETTLING_SAMPLES):
        await simulated.serve(BOTH)
        assert simulated.choice == Choice(split)
        assert not simulated.control._load.given
    await simulated.serve(BOTH)
    assert simulated.control._load.given[Choice(split)].decode_seconds == pytest.approx(took)


async def test_looks_before_and_after_those_that_do_not_count_are_not_in_a_row() -> None:
    """Decode alone would have all SMs after ten samples; prefill comes back after nine, again and again."""
    simulated = simulation(Choice(48), target_ms=1.0)
    for _ in range(4):
        for _ in range(9):
            await simulated.serve(Phase(60, 64, False))
        for _ in range(2):
            await simulated.serve(BOTH)
    assert simulated.choice == Choice(48)


async def test_what_the_device_refuses_is_not_tried_again_and_others_are() -> None:
    simulated = simulation(Choice(80), target_ms=1.0)
    refused: list[Choice] = []
    apply = simulated.control._apply

    async def refuse(choice: Choice) -> None:
        if len(refused) < 2:
            refused.append(choice)
            raise ValueError("no such split")
        await apply(choice)

    simulated.control._apply = refuse
    for _ in range(30):
        await simulated.serve(BOTH)
    assert len(set(refused)) == 2
    assert simulated.choice not in (Choice(80), *refused)
