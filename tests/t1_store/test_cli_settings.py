"""Where settings come from, and which of two wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfs.cli import settings
from kvfs.testing.command import kvctl, kvctl_json


@pytest.fixture
def stores(tmp_path: Path, index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Four stores, one for each place a setting comes from; files name the last two."""
    monkeypatch.delenv("KVFS_STORE", raising=False)
    monkeypatch.delenv("KVFS_CONFIG", raising=False)
    stores = {name: tmp_path / name for name in ("option", "environment", "user", "host")}
    for path in stores.values():
        kvctl("init", path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    user = tmp_path / "config" / "kvfs" / "config.toml"
    user.parent.mkdir(parents=True)
    user.write_text(f'store = "{stores["user"]}"\n')
    host = tmp_path / "host.toml"
    host.write_text(f'store = "{stores["host"]}"\nnamespace = "tiny"\n')
    monkeypatch.setattr(settings, "HOST_FILE", str(host))
    return stores


def store_of(*args: object) -> Path:
    return Path(kvctl_json("stats", *args)["store"])


def test_the_strongest_wins(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_of() == stores["user"]
    (tmp_path / "config" / "kvfs" / "config.toml").write_text("")
    assert store_of() == stores["host"]
    monkeypatch.setenv("KVFS_STORE", str(stores["environment"]))
    assert store_of() == stores["environment"]
    assert store_of("--store", stores["option"]) == stores["option"]
    monkeypatch.setenv("KVFS_STORE", "")  # set to nothing is not set
    assert store_of() == stores["host"]


def test_before_a_subcommand_or_behind_it(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of a group holds for its commands, against the environment, too."""
    monkeypatch.setenv("KVFS_STORE", str(stores["environment"]))
    option, other = str(stores["option"]), str(stores["host"])
    told = kvctl("ttl", "--json", "--store", option, "define", "long", "12h").stdout
    assert json.loads(told)["classes"]["long"] == 43200
    assert "long" in kvctl_json("ttl", "--store", option)["classes"]
    assert "long" not in kvctl_json("ttl")["classes"]
    kvctl("ttl", "--store", option, "define", "--store", other, "short", "1h")
    assert "short" in kvctl_json("ttl", "--store", other)["classes"]


def test_a_file_of_ones_own(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.toml"
    monkeypatch.setenv("KVFS_CONFIG", str(file))
    assert "KVFS_CONFIG" in kvctl("stats", code=7).stderr
    file.write_text(f'store = "{stores["option"]}"\nindex = "{tmp_path}/other-index"\n')
    monkeypatch.delenv("KVFS_INDEX")
    assert store_of() == stores["option"]
    assert (tmp_path / "other-index" / "paths").is_dir()


def test_namespace_and_home(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config" / "kvfs" / "config.toml").write_text('store = "~/option"\n')
    for weights in ("one", "two"):
        kvctl("ns", "create", "--preset", "tiny", "--weights", weights, "--tokenizer", "t")
    # "tiny" of the host's file is the beginning of both names.
    assert "more than one" in kvctl("check", "--tokens", "1", code=2).stderr
    name = kvctl_json("ns", "list")[1]["namespace"]
    assert kvctl_json("check", "--tokens", "1", "--ns", name, code=3)["namespace"] == name
    monkeypatch.setenv("KVFS_NAMESPACE", name[:-1])
    assert kvctl_json("check", "--tokens", "1", code=3)["namespace"] == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stroe = 'x'", "unknown setting 'stroe'"),
        ("store = 5", "must be a string"),
        ("store = 'relative'", "not an absolute path"),
        ("store", "Expected"),
        ("store = '\xff'", ""),
    ],
)
def test_bad_files_are_named(stores: dict[str, Path], tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config" / "kvfs" / "config.toml"
    file.write_bytes(text.encode("latin-1"))
    said = kvctl("stats", code=7).stderr
    assert str(file) in said and says in said and said.count("\n") == 1


def test_no_file_is_opened_that_is_not_needed(stores: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config" / "kvfs" / "config.toml").write_text("garbage")
    assert store_of("--store", stores["option"]) == stores["option"]
