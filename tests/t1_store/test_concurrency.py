"""Many writers at once: nothing lost, nothing mixed up."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.backend.select import open_backend
from kvfs.frames import RunEntry, SegmentEntry
from kvfs.journal import JournalReader
from kvfs.repair.rebuild import rebuild
from kvfs.segment import WRITER_BYTES, Header
from kvfs.store import Store
from kvfs.testing import children
from kvfs.testing.blocks import payloads
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import START, Stock, tokens

BLOCK = 4


def opened(place: Path, host: str, nsid: bytes) -> Stock:
    """The store as a process of a host opens it. Its clock stands still."""
    store = Store.open(place / "store", index=str(place / host), clock=lambda: START)
    return Stock(store, store.namespace(nsid), None)  # type: ignore[arg-type]


# many hosts that cannot tell themselves apart


def segment_headers(store: Path) -> dict[str, Header]:
    out = {}
    for path in sorted(store.glob("seg/**/*.seg")):
        with path.open("rb") as f:
            out[str(path.relative_to(store))] = Header.decode(f.read(4096), str(path))
    return out


def told_by_journals(store: Path, uuid: bytes) -> dict[bytes, set[bytes]]:
    """Segment id -> ids of the writers whose journals tell of it."""
    backend = open_backend(str(store))
    told: dict[bytes, set[bytes]] = {}
    for writer in backend.names("log"):
        for name in backend.names(f"log/{writer}"):
            reader = JournalReader(backend, writer, int(name.removesuffix(".log")), uuid)
            entries = list(reader.decode(reader.read(0), 0))
            assert reader.header is not None and writer.endswith(reader.header.writer_id.hex())
            for entry, _ in entries:
                if isinstance(entry, RunEntry | SegmentEntry):
                    told.setdefault(entry.segment, set()).add(reader.header.writer_id)
    return told


def test_writers_that_start_in_the_same_second(place: Path) -> None:
    """Eight of them, with one host name and one time, started twice: 8,000 blocks."""
    stock = Stock.make(place / "store", index=str(place / "main"), segment_bytes=1 << 20)
    nsid, uuid = stock.ns.nsid, stock.store.uuid
    stock.close()
    writers, prompts = 8, 25
    mine = {
        (turn, w): [tokens(1000 * turn + 100 * w + n, 20 * BLOCK) for n in range(prompts)]
        for turn in range(2)
        for w in range(writers)
    }

    def write(turn: int, number: int) -> Callable[[], None]:
        def work() -> None:
            # Two processes a host, four hosts.
            with opened(place, f"host{number % 4}", nsid).store as store:
                ns = store.namespace(nsid)
                for prompt in mine[turn, number]:
                    hasher = ns.hasher(prompt)
                    assert store.put(ns, hasher, payloads(hasher, ns.row_bytes)).complete

        return work

    for turn in range(2):
        assert children.run_all([write(turn, n) for n in range(writers)]) == [0] * writers
    reader = opened(place, "reader", nsid)
    found = [reader.good(prompt) for some in mine.values() for prompt in some]
    assert found == [20] * (2 * writers * prompts)
    reader.store.close()
    headers = segment_headers(place / "store")
    assert len({h.segment_id for h in headers.values()}) == len(headers)
    for path, header in headers.items():
        assert header.segment_id[:WRITER_BYTES].hex() in path
    told = told_by_journals(place / "store", uuid)
    for header in headers.values():
        assert told[header.segment_id] == {header.segment_id[:WRITER_BYTES]}
    assert len({h.segment_id[:WRITER_BYTES] for h in headers.values()}) == 2 * writers


# overlapping prompts


def family(seed: int, size: int) -> list[list[int]]:
    """Prompts that branch off each other at every depth."""
    rng = random.Random(seed)
    prompts = [tokens(seed, 8 * BLOCK)]
    while len(prompts) < size:
        parent = rng.choice(prompts)
        keep = BLOCK * rng.randrange(len(parent) // BLOCK + 1)
        more = tokens(rng.randrange(10**6), BLOCK * rng.randrange(1, 8))
        prompts.append(parent[:keep] + more)
    return prompts


def unique_blocks(prompts: list[list[int]]) -> int:
    return len({tuple(p[:n]) for p in prompts for n in range(BLOCK, len(p) + 1, BLOCK)})


@pytest.mark.parametrize("hosts", [1, 4], ids=["one host", "four hosts"])
def test_processes_that_store_the_same_prompts(place: Path, hosts: int) -> None:
    """Each in another order; some of it is written twice, all of it is found once."""
    prompts = family(5, 60)
    stock = Stock.make(place / "store", index=str(place / "host0"), segment_bytes=1 << 18)
    nsid = stock.ns.nsid

    def work(number: int) -> Callable[[], None]:
        def put() -> None:
            mine = opened(place, f"host{number % hosts}", nsid)
            mixed = list(prompts)
            random.Random(number).shuffle(mixed)
            for n, prompt in enumerate(mixed):
                assert mine.put(prompt).complete
                assert mine.good(prompt) == len(prompt) // BLOCK
                if n % 7 == 0:
                    mine.store.catch_up()
            mine.store.close()

        return put

    assert children.run_all([work(n) for n in range(4)]) == [0] * 4
    stock.store.clock = lambda: START
    stock.store.catch_up()
    for _ in range(2):
        assert [stock.good(p) for p in prompts] == [len(p) // BLOCK for p in prompts]
        assert index_faults(stock.store.index) == []
        assert stock.store.stats()["blocks"] == unique_blocks(prompts)
        rebuild(stock.store, source="journals")
    stock.close()


@pytest.mark.parametrize("durability", ["none", "batch", "always"])
def test_threads_that_store_fetch_and_remove(place: Path, durability: str) -> None:
    """Whatever a fetch delivers meanwhile is right; what was put last and not removed is there."""
    stock = Stock.make(
        place / "store", index=str(place / "index"), segment_bytes=1 << 18, durability=durability
    )
    prompts, removed = family(6, 40), family(7, 10)
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as e:
                errors.append(e)

        return threading.Thread(target=run)

    def put(seed: int) -> Callable[[], None]:
        def work() -> None:
            for prompt in random.Random(seed).sample(prompts, len(prompts)):
                assert stock.put(prompt).complete
                assert stock.good(prompt) == len(prompt) // BLOCK

        return work

    def come_and_go() -> None:
        rng = random.Random(8)
        while not done.is_set():
            prompt = rng.choice(removed)
            assert stock.put(prompt).error is None
            stock.store.remove(stock.ns, prompt, from_block=rng.randrange(4))

    def look() -> None:
        rng = random.Random(9)
        while not done.is_set():
            stock.good(rng.choice(prompts + removed))

    writers = [guarded(put(seed)) for seed in range(4)]
    others = [guarded(come_and_go), guarded(look), guarded(look)]
    for thread in writers + others:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert errors == []
    assert [stock.good(p) for p in prompts] == [len(p) // BLOCK for p in prompts]
    assert index_faults(stock.store.index) == []
    stock.close()
    assert not [fd for fd in os.listdir("/proc/self/fd") if _is_below(fd, place)]


def _is_below(fd: str, place: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"{place}/")
    except OSError:
        return False
