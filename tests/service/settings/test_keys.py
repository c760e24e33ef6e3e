"""Files of API keys: their form, their mistakes, and the search for a key."""

import hmac
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertd.service.settings.keys import MAX_KEYS, Keys, load_keys
from expertd.service.settings.values import SettingsError
from tests.service.keys import all_keys, key_of
from tests.service.settings.refusals import BILLION_VALUES

SECRET = "yvZ8KQeUo0v1p2BqQ6m8w3s5d7f9h1k2"
FIELDS = "name, sha256 and rights"
HASH = "64 hexadecimal digits in lower case"
NAME = "1 to 64 letters, digits, '.', '_' or '-'"
RIGHTS = "infer, admin and metrics, or some of them"
GOOD = {"name": "a", "sha256": sha256(b"a").hexdigest(), "rights": ["infer"]}
OTHER = {"name": "b", "sha256": sha256(b"b").hexdigest(), "rights": ["metrics"]}


def load(path: Path, text: str) -> Keys:
    path.write_text(text)
    return load_keys(path)


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    keys = load_keys(all_keys(tmp_path / "keys.yaml"))
    found = keys.find(key_of("admin").encode())
    assert found is not None
    assert (found.name, found.rights) == ("admin", ("admin",))
    for wrong in (b"", b"admin", key_of("admin").encode() + b"x", found.sha256.encode()):
        assert keys.find(wrong) is None


def test_every_entry_is_compared_also_after_a_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = load_keys(all_keys(tmp_path / "keys.yaml")), []
    compare = hmac.compare_digest

    def counted(a: str, b: str) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for name in ("infer", "metrics", "nobody"):
        compared.clear()
        keys.find(key_of(name).encode())
        assert compared == [key.sha256 for key in keys.keys]


def test_an_empty_list_admits_nobody(tmp_path: Path) -> None:
    assert load(tmp_path / "keys", "[]").find(b"") is None


ENTRY = f": 0: expected {FIELDS}, got another text"
NO_YAML = ": expected YAML, got something else"
MANY = ":5: expected at most 20000 values, also where aliases repeat them, got more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": expected a list of keys, got none"),
        ("a: 1", ": expected a list of keys, got an object"),
        (SECRET, ": expected a list of keys, got another text"),
        (f"- {SECRET}", ENTRY),
        *((text, NO_YAML) for text in ("[" * 100_000, "- " * 50_000, "&a [*a]")),
        (f"@{SECRET}", f":1{NO_YAML}"),
        *((text, f":2{NO_YAML}") for text in (f"- {{{SECRET}", f"- {SECRET}: 1\n  {SECRET}: 2")),
        (BILLION_VALUES, MANY),
    ],
    ids=range(11),
)
def test_a_file_that_is_no_list_of_keys(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "keys"
    with pytest.raises(SettingsError) as error:
        load(path, text)
    assert error.value.mistakes == (f"keys: {path}{expected}",)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key": SECRET}, f": expected only {FIELDS}, got 1 more"),
        ({"sha256": SECRET}, f".sha256: expected {HASH}, got another text"),
        ({"sha256": "A" * 64}, f".sha256: expected {HASH}, got another text"),
        ({"sha256": 7}, f".sha256: expected {HASH}, got another value"),
        ({"name": f"{SECRET} "}, f".name: expected {NAME}, got another text"),
        ({"name": "n" * 65}, f".name: expected {NAME}, got another text"),
        ({"name": "a\n"}, f".name: expected {NAME}, got another text"),
        ({"name": None}, f".name: expected {NAME}, got none"),
        ({"rights": []}, f".rights: expected a list of {RIGHTS}, got none"),
        ({"rights": "infer"}, f".rights: expected a list of {RIGHTS}, got another text"),
        ({"rights": [SECRET]}, f".rights: expected {RIGHTS}, got 1 of another name"),
        ({"rights": [{}, "infer", 3]}, f".rights: expected {RIGHTS}, got 2 of another name"),
        ({"rights": ["infer", "infer"]}, ".rights: expected each right once, got one twice"),
        ({"name": "b"}, ".name: expected another one than that of key 0, got the same"),
        ({"sha256": OTHER["sha256"]}, ".sha256: expected another one than that of key 0, got the same"),
    ],
)
def test_each_mistake_is_a_sentence_without_values(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "keys"
    with pytest.raises(SettingsError) as error:
        load(path, yaml.safe_dump([OTHER, {**GOOD, **change}]))
    assert error.value.mistakes == (f"keys: {path}: 1{expected}",)
    assert SECRET not in str(error.value)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    os.mkfifo(path)
    with pytest.raises(SettingsError) as error:
        load_keys(path)
    assert error.value.mistakes == (f"keys: {path}: expected a regular file, got another kind",)


def test_all_mistakes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load(tmp_path / "keys", yaml.safe_dump([{}, GOOD]))
    assert [mistake.split(": ")[2] for mistake in error.value.mistakes] == ["0.name", "0.sha256", "0.rights"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^keys: .*none\.yaml: cannot be read: No such file"):
        load_keys(tmp_path / "none.yaml")


def test_the_number_of_keys_is_bounded(tmp_path: Path) -> None:
    entries = [
        {"name": str(number), "sha256": f"{number:064x}", "rights": ["infer"]} for number in range(MAX_KEYS)
    ]
    path = tmp_path / "keys"
    assert len(load(path, yaml.safe_dump(entries)).keys) == MAX_KEYS
    with pytest.raises(SettingsError, match=f"expected at most {MAX_KEYS} keys, got {MAX_KEYS + 1}$"):
        load(path, yaml.safe_dump([*entries, GOOD]))
