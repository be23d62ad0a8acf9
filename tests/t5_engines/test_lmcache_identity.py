"""What objects of LMCache share a namespace, and which are not kept at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.connectors import lmcache_identity
from kvfs.connectors.lmcache_identity import Identities, Layout, grouped
from kvfs.connectors.lmcache_settings import Settings
from kvfs.errors import InputError

FLOAT = SimpleNamespace(itemsize=4, __str__=lambda: "float32")
LAYOUT = Layout("torch.float32(2, 4, 128, 64)", 2 * 4 * 128 * 64 * 4)


def key(
    model: str = "org/llama", rank: int = 7, group: int = 0, salt: str = "", n: int = 32
) -> Any:
    return SimpleNamespace(
        chunk_hash=bytes(range(n)), model_name=model, kv_rank=rank, object_group_id=group,
        cache_salt=salt,
    )  # fmt: skip


def identities(tmp_path: Path, version: str = "1", **settings: Any) -> Identities:
    parsed, models = Settings.parse({"store": "/srv/kvfs", "chunk_size": 128, **settings})
    return Identities(parsed, models, version, tmp_path)


def test_the_same_objects_have_the_same_identity(tmp_path: Path) -> None:
    one, other = (identities(tmp_path, weights="rev1").of(key(), LAYOUT) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert one.row_bytes == LAYOUT.size and one.block_tokens == 128


def test_whatever_shapes_the_bytes_parts_the_namespaces(tmp_path: Path) -> None:
    base = identities(tmp_path, weights="rev1")
    other = Layout("torch.bfloat16(4, 4, 128, 64)", LAYOUT.size)
    made = [
        base.of(key(), LAYOUT),
        base.of(key(model="org/mistral"), LAYOUT),
        base.of(key(rank=8), LAYOUT),
        base.of(key(group=1), LAYOUT),
        base.of(key(salt="alice"), LAYOUT),
        base.of(key(), other),
        identities(tmp_path, weights="rev2").of(key(), LAYOUT),
        identities(tmp_path, weights="rev1", version="2").of(key(), LAYOUT),
        identities(tmp_path, weights="rev1", salt="alice").of(key(), LAYOUT),
        identities(tmp_path, weights="rev1", salt="a").of(key(salt="lice"), LAYOUT),
        identities(tmp_path, weights="rev1", salt="0:alice").of(key(), LAYOUT),
    ]
    assert len({i.fingerprint for i in made}) == len(made)


def test_identities_are_kept_and_not_without_bound(tmp_path: Path) -> None:
    """A salt may be a tenant's, or of one request alone."""
    made = identities(tmp_path, weights="rev1")
    first = made.of(key(), LAYOUT)
    assert made.of(key(), LAYOUT) is first
    for i in range(lmcache_identity._KEPT):
        made.of(key(salt=f"tenant{i}"), LAYOUT)
    again = made.of(key(), LAYOUT)
    assert again == first and again is not first


def test_a_name_alone_is_not_an_identity(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="revision of the weights of org/llama"):
        identities(tmp_path).of(key(), LAYOUT)
    known = identities(tmp_path, models={"org/llama": "rev1"})
    assert known.of(key(), LAYOUT).weights == "org/llama@rev1"
    with pytest.raises(InputError, match="org/other"):
        known.of(key(model="org/other"), LAYOUT)


def test_the_files_of_a_local_model_are_its_revision(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    before = identities(tmp_path).of(key(model=str(model)), LAYOUT)
    (model / "model.safetensors").write_bytes(b"other weights")
    after = identities(tmp_path).of(key(model=str(model)), LAYOUT)
    assert before.fingerprint != after.fingerprint


def test_keys_that_may_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="8 bytes are too short"):
        identities(tmp_path, weights="r").of(key(n=8), LAYOUT)


def test_the_size_of_an_object_is_that_of_its_tensors() -> None:
    layout = Layout.of([(2, 3), (5,)], [FLOAT, SimpleNamespace(itemsize=1)])
    assert layout.size == 6 * 4 + 5


def test_keys_are_taken_row_by_row() -> None:
    keys = [key(), key(group=1), key(), key(salt="a"), key(group=1)]
    assert grouped(keys) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "store"),
        ({"store": "/s", "chunksize": 1}, "unknown setting chunksize"),
        ({"store": "/s", "chunk_size": "256"}, "chunk_size must be of type int"),
        ({"store": "/s", "chunk_size": 0}, "chunk_size must be positive"),
        ({"store": "/s", "models": {"a": 1}}, "models must map"),
        ({"store": "/s", "fetch": "elsewhere"}, "process or inline"),
    ],
)
def test_settings_that_are_wrong_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Settings.parse(given)
