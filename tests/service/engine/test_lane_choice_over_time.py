"""The choice over time, on simulated devices: nearly as good as the best fixed choice for each load."""

import itertools

import pytest

from expertd.service.engine.lane_choice import JOINED, Choice
from tests.service.engine.lane_devices import QWEN, Device, Phase, deepseek
from tests.service.engine.lane_simulation import Simulation, chosen, mean_worth

LOADS = {
    "both all the time": [Phase(60, 64, True)],
    "one kind at times": [Phase(30, 64, True), Phase(30, 64, False), Phase(30, 0, True)] * 2,
    "decode grows and shrinks": [Phase(30, 1, True), Phase(30, 64, True)] * 2,
}
DEVICES = {"deepseek": deepseek(0.0), "deepseek, with tails": deepseek(0.35e-3), "qwen": QWEN}


def best_fixed(device: Device, phases: list[Phase], target: float, count: int) -> float:
    """What the best choice is worth if it is kept for `count` samples."""
    return max(mean_worth(device, [choice] * count, phases, target) for choice in device.shares)


@pytest.mark.parametrize("target_ms", [0.5, 0.6, 0.75, 1.0, 1.35, 3.0, 10.0])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOADS)
def test_it_is_nearly_as_good_as_the_best_fixed_choice(name: str, device: str, target_ms: float) -> None:
    """The time for choices that turn out worse than expected included."""
    phases, target, simulated = LOADS[name], target_ms / 1e3, DEVICES[device]
    choices = chosen(simulated, phases, target)
    best = best_fixed(simulated, phases, target, len(choices))
    assert mean_worth(simulated, choices, phases, target) >= 0.9 * best


@pytest.mark.parametrize("target_ms", [0.5, 0.6, 0.75, 1.0, 1.35, 3.0])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decode", [1, 64])
def test_decode_keeps_a_target_that_a_split_keeps(decode: int, device: str, target_ms: float) -> None:
    """With room for the scatter of measurements."""
    phase, target, simulated = Phase(20, decode, True), target_ms / 1e3, DEVICES[device]
    fixed = [simulated.truth(Choice(split), phase).decode_seconds for split in simulated.steps]
    if min(fixed) <= 0.95 * target:
        late = chosen(simulated, [phase], target)[20:]
        assert all(simulated.truth(choice, phase).decode_seconds <= target for choice in late)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("device", ["deepseek", "deepseek, with tails"])
def test_it_changes_with_the_load_alone(device: str, name: str) -> None:
    """Graphs are captured at each change: not at every sample."""
    choices = chosen(DEVICES[device], LOADS[name], 1.35e-3)
    assert changes(choices) <= 1 + 2 * len(LOADS[name])


@pytest.mark.parametrize(
    ("target_ms", "tries"), [(0.5, 0), (0.75, 0), (1.0, 0), (1.25, 1), (1.35, 3), (2.0, 0)]
)
def test_what_disappoints_is_left(target_ms: float, tries: int) -> None:
    """16 SMs look good just below what they give; they are tried for four samples, less and less often."""
    choices = chosen(QWEN, [Phase(240, 64, True)], target_ms / 1e3)
    stays = [(choice, len(list(stay))) for choice, stay in itertools.groupby(choices)]
    kept, _ = max(stays, key=lambda stay: stay[1])
    tried = [samples for choice, samples in stays if choice == Choice(16) != kept]
    between = [samples for choice, samples in stays[:-1] if choice == kept]
    assert len(tried) == tries
    assert all(samples <= 4 for samples in tried)
    assert between == sorted(between)


@pytest.mark.parametrize("target_ms", [0.5, 0.75, 1.0, 1.35])
@pytest.mark.parametrize("device", DEVICES)
def test_scatter_changes_little(device: str, target_ms: float) -> None:
    """What requests take differs by up to a tenth between two samples, and more than that from the target."""
    phases, target, simulated = [Phase(240, 64, True)], target_ms / 1e3, DEVICES[device]
    choices = chosen(simulated, phases, target, scatter=0.1)
    assert changes(choices) <= 10
    assert changes(choices[len(choices) // 2 :]) <= 5, "what was left is tried again, less and less often"


async def test_what_was_left_because_of_a_disturbance_is_tried_again() -> None:
    """48 SMs keep the target, but something else slows requests down in the first samples that count."""
    simulation, both = Simulation(deepseek(0.0), 0.75e-3), Phase(60, 64, True)
    simulation.slower = 1.5
    for _ in range(20):
        if simulation.choice != Choice(48):
            break
        await simulation.serve(both)
    assert simulation.choice.decode_sms > 48
    simulation.slower = 1.0
    choices = []
    for _ in range(600):
        await simulation.serve(both)
        choices.append(simulation.choice)
    assert Choice(48) in choices[:120], "within a minute"
    assert set(choices[120:]) == {Choice(48)}


def test_a_device_without_decode_serves_prefill_alone() -> None:
    assert chosen(DEVICES["deepseek"], [Phase(60, 0, True)], 1e-3)[-1] == JOINED


def changes(choices: list[Choice]) -> int:
    return sum(one != other for one, other in itertools.pairwise(choices))
