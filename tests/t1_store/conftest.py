"""What the tests of kvctl share: a store with one namespace, named by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.testing.command import kvctl, kvctl_json


@pytest.fixture
def cli_store(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store made by kvctl, with one namespace of the preset tiny; KVFS_STORE names it."""
    monkeypatch.setenv("KVFS_STORE", str(store_dir))
    monkeypatch.delenv("KVFS_NAMESPACE", raising=False)
    monkeypatch.delenv("KVFS_CONFIG", raising=False)
    kvctl("init")
    kvctl("ns", "create", "--preset", "tiny", "--weights", "w", "--tokenizer", "t")
    return store_dir


@pytest.fixture
def cli_namespace(cli_store: Path) -> str:
    """The name of that namespace."""
    name: str = kvctl_json("ns", "list")["namespace"]
    return name
