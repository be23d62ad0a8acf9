"""Fixtures of the tests of engines.

The modules beside this one can be imported: they are scripts of child processes as well. None is
imported here, so that tests of one engine run where another is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import Store

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    """A new store in `store_dir`."""
    with Store.init(store_dir) as store:
        yield store


@pytest.fixture(scope="module")
def child() -> Iterator[Any]:
    """A process that restores caches of transformers models, for a whole module."""
    from hf_support import Child

    child = Child()
    yield child
    child.close()


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny Llama; must not be changed."""
    from tiny_models import build

    return build("llama")


@pytest.fixture(scope="module")
def mistral() -> Any:
    """A tiny Mistral, whose layers all slide, with a window of 200; must not be changed."""
    from tiny_models import build

    return build("mistral")


@pytest.fixture
def backend(store_dir: Path) -> Any:
    """The storage of a new store, to which things can happen."""
    from kvfs.backend import PosixBackend
    from kvfs.testing.faults import FaultyBackend

    Store.init(store_dir).close()
    return FaultyBackend(PosixBackend(str(store_dir)))


@pytest.fixture
def halves(tmp_path: Path, backend: Any) -> Iterator[Any]:
    """Makes halves of the vLLM connector; shm: name of the host's memory for slots."""
    from vllm_halves import Half

    made: list[Half] = []

    def make(config: Any, seed: int = 1, shm: str = "shm", **settings: Any) -> Half:
        made.append(Half(tmp_path, config, seed, backend, tmp_path / shm, **settings))
        return made[-1]

    yield make
    for half in made:
        half.close()
