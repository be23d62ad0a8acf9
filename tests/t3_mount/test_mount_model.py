"""A real mount against the plain model: random chains, forks and evictions, seen by os.walk."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.testing.chains import Clock, grow, identity, tokens_of
from kvfs.testing.forest import Chain, Model, Nested
from kvfs.testing.mounts import Mounted, mounted

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["put", "put", "put", "remove"]), chains), max_size=10)
salts = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    # Runs of one millisecond would be told apart by their hashes, which the model does not do.
    clock = Clock(time.time())
    with mounted(tmp_path_factory.mktemp("model"), row_bytes=64, clock=clock) as made:
        made.mount()
        yield made


def seen(directory: Path) -> Nested:
    """What is in a directory, in the order in which it is listed."""
    out: Nested = {}
    for entry in os.scandir(directory):
        path = directory / entry.name
        assert entry.name not in out
        if entry.is_dir():
            out[entry.name] = seen(path)
        elif entry.name != "namespace.json":
            out[entry.name] = path.read_bytes()
            assert path.stat().st_size == len(path.read_bytes())
    return out


@settings(max_examples=15)
@given(steps)
def test_the_mount_is_the_models(place: Mounted, steps: list[tuple[str, Chain]]) -> None:
    ns = place.store.create_namespace(identity(salt=str(next(salts))))
    model = Model(ns)
    for what, chain in steps:
        if what == "put":
            grow(place.store, ns, chain)
            model.put(chain)
        else:
            place.store.remove(ns, tokens_of(chain), from_block=len(chain) - 1)
            model.remove(chain)
        found, expected = seen(place.point / ns.name), model.tree()
        assert found == expected
        assert "Traceback" not in place.log()
