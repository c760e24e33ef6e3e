"""A server whose layer's experts do not all fit into its budget: answers, metrics, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertd.backends import BACKENDS
from expertd.kernels import ExpertBiases
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.commands import host_memory as host_memory_module
from expertd.service.commands.devices import check_before_listening
from expertd.service.commands.host_memory import check_host_memory, host_memory
from expertd.service.engine.loading import load
from expertd.service.engine.memory_needs import check_expert_slots, expert_slots, needs_of_models
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks.shares import shares_of
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import PlacementSettings
from tests.families import Sizes
from tests.kernels.helpers import fresh_generator
from tests.service.apps import HIDDEN, MODEL, hidden_request, output_of, rows, serving, tiny_settings
from tests.service.checkpoints.builders import Checkpoint
from tests.service.moe.requests import layer_request
from tests.service.ranks.servers import computed, serving_ranks
from tests.service.settings.refusals import MODEL as YAML_MODEL
from tests.service.settings.refusals import check_refused

HOPPER = BACKENDS["hopper"]
WIDE = {**MODEL, "num_experts": 32, "num_shared_experts": 1}
EXPERT = 3 * (HIDDEN * 128 + 4)  # bytes


def settings(experts: int, **changes: Any) -> Settings:
    """With a budget for `experts` of 33."""
    return tiny_settings(**{"models": [WIDE], "weights_budget": experts * EXPERT, **changes})


async def test_answers_are_those_without_a_budget() -> None:
    requests = [rows(num_tokens, seed) for seed, num_tokens in enumerate((1, 1, 2, 4, 1, 40, 3))]
    outputs: list[list[Any]] = []
    for given in (settings(13), settings(33)):
        async with serving(given) as server:
            outputs.append([output_of(await server.infer(*hidden_request(each))) for each in requests])
            hits, misses, copied = (
                server.metric(f"expert_store_{name}_total", model="tiny")
                for name in ("hits", "misses", "copy_bytes")
            )
            assert server.metric("weights_bytes", model="tiny") < 34 * EXPERT + 32 * HIDDEN * 4
            if given.weights_budget == 33 * EXPERT:
                assert (hits, misses) == (0, 0), "there is no store"
                continue
            assert hits > 0
            assert copied == misses * EXPERT > 0
            assert server.metric("expert_store_wait_seconds_total", model="tiny") > 0
            assert server.metric("weights_bytes", model="tiny") < 14 * EXPERT
            refused = await server.http.post("/v2/repository/models/tiny/unload")
            assert refused.status_code == 409
            assert "repository: expected no weights_budget to load and unload" in refused.text
    for first, second in zip(*outputs, strict=True):
        if len(first) < 16:
            np.testing.assert_array_equal(first, second)
        else:  # oneDNN's bits depend on how many rows it gets
            np.testing.assert_allclose(first, second, rtol=0, atol=1e-2)


def test_the_device_needs_the_budget_and_the_host_the_experts() -> None:
    given, whole = settings(13), tiny_settings(models=[WIDE])
    assert expert_slots(given, HOPPER) == {"tiny": 8}, "beside 1 shared expert, and 2 chunks of 2"
    held = [(given.models[0], 32)]
    with_budget, without = (needs_of_models(each, held, HOPPER) for each in (given, whole))
    assert with_budget.weights == without.weights - (33 - 13) * EXPERT
    assert 0 < with_budget.graphs <= without.graphs
    (share,) = shares_of(given, HOPPER)
    assert share.text.startswith("tiny: experts 0-31 of 32, 8 at a time and 1 shared: ")
    pinned, others = (sum(host_memory(each, HOPPER).pinned.values()) for each in (given, whole))
    assert pinned - others == 32 * EXPERT


def test_a_host_without_room_for_the_experts_is_told_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {**WIDE, "hidden_size": 4096, "intermediate_size": 4096, "num_experts": 64}
    given = tiny_settings({"max_buffered_bytes": 64 << 20}, models=[model], weights_budget="2GiB")
    monkeypatch.setattr(host_memory_module, "free_host_bytes", lambda: 3 << 30)
    with pytest.raises(MemoryError) as caught:
        check_host_memory(given, HOPPER)
    expected = (
        r"host memory: expected room for 3\.3 GB that a GPU needs pinned from the start \(experts that "
        r"weights_budget leaves there 3\.2 GB, .*\), got 3\.2 GB free"
    )
    assert re.fullmatch(expected, str(caught.value)), caught.value


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    expected = r"weights_budget: expected at least 0\.4 MB, with which each layer has .*, got 0\.2 MB"
    with pytest.raises(ValueError, match=expected):
        check_before_listening(settings(5))


def test_a_model_may_have_a_budget_of_its_own() -> None:
    """Another has none, or shares one with the rest."""
    models = [{**WIDE, "name": "own", "weights_budget": 13 * EXPERT}, {**WIDE, "name": "other"}]
    given = settings(1, models=models, weights_budget=None)
    assert expert_slots(given, HOPPER) == {"own": 8}
    more = [*models, {**WIDE, "name": "third", "num_experts": 16}]
    shared = settings(1, models=more, weights_budget=(33 + 17 - 8) * EXPERT)
    slots = expert_slots(shared, HOPPER)
    assert slots["own"] == 8
    assert slots["other"] // 2 == slots["third"] > 8
    whole = settings(1, models=[{**model, "weights_budget": None} for model in models], weights_budget=None)
    request, outputs, misses = layer_request(torch.randn(3, HIDDEN), "FP32"), list[bytes](), list[int]()
    for each in (given, whole):
        runners: Any = load(each, lambda: False).runners
        for name in ("own", "other"):
            outputs.append(bytes(runners[name].run([request]).outputs[0]))
            store = runners[name].layer.store
            misses.append(0 if store is None else store.counts.misses)
    assert outputs[:2] == outputs[2:]
    assert misses[0] > 0
    assert misses[1:] == [0, 0, 0]


@pytest.mark.slow
async def test_a_budget_is_that_of_each_rank() -> None:
    """Ranks tell the front end what their stores did."""
    whole, given = (settings(size, ranks=2) for size in (17, 9))
    assert (expert_slots(whole, HOPPER), expert_slots(given, HOPPER)) == ({}, {"tiny": 6}), (
        "of 16, and two chunks of 1"
    )
    for share, other in zip(shares_of(given, HOPPER), shares_of(whole, HOPPER), strict=True):
        assert share.needs.weights == other.needs.weights - 8 * EXPERT
    pinned, others = (sum(host_memory(each, HOPPER).pinned.values()) for each in (given, whole))
    assert pinned - others == 32 * EXPERT
    requests = [rows(num_tokens, seed) for seed, num_tokens in enumerate((1, 1, 2, 4, 1, 3))]
    outputs = []
    for each in (whole, given):
        async with serving_ranks(each) as server:
            outputs.append([output_of(await server.infer(*hidden_request(sent))) for sent in requests])
            hits, misses, copied, waited = (
                server.metric(f"expert_store_{name}_total", model="tiny")
                for name in ("hits", "misses", "copy_bytes", "wait_seconds")
            )
            assert copied == misses * EXPERT
            assert (hits > 0) == (misses > 0) == (waited > 0) == (each is given)
            if each is given:
                for name, all_ranks in (("hits", hits), ("misses", misses), ("copy_bytes", copied)):
                    of_ranks = [server.metric(f"rank_expert_store_{name}_total", rank=rank) for rank in "01"]
                    assert sum(of_ranks) == all_ranks
                    assert min(of_ranks) > 0
                assert server.metric("rank_expert_store_wait_seconds_total", rank="1") > 0
    for first, second in zip(*outputs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_ranks_may_have_shared_experts_of_another_rule(tmp_path: Path) -> None:
    """Llama 4's routed experts get weighed inputs, its shared one does not; one rank refuses that."""
    directory = Checkpoint("llama-4", tmp_path / "model", sizes=Sizes(experts=16)).directory
    served = [{"path": directory, "layers": "1"}]

    def resolved(**changes: Any) -> Settings:
        return resolve_checkpoints(tiny_settings(models=[], checkpoints=served, **changes))

    shape = resolved().models[0].shape
    budget = (4 + 2) * shape.expert_bytes + shape.num_shared_experts * shape.shared_expert_bytes
    with pytest.raises(
        ValueError, match=r"^weights_budget: expected layers whose routed and shared experts follow one rule"
    ):
        check_before_listening(resolved(weights_budget=budget))
    whole, given = resolved(ranks=2), resolved(ranks=2, weights_budget=budget)
    assert list(expert_slots(given, HOPPER).values()) == [4], "of 8"
    check_before_listening(given)
    np.testing.assert_array_equal(computed(given), computed(whole))


def test_gpus_that_share_a_layer_have_a_budget_each() -> None:
    model = {**WIDE, "hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8}
    shape = Settings.model_validate({"models": [model]}).models[0].shape
    budget = (24 + 1 + 2 * 3) * shape.expert_bytes
    whole, given = (
        Settings.model_validate({"models": [model], "backend": "hopper", "devices": "0-1"} | more)
        for more in ({}, {"weights_budget": budget})
    )
    assert expert_slots(given, HOPPER) == {"tiny": 24}, "of 64, beside a shared one and two chunks of 3"
    for rank, (share, other) in enumerate(
        zip(shares_of(given, HOPPER), shares_of(whole, HOPPER), strict=True)
    ):
        first = 64 * rank
        assert share.text.startswith(
            f"tiny: experts {first}-{first + 63} of 128, 24 at a time and 1 shared: "
        )
        assert other.needs.weights - share.needs.weights == (64 - 24 - 2 * 3) * shape.expert_bytes
        assert share.exchange == other.exchange > 0
        assert (share.needs.graphs, other.needs.graphs > 0) == (0, True)
    pinned, others = (sum(host_memory(each, HOPPER).pinned.values()) for each in (given, whole))
    assert pinned - others == 128 * shape.expert_bytes
    check_expert_slots(given, HOPPER)
    placed = given.model_copy(update={"placement": PlacementSettings(policy="static", replicas=8)})
    pinned = sum(host_memory(placed, HOPPER).pinned.values())
    assert pinned - others == (128 + 8) * shape.expert_bytes
    assert shares_of(placed, HOPPER)[1].needs.weights == shares_of(given, HOPPER)[1].needs.weights


def test_a_budget_of_a_model_that_cannot_be_kept_is_refused() -> None:
    given = settings(13, models=[WIDE, {**WIDE, "name": "b", "weights_budget": 5 * EXPERT}])
    with pytest.raises(
        ValueError, match=r"^models\.1\.weights_budget: expected at least 0\.4 MB, with which "
    ):
        check_before_listening(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "encoding", "slots"),
    [("deepseek-v3", {"scales_dtype": torch.float32}, 3), ("gpt-oss", {"mxfp4": True}, 5)],
)
def test_layers_of_a_checkpoint_share_a_budget(
    family: str, encoding: dict[str, Any], slots: int, tmp_path: Path
) -> None:
    """With a shared expert, or biases of experts; a router's bias, and one of the files' encodings."""
    directory = Checkpoint(family, tmp_path / "model", **encoding).directory
    served = [{"path": directory, "layers": "all"}]
    whole = resolve_checkpoints(tiny_settings(models=[], checkpoints=served))
    shape = whole.models[0].shape
    on_device = len(whole.models) * (slots + shape.num_shared_experts)
    budget = (on_device + 2) * shape.expert_bytes  # and two chunks
    given = resolve_checkpoints(tiny_settings(models=[], checkpoints=served, weights_budget=budget))
    assert expert_slots(given, BACKENDS["reference"]) == {model.name: slots for model in whole.models}
    copies = [{**served[0], "name": name, "weights_budget": budget} for name in ("a", "b")]
    twice = resolve_checkpoints(tiny_settings(models=[], checkpoints=copies))
    assert expert_slots(twice, BACKENDS["reference"]) == {model.name: slots for model in twice.models}
    copies[1]["weights_budget"] = 2 * shape.expert_bytes
    wrong = resolve_checkpoints(tiny_settings(models=[], checkpoints=copies))
    with pytest.raises(ValueError, match=r"^checkpoints\.1\.weights_budget: expected at least "):
        check_before_listening(wrong)
    generator = fresh_generator()
    runners: list[Any] = [load(each, lambda: False).runners for each in (given, whole)]
    for num_tokens in (1, 3, 2, 5):
        hidden_states = torch.randn(num_tokens, shape.hidden_size, generator=generator)
        request = layer_request(hidden_states, "FP32")
        for model in whole.models:
            first, second = (bytes(each[model.name].run([request]).outputs[0]) for each in runners)
            assert first == second


async def test_experts_with_biases_are_served(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    whole, given = (settings(size, models=[{**WIDE, "weights": {"path": path}}]) for size in (33, 13))
    weights, generator = random_weights(given.models[0].shape, 1, "cpu"), fresh_generator()
    biases = [torch.randn(33, size, generator=generator).bfloat16() for size in (256, HIDDEN)]
    save_weights(path, replace(weights, biases=ExpertBiases(*biases)))
    each = 2 * (256 + HIDDEN)  # bytes
    assert sum(host_memory(given, HOPPER).pinned.values()) - sum(
        host_memory(whole, HOPPER).pinned.values()
    ) == 32 * (EXPERT + each)
    needs, plain = (needs_of_models(of, [(of.models[0], 32)], HOPPER).weights for of in (given, settings(13)))
    assert needs - plain == 9 * each, "8 slots and a shared expert"
    requests, outputs = [rows(num_tokens, seed) for seed, num_tokens in enumerate((1, 2, 4, 1))], []
    for of in (whole, given):
        async with serving(of) as server:
            outputs.append([output_of(await server.infer(*hidden_request(each))) for each in requests])
            misses, copied = (
                server.metric(f"expert_store_{name}_total", model="tiny") for name in ("misses", "copy_bytes")
            )
            assert copied == misses * (EXPERT + each)
    assert misses > 0
    for first, second in zip(*outputs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("load: false", r"models\.0\.load: expected true with weights_budget, got false"),
        ("masked_max_tokens: 8", r"models\.0\.masked_max_tokens: expected 0 with weights_budget, got 8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, more: str, expected: str, own: bool) -> None:
    budget = "weights_budget: 10GiB"
    text = f"models: [{YAML_MODEL[:-1]}, {more}{f', {budget}' * own}}}]\n{budget * (not own)}\n"
    check_refused(tmp_path, text, expected)


@pytest.mark.parametrize(
    ("own", "more", "expected"),
    [
        ("weights_budget: 2 apples", "", r"models\.0\.weights_budget: expected bytes, or .*, got '2 apples'"),
        (
            "weights_budget: 0",
            "",
            r"models\.0\.weights_budget: expected .* greater than or equal to 1, got 0",
        ),
        ("weight_budget: 1GiB", "", r"models\.0\.weight_budget: .*weights_budget"),
        (
            "weights_budget: 1GiB",
            "weights_budget: 2GiB",
            r"weights_budget: expected null if all layers have budgets of their own, got 2147483648",
        ),
        (
            "weights_budget: 9",
            "lanes: {decode_max_tokens: 8}",
            r"models\.0\.weights_budget: expected null with lanes, got 9",
        ),
    ],
)
def test_wrong_budgets_of_a_model_are_refused(tmp_path: Path, own: str, more: str, expected: str) -> None:
    check_refused(tmp_path, f"models: [{YAML_MODEL[:-1]}, {own}}}]\n{more}\n", expected)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("10GiB", 10 << 30), ("1.5 gb", 1_500_000_000), ("512MiB", 512 << 20), (4096, 4096), ("4096", 4096)],
)
def test_budgets_have_units(text: str | int, num_bytes: int) -> None:
    assert tiny_settings(weights_budget=text).weights_budget == num_bytes
