"""Errors name the source of the invalid value: the file and line, the variable, or the flag."""

from pathlib import Path

import pytest

from expertd.service.settings.loader import Flag, SettingsError, load_settings
from tests.service.settings.refusals import BILLION_VALUES, MODEL

JSON_MODEL = (
    '{"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 4,\t"top_k": 2, '
    '"datatype": "%s"}'
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"port: 1000\nlimits:\n  max_batch_tokens: 5000\nmodels:\n  - {MODEL}\n")
    return path


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"EXPERTD_LIMITS": '{"max_batch_tokens": 0}', "EXPERTD_LIMITS__MAX_QUEUE_TOKENS": "9000"},
            r"^environment variable EXPERTD_LIMITS: limits\.max_batch_tokens: .*, got 0$",
        ),
        (
            {"EXPERTD_LIMITS": '{"max_batch_tokens": 9000}', "EXPERTD_LIMITS__MAX_BATCH_TOKENS": "0"},
            r"^environment variable EXPERTD_LIMITS__MAX_BATCH_TOKENS: limits\.max_batch_tokens: .*, got '0'$",
        ),
        (
            {"EXPERTD_LIMITS__MAX_REQUEST_TOKENS": "6000", "EXPERTD_LIMITS__MAX_QUEUE_TOKENS": "9000"},
            r"^environment variable EXPERTD_LIMITS__MAX_REQUEST_TOKENS, /.*config\.yaml:3: "
            r"limits\.max_request_tokens: expected at most max_batch_tokens \(5000\), got 6000$",
        ),
        (
            {"EXPERTD_LIMITS__MAX_BUFFERED_BYTES": "268763135"},
            r"^environment variable EXPERTD_LIMITS__MAX_BUFFERED_BYTES: "
            r"limits\.max_buffered_bytes: expected at least 268763136, got 268763135$",
        ),
        (
            {"EXPERTD_LIMITS": "7"},
            r"^environment variable EXPERTD_LIMITS: limits: expected an object, got 7$",
        ),
        (
            {"EXPERTD_LIMITS": "{1: 2}"},
            r"^environment variable EXPERTD_LIMITS: limits\.1: keys should be strings, got 1$",
        ),
        (
            {"EXPERTD_PORT__X": "7"},
            r"^environment variable EXPERTD_PORT__X: port: expected a valid integer, got an object$",
        ),
        (
            {"EXPERTD_MODELS": f"[{JSON_MODEL % 'FP8'}]", "EXPERTD_PORT": "1"},
            r"^environment variable EXPERTD_MODELS: models\.0\.datatype: expected 'BF16'.*, got 'FP8'$",
        ),
        (
            {"EXPERTD_MODELS__0__ROUTING__NUM_EXPERT_GROUPS": "3", "EXPERTD_MODELS__0__DATATYPE": "FP16"},
            r"^/.*config\.yaml:5, environment variable EXPERTD_MODELS__0__ROUTING__NUM_EXPERT_GROUPS: "
            r"models\.0\.num_experts: expected a multiple of num_expert_groups \(3\), got 4$",
        ),
        (
            {"EXPERTD_MODELS__1__NAME": "n"},
            r"^environment variable EXPERTD_MODELS__1__NAME: models: expected the index of one of its 1 "
            r"entries, counted from 0, got '1'$",
        ),
        (
            {"EXPERTD_MODELS__0__PARTITION": "p", "EXPERTD_PARTITIONS": "{q: 8}"},
            r"^environment variable EXPERTD_MODELS__0__PARTITION, environment variable EXPERTD_PARTITIONS: "
            r"models\.0\.partition: expected one of partitions \(q\), got 'p'$",
        ),
        (
            {"EXPERTD_PARTITIONS": "{q: 8, q: 9}"},
            r"^environment variable EXPERTD_PARTITIONS: partitions\.q: expected once, got twice .*1\)$",
        ),
        (
            {"EXPERTD_MODELS__0__WEIGHTS": "{seed: 1, path: /none}"},
            r"^environment variable EXPERTD_MODELS__0__WEIGHTS: models\.0\.weights: "
            r"expected exactly one of seed and path, got both$",
        ),
        (
            {"EXPERTD_PROT": "1"},
            r"^environment variable EXPERTD_PROT: prot: expected one of host, .*, got an unknown setting",
        ),
        ({"EXPERTD_MODELS": "[{"}, r"^environment variable EXPERTD_MODELS: models: expected YAML, got "),
        (
            {"EXPERTD_MODELS": "{}"},
            r"^environment variable EXPERTD_MODELS: models: expected a list, got an object$",
        ),
    ],
)  # fmt: skip
def test_the_variable_with_the_invalid_value_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=expected):
        load_settings(config)


TORCHRUN = {"NNODES": "3", "GROUP_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        (TORCHRUN, [], (3, 1, "node-0:29500")),
        ({**TORCHRUN, "NODE_RANK": "2"}, [], (3, 2, "node-0:29500")),
        ({**TORCHRUN, "EXPERTD_NODE_RANK": "0"}, [], (3, 0, "node-0:29500")),
        (
            TORCHRUN,
            [Flag("--nnodes", "nnodes", "2"), Flag("--rendezvous", "rendezvous", "a:1")],
            (2, 1, "a:1"),
        ),
        ({**TORCHRUN, "NNODES": ""}, [Flag("--nnodes", "nnodes", "2")], (2, 1, "node-0:29500")),
        ({**TORCHRUN, "NNODES": ""}, [], (1, 0, None)),
        ({**TORCHRUN, "NNODES": "1", "GROUP_RANK": "0"}, [], (1, 0, None)),
        ({**TORCHRUN, "NNODES": "1"}, [Flag("--nnodes", "nnodes", "2")], (2, 1, "node-0:29500")),
        ({**TORCHRUN, "GROUP_RANK": "0"}, [Flag("--nnodes", "nnodes", "1")], (1, 0, None)),
    ],
)
def test_torchruns_variables_are_settings_if_nodes_are_asked_for(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    flags: list[Flag],
    expected: tuple[int, int, str | None],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(config, flags)
    assert (settings.nnodes, settings.node_rank, settings.rendezvous) == expected


def test_torchruns_variables_override_the_file_and_are_named_in_errors(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(f"nnodes: 5\nrendezvous: a:1\n{config.read_text()}")
    monkeypatch.setenv("NNODES", "2:4")
    expected = r"^environment variable NNODES: nnodes: expected a valid integer, got '2:4'$"
    with pytest.raises(SettingsError, match=expected):
        load_settings(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 1\nhost: a\nport: 2\n", r"bad\.yaml:3: port: expected once, got twice \(first on line 1\)$"),
        (
            "limits:\n  max_batch_tokens: 1\n  max_batch_tokens: 2\n",
            r"bad\.yaml:3: limits\.max_batch_tokens: expected once, got twice \(first on line 2\)$",
        ),
        (
            "models:\n  - name: a\n    top_k: 1\n    name: b\n",
            r"bad\.yaml:4: models\.0\.name: expected once, got twice \(first on line 2\)$",
        ),
        ("a: [\nb: 1", r"bad\.yaml:2: expected YAML, got "),
        ("limits: &a [*a]", r"bad\.yaml: expected YAML, got values nested too deeply$"),
        ("port: 2024-99-99", r"bad\.yaml: expected YAML, got month must be in 1\.\.12"),
        (f'"{"x" * 500}": 1', r"bad\.yaml:1: 'x{59}: expected one of host, .*, got an unknown setting$"),
        ('"a\\nb": 1', r"bad\.yaml:1: 'a\\nb': expected one of host, .*, got an unknown setting$"),
        ("port: \x07", r"bad\.yaml: expected YAML, got "),
    ],
)
def test_invalid_yaml_and_duplicate_keys_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["_env_file", "_secrets_dir", "_cli_parse_args", "_build_sources", "self", "__pydantic_self__"]
)
def test_an_option_of_pydantic_settings_is_not_a_setting(config: Path, name: str) -> None:
    config.write_text(f"{name}: [x]\n{config.read_text()}")
    with pytest.raises(
        SettingsError, match=rf"config\.yaml:1: {name}: expected one of .* an unknown setting$"
    ):
        load_settings(config)


def test_a_merged_key_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"models:\n  - &first {MODEL}\n  - <<: *first\n    name: n\n    top_k: 9\n")
    with pytest.raises(SettingsError, match=r"config\.yaml:5.*: models\.1\.top_k: expected 1 to num_exp"):
        load_settings(path)
    path.write_text(path.read_text().replace("9", "1"))
    assert [(model.name, model.top_k) for model in load_settings(path).models] == [("m", 2), ("n", 1)]


def test_aliases_and_merges_of_others_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BILLION_VALUES.replace("[", "{<<: [").replace("]", "]}").replace("x", "{x: 1}"))
    with pytest.raises(SettingsError, match=r"config\.yaml:\d: expected at most 20000 values"):
        load_settings(path)
    path.write_text(BILLION_VALUES)
    expected = "expected at most 20000 values, also where aliases repeat them, got more"
    with pytest.raises(SettingsError) as error:
        load_settings(path)
    assert str(error.value) == f"{path}:5: {expected}"  # 9^4 values on line 4, 9^5 on line 5
    with pytest.raises(SettingsError) as error:
        load_settings(None, [Flag("--set models", "models", f"{{{', '.join(BILLION_VALUES.splitlines())}}}")])
    assert str(error.value) == f"flag --set models: models: {expected}"


def test_a_variable_can_set_an_entry_of_a_list(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_MODELS__0__LOCAL_EXPERTS", "0-1")
    monkeypatch.setenv("EXPERTD_MODELS__0__WEIGHTS__SEED", "")  # empty counts as unset
    (model,) = load_settings(config).models
    assert (model.name, model.local_experts, model.weights.seed) == ("m", "0-1", 0)


def test_a_variable_can_hold_yaml_lists_and_mappings(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_MODELS__0", "{name: n, weights: {seed: 7}}")
    monkeypatch.setenv("EXPERTD_MODELS__0__PARTITION", "copy")
    monkeypatch.setenv("EXPERTD_PARTITIONS__COPY", "8")
    settings = load_settings(config)
    (model,) = settings.models
    assert (model.name, model.top_k, model.weights.seed) == ("n", 2, 7)
    assert (model.partition, settings.partitions) == ("copy", {"copy": 8})
    monkeypatch.setenv("EXPERTD_MODELS__0__PARTITION", "null")
    assert load_settings(config).models[0].partition is None
    monkeypatch.setenv("EXPERTD_MODELS__0", "{name: n")
    with pytest.raises(
        SettingsError, match=r"^environment variable EXPERTD_MODELS__0: models\.0: expected YAML"
    ):
        load_settings(config)


def test_a_flag_keeps_capitals_and_underscores_in_names(config: Path) -> None:
    flag = Flag("--set partitions.Copy__2", "partitions.Copy__2", "8")
    assert load_settings(config, [flag]).partitions == {"Copy__2": 8}
    with pytest.raises(
        SettingsError,
        match=r"^flag --set Port: Port: expected one of .* an unknown setting; did you mean port\?$",
    ):
        load_settings(config, [Flag("--set Port", "Port", "1")])
    with pytest.raises(SettingsError, match=r"^flag --set models: models: expected YAML, got "):
        load_settings(config, [Flag("--set models", "models", "[")])


def test_any_setting_can_be_a_flag(config: Path) -> None:
    flags = {
        "limits.max_batch_tokens": "8192",
        "limits.body_timeout_seconds": "2.5",
        "partitions": "{compute: 112}",
        "partitions.copy": "20",
        "models.0.partition": "compute",
        "models.0.name": "123",  # text is kept as text
        "access_log": "true",
    }
    settings = load_settings(config, [Flag(f"--set {key}", key, value) for key, value in flags.items()])
    assert settings.limits.max_batch_tokens == 8192
    assert settings.limits.body_timeout_seconds == 2.5
    assert settings.partitions == {"compute": 112, "copy": 20}
    assert (settings.models[0].name, settings.models[0].partition) == ("123", "compute")
    assert settings.access_log
    assert load_settings(config, [Flag("--log-level", "log_level", "INFO")]).log_level == "info"
    back = Flag("--set models.0.partition", "models.0.partition", "null")
    assert load_settings(config, [*(Flag("", key, value) for key, value in flags.items()), back]).models[
        0
    ].partition is None  # fmt: skip


def test_two_variables_for_one_setting_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_PORT", "many")
    monkeypatch.setenv("EXPERTD_port", "2000")
    with pytest.raises(SettingsError, match="expected one of EXPERTD_PORT and EXPERTD_port, got both"):
        load_settings(config)
