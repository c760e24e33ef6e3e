"""Mistakes in the settings are refused, each with one sentence."""

import re
from pathlib import Path

import pytest

from expertd.service.settings.loader import Flag, SettingsError, load_settings
from tests.service.settings.refusals import MODEL, check_refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "colour: red",
            r"bad\.yaml:2: colour: expected one of host, port, .*models.*, got an unknown setting",
        ),
        ("limits: {batch: 1}", r"limits\.batch: expected one of max_batch.*, got an unknown setting"),
        ("port: 70000", r"port: .* less than or equal to 65535, got 70000"),
        (
            "limits: {max_json_bytes: 2097153}",
            r"limits\.max_json_bytes: .* less than or equal to 2097152, got 2097153",
        ),
        ("host: a..b", r"host: expected a name or address, got 'a\.\.b'"),
        (f"host: {64 * 'x'}", r"host: expected a name or address, got 'xxx"),
        (
            "tracing: {endpoint: 'http://[::1'}",
            r"tracing\.endpoint: expected a URL such as .*, got 'http://\[::1'",
        ),
        *(
            (
                f"weights_budget: {text}",
                r"weights_budget: expected bytes, or a number with a unit like 10GiB, got ",
            )
            for text in ("10 apples", "-1GiB", "GiB", "1e9", "''")
        ),
        ("weights_budget: 0", r"weights_budget: expected .* greater than or equal to 1, got 0"),
        ("port: many", r"port: expected a valid integer.*got 'many'"),
        ("backend: tpu", r"backend: expected one of auto, .*got 'tpu'"),
        (
            "limits: {max_batch_tokens: 5}",
            r"limits\.max_request_tokens: expected at most max_batch_tokens \(5\), got 4096",
        ),
        ("port: 81\ngrpc: {port: 81}", r"grpc\.port: expected another port than port \(81\), got 81"),
        (
            "uds: /a/b\nchannels: {socket: /a//b}",
            r"channels\.socket: expected another path than uds \(/a/b\), got /a/b",
        ),
        ("partitions: {p: 0}", r"partitions\.p: expected at least 1 SM, got 0"),
        (
            f"partitions: {{{', '.join(f'p{number}: 2' for number in range(33))}}}",
            r"partitions: expected at most 32, got 33",
        ),
        (
            f"partitions: {{{65 * 'p'}: 2}}",
            rf"partitions: expected a name of at most 64 characters, got '{65 * 'p'}'",
        ),
        (
            "tracing: {endpoint: 'localhost:4318'}",
            r"tracing\.endpoint: expected a URL such as http://.*/v1/traces, got 'localhost:4318'",
        ),
        (
            "page: {peers: ['http://a:8000', 'javascript:alert(1)']}",
            r"page\.peers\.1: expected a URL such as http://experts-1:8000/, got 'javascript:alert\(1\)'",
        ),
        ("page: {peers: http://a:8000}", r"page\.peers: expected a list, got 'http://a:8000'"),
        (
            "shared_memory: {key_prefix: a/b}",
            r"shared_memory\.key_prefix: expected a text without '/', got 'a/b'",
        ),
    ],
)
def test_invalid_settings_are_refused_with_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    check_refused(tmp_path, f"models: [{MODEL}]\n{text}", expected)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("k: 3", r"models\.0\.k: expected one of name, hidden_size.*, got an unknown setting"),
        ("routing: {scoring_func: tanh}", r"routing\.scoring_func: .*'sigmoid'.* got 'tanh'"),
        (
            "routing: {num_expert_groups: 3}",
            r"num_experts: expected a multiple of num_expert_groups .3., got 4",
        ),
        ("routing: {num_expert_groups: 4}", r"top_k: expected at most the 1 experts of topk_group, got 2"),
        ("routing: {topk_group: 2}", r"topk_group: expected 1 to num_expert_groups .1., got 2"),
        (
            "routing: {routed_scaling_factor: .inf}",
            r"routing\.routed_scaling_factor: .*equal to 1000000, got inf",
        ),
        ("partition: p", r"models\.0\.partition: expected one of partitions \(none\), got 'p'"),
        ("weights: {}", r"models\.0\.weights: expected exactly one of seed and path, got neither"),
        (
            "weights: {seed: 1, layer: 3}",
            r"weights\.layer: expected one of seed, path, got an unknown setting",
        ),
        ("local_experts: 2-4", r"local_experts: expected a range of 0 to 3, got 2-4"),
        ("local_experts: 3-2", r"local_experts: expected ranges from a lower .*, got 3-2"),
        ("local_experts: '0-1,3'", r"local_experts: expected one range like 0-63, got '0-1,3'"),
        ("local_experts: 1, masked_max_tokens: 2", r"masked_max_tokens: expected 0 with local_experts"),
        ("num_shared_experts: 1021", r"num_shared_experts: expected at most 1024 experts .*, got 1025"),
        (
            "weights: {seed: 9223372036854775808}",
            r"models\.0\.weights\.seed: .*less than or equal to 9223372036854775807, got 9223372036854775808",
        ),
    ],
)
def test_invalid_models_are_refused_with_one_sentence(tmp_path: Path, more: str, expected: str) -> None:
    check_refused(tmp_path, f"models: [{MODEL[:-1]}, {more}}}]", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"models: [{MODEL.replace('256', '200')}]", r"models\.0\.hidden_size: .*multiple of 128, got 200"),
        (
            f"models: [{MODEL.replace('top_k: 2', 'top_k: 9')}]",
            r"models\.0\.top_k: expected 1 to num_experts .4., got 9",
        ),
        (f"models: [{MODEL}, {MODEL}]", r"models: expected different names, got 'm' 2 times"),
        (
            "checkpoints: [{path: /none, layers: 3-x}]",
            r"\.layers: expected all, or numbers and ranges .*, got '3-x'",
        ),
        ("checkpoints: [{path: /none, layers: '1,3,1'}]", r"layers: expected each number once, got 1,3,1"),
        (
            "checkpoints: [{path: /none, layers: '\uff11'}]",
            r"layers: expected all, or numbers and ranges .*, got '.uff11'",
        ),
        *(
            (f"models: [{MODEL}]\n{name}: .inf", rf"{name}: expected a finite number, got inf")
            for name in ("shutdown_delay_seconds", "drain_timeout_seconds")
        ),
        ("models: []", r"models or checkpoints: expected at least one layer to serve, got none"),
        ("port: 1", r"models or checkpoints: expected at least one layer to serve, got none"),
        *(
            (f"port: 1\n{name}: 2", rf"bad\.yaml:2: expected the name of a setting, got {name}")
            for name in ("1", "true", "null")
        ),
        ("port: 1\n---\nport: 2", r"bad\.yaml:2: expected one document, got another one"),
        (
            f"models: [{MODEL.replace('name: m', 'name: /m')}]",
            r"models\.0\.name: expected letters, digits, '\.', '_' or '-', beginning with a letter or digit, "
            r"got '/m'",
        ),
        ("- a\n- b", r"expected an object with names of settings, got \['a', 'b'\]"),
        ("", r"models or checkpoints: expected at least one layer to serve, got none"),
        ("models: [", r"expected YAML"),
    ],
)
def test_invalid_files_are_refused_with_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    check_refused(tmp_path, text, expected)


TWO_WRONG = (
    MODEL.replace("256", "200").replace("m,", "a,"),
    MODEL.replace("top_k: 2", "top_k: 9").replace("m,", "b,"),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "checkpoints: [{path: /none, layer: 3}]",
            [
                r":1: checkpoints\.0\.layer: expected one of path, layers,.*, got an unknown setting; "
                r"did you mean checkpoints\.0\.layers\?",
            ],
        ),
        (
            f"port: many\nmodels:\n- {TWO_WRONG[0]}\n- {TWO_WRONG[1]}\n"
            "limits: {max_headers: 0}\ncolour: red",
            [
                r":6: colour: expected one of host, .*, got an unknown setting",
                r":1: port: expected a valid integer, got 'many'",
                r":5: limits\.max_headers: expected a number greater than or equal to 1, got 0",
                r":3: models\.0\.hidden_size: expected a multiple of 128, got 200",
                r":4: models\.1\.top_k: expected 1 to num_experts \(4\), got 9",
            ],
        ),
        (
            "limits: {max_batch_tokens: 5, max_queue_tokens: 6}\nbackend: tpu",
            [
                r":2: backend: expected one of auto, .*, got 'tpu'",
                r":1: limits\.max_request_tokens: expected at most max_batch_tokens \(5\), got 4096",
                r":1: limits\.max_request_tokens: expected at most max_queue_tokens \(6\), got 4096",
            ],
        ),
        (
            f"ranks: 5\nmodels:\n- {MODEL}\n- {MODEL[:-1]}, partition: p}}\nlimits:\n  max_buffered_bytes: 1",
            [
                r":2: models: expected different names, got 'm' 2 times",
                r":4: models\.1\.partition: expected one of partitions \(none\), got 'p'",
                r":1: ranks: expected at most the number of experts of model m \(4\), got 5",
                r":6: limits\.max_buffered_bytes: expected at least [0-9]+, got 1",
            ],
        ),
    ],
)
def test_every_mistake_is_reported_on_a_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    lines = str(caught.value).splitlines()
    assert list(caught.value.mistakes) == lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(re.escape(str(path)) + pattern, line), line


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("prt", "; did you mean port?"),
        ("limits.max_batch_token", "; did you mean limits.max_batch_tokens?"),
        ("limit.max_batch_tokens", "; did you mean limits?"),
        ("max_batch_tokens", "; did you mean limits.max_batch_tokens?"),
        ("channels.sockets", "; did you mean channels.socket?"),
        ("models.0.topk", "; did you mean models.0.top_k?"),
        ("models.0.routing.scoring_function", "; did you mean models.0.routing.scoring_func?"),
        ("max_bytes", "; did you mean shared_memory.max_bytes or channels.max_bytes?"),
        ("colour", ""),
    ],
)
def test_a_misspelt_setting_is_recognized(key: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a flag has it or a variable, in which it is shown as one."""
    models = Flag("--set models", "models", f"[{MODEL}]")
    with pytest.raises(SettingsError, match=rf"got an unknown setting{re.escape(hint)}$"):
        load_settings(None, [models, Flag(f"--set {key}", key, "3")])
    as_variable = "EXPERTD_" + key.upper().replace(".", "__")
    monkeypatch.setenv("EXPERTD_MODELS", f"[{MODEL}]")
    monkeypatch.setenv(as_variable, "3")
    for name in re.findall(r"[a-z_0-9.]+", hint.removeprefix("; did you mean")):
        if name != "or":
            hint = hint.replace(name, "EXPERTD_" + name.upper().replace(".", "__"))
    with pytest.raises(SettingsError, match=rf"got an unknown setting{re.escape(hint)}$"):
        load_settings(None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CONFGI", "CONFIG"),
        ("CACHEDIR", "CACHE_DIR"),
        ("LIMITS_MAX_BATCH_TOKENS", "LIMITS__MAX_BATCH_TOKENS"),
    ],
)
def test_a_misspelt_variable_is_recognized(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"EXPERTD_{name}", "3")
    with pytest.raises(SettingsError, match=rf"got an unknown setting; did you mean EXPERTD_{meant}\?$"):
        load_settings(None)


def test_a_long_list_of_mistakes_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("".join(f"key_{number}: 1\n" for number in range(21)))
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    *listed, last = caught.value.mistakes
    assert [line.split(": ")[1] for line in listed] == [f"key_{number}" for number in range(20)]
    assert last == f"{path}: expected valid settings, got 1 more that are not"
