"""The cleaner on storage that fails, and killed at any instant: nothing that lives is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import KvfsError
from kvfs.gc import folding
from kvfs.gc.collector import Collector, GcResult
from kvfs.limits import Limits
from kvfs.repair.fsck import fsck
from kvfs.store import Store
from kvfs.testing.faults import CutAt, Fail, FaultyBackend, Rule, Short
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Clock, Stock, tokens

CHAINS = 6


def worn(path: Path, **options: Any) -> tuple[Stock, dict[int, list[int]]]:
    """A store of which each segment is half in use: the prompts to find, by the blocks of each."""
    stock = Stock.make(path, segment_bytes=128 << 10, **options)
    kept = {}
    for seed in range(CHAINS):
        chain: list[int] = []
        for turn in range(4):
            chain = tokens(10 * seed + turn, 24, after=chain)
            stock.put(chain)
            waste = tokens(1000 + 10 * seed + turn, 28)
            stock.put(waste)
            stock.store.remove(stock.ns, waste)
        kept[seed] = chain
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    Limits(clean_share=0.9).save(stock.store.backend)
    return stock, kept


def lost(stock: Stock, kept: dict[int, list[int]]) -> dict[int, int]:
    """Chains of which fetch does not deliver all."""
    found = {seed: stock.good(chain) for seed, chain in kept.items()}
    return {seed: n for seed, n in found.items() if n != len(kept[seed]) // 4}


def sound(stock: Stock) -> None:
    report = fsck(stock.store)
    assert not report.damaged, report.findings
    assert report.level_count("warning") == 0, report.findings
    assert index_faults(stock.store.index) == []


WRITES = [
    ("create", "seg/*"), ("writev", "seg/*"), ("write_behind", "seg/*"),
    ("sync", "seg/*"), ("truncate", "seg/*"), ("unlink", "seg/*"), ("remove_tree", "seg/*"),
    ("remove_empty", "seg/*"), ("create", "log/*"), ("writev", "log/*"), ("sync", "log/*"),
    ("unlink", "log/*"), ("remove_empty", "log/*"), ("create", "ckpt/*"), ("writev", "ckpt/*"),
    ("sync", "ckpt/*"), ("unlink", "ckpt/*"), ("put_new", "gc.lease"), ("replace", "gc.lease"),
    ("unlink", "gc.lease"), ("replace", "gc.last"),
]  # fmt: skip
READS = [("readv", "seg/*"), ("open", "seg/*"), ("size", "seg/*"), ("names", "seg*")]
DAY = 86_400.0
STEPS = (1, 1, 2.2 * DAY, 1, 1.2 * DAY, 1.2 * DAY, 1.2 * DAY)
"""Seconds in front of each pass, in all less than the time to live of what must be there at the
end. Files go one by one on their own day, later the day's directory as a whole."""


class Spy(FaultyBackend):
    """Notes which operations were called, and on what."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_backend(str(path)))
        self.seen: set[tuple[str, str]] = set()

    def _call(self, op: str, path: str, run: Any, **about: Any) -> Any:
        top = path.split("/")[0]
        self.seen.add((op, f"{top}/*" if "/" in path else top))
        return super()._call(op, path, run, **about)


@pytest.fixture
def aged(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Stock, Spy, Any]:
    """A worn store that has all there is for a collector to do, in passes more than a day apart."""
    monkeypatch.setattr(folding, "FOLD_BYTES", 300)
    spy = Spy(store_dir)
    stock, kept = worn(store_dir, durability="batch", grace_seconds=0.0, backend=spy)
    stock.put(tokens(5000, 40), ttl_class="agent")  # its time is over in between
    return stock.again(backend=spy), spy, kept


def collect(stock: Stock, seconds: float, fail: Callable[[], object] = bool) -> GcResult | None:
    """A pass after so many seconds, behind a put that journals grow by. It takes so long that the
    lease has to be prolonged. fail: called before the pass."""

    def on_phase(phase: str) -> None:
        stock.clock.now += 400

    stock.clock.now += seconds
    stock.put(tokens(6000 + len(stock.prompts), 80))
    fail()
    with contextlib.suppress(KvfsError, OSError):
        return Collector(stock.store, force=True, on_phase=on_phase).run()
    return None


def test_these_are_all_sites(aged: tuple[Stock, Spy, Any]) -> None:
    """What a collector changes is in the list above, and it does all that is in the list."""
    stock, spy, _ = aged
    spy.seen.clear()
    for seconds in STEPS:
        assert collect(stock, seconds) is not None
    changes = {op for op, _ in WRITES}
    assert {site for site in spy.seen if site[0] in changes} == set(WRITES)
    stock.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("op", "path"), [*WRITES, *READS])
def test_an_error_at_every_site(
    aged: tuple[Stock, Spy, Any], store_dir: Path, op: str, path: str, error: int
) -> None:
    stock, spy, kept = aged
    rules: list[Rule] = []
    for i, seconds in enumerate(STEPS):
        nth = 2 if i == 1 else 1
        collect(stock, seconds, lambda n=nth: rules.append(spy.on(op, path, nth=n, do=Fail(error))))  # type: ignore[misc]
        spy.clear()
        assert lost(stock, kept) == {}
    assert any(rule.hits for rule in rules), "it was never called"
    collect(stock, 601)  # a lease that could not be given back has its time
    result = collect(stock, 1)
    assert result is not None and result.problems == []
    assert lost(stock, kept) == {}
    sound(stock)
    again = stock.again()
    assert lost(again, kept) == {}
    other = again.another(index=str(store_dir) + ".other")
    assert lost(other, kept) == {}
    stock.close()


@pytest.mark.parametrize("effect", [Short(5000), CutAt(40_000, errno.ENOSPC)])
def test_short_writes_and_a_disk_that_ends(store_dir: Path, effect: Any) -> None:
    faults = FaultyBackend(open_backend(str(store_dir)))
    stock, kept = worn(store_dir, backend=faults)
    faults.on("writev", "seg/*", do=effect, times=None)
    with contextlib.suppress(KvfsError):
        Collector(stock.store).run()
    faults.clear()
    assert lost(stock, kept) == {}
    Collector(stock.store).run()
    assert lost(stock, kept) == {}
    sound(stock)
    stock.close()


def test_an_error_in_every_tenth_call(store_dir: Path) -> None:
    faults = FaultyBackend(open_backend(str(store_dir)), seed=11)
    stock, kept = worn(store_dir, grace_seconds=0.0, backend=faults)
    for op in ("create", "writev", "sync", "truncate", "unlink"):
        for path in ("seg/*", "log/*"):  # a lease that cannot be given back has its time
            faults.on(op, path, do=Fail(errno.EIO), times=None, chance=0.1)
    for _ in range(30):
        stock.clock.now += 1
        with contextlib.suppress(KvfsError, OSError):
            Collector(stock.store).run()
    faults.clear()
    assert lost(stock, kept) == {}
    stock.clock.now += 1
    Collector(stock.store).run()
    assert not fsck(stock.store).damaged  # files that could not be removed are left over
    assert index_faults(stock.store.index) == []
    stock.close()


# Seeds below 33,333 begin with different blocks.
WORKER = """
import random, sys, time
from kvfs.gc.collector import Collector
from kvfs.errors import KvfsError
from kvfs.store import Store
from kvfs.testing.blocks import payloads
from kvfs.testing.stock import tokens
path, index, role, n = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
store = Store.open(path, index=index)
ns = store.namespaces()[0]
rng = random.Random(n)
print("ready", flush=True)
step = 0
while True:
    step += 1
    if role == "clean":
        try: Collector(store, force=True).run()
        except KvfsError: pass
        continue
    chain, turns = [], rng.randrange(1, 5)
    for turn in range(turns):
        chain = tokens(3000 * n + 5 * step + turn, 24, after=chain)
        hasher = ns.hasher(chain)
        waste = ns.hasher(tokens(27_500 + (700 * n + step) % 5000, 28))
        put = store.put(ns, hasher, payloads(hasher, ns.row_bytes))
        store.put(ns, waste, payloads(waste, ns.row_bytes))
        store.remove(ns, waste)
        print(5 * step, turn, int(put.complete), flush=True)
        if put.error is not None: print(put.error, file=sys.stderr)
"""


def start(stock: Stock, index: Path, role: str, n: int) -> subprocess.Popen[str]:
    arguments = [stock.store.path, str(index), role, str(n)]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env={**os.environ, "KVFS_INDEX_FORCE": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def acknowledged(out: str, n: int) -> list[list[int]]:
    """The prompts that a killed writer was told are stored."""
    chains: dict[int, list[int]] = {}
    prompts = []
    for line in out.splitlines():
        parts = line.split()
        if len(parts) != 3:
            continue
        step, turn, complete = map(int, parts)
        before = chains.get(step, []) if turn else []
        chains[step] = tokens(3000 * n + step + turn, 24, after=before)
        if complete:
            prompts.append(chains[step])
    return prompts


@pytest.mark.timeout(180)
def test_cleaners_and_writers_killed_at_random(store_dir: Path, tmp_path: Path) -> None:
    """Of two hosts. Whatever was acknowledged is delivered, by both, and the store is sound."""
    clock = Clock(time.time())
    stock = Stock.make(
        store_dir, clock=clock, segment_bytes=128 << 10, grace_seconds=1.0,
        index=str(tmp_path / "a"),
    )  # fmt: skip
    Limits(clean_share=0.9).save(stock.store.backend)
    rng = random.Random(3)
    prompts: list[list[int]] = []
    for n in range(1, 6):
        writer = start(stock, tmp_path / "ab"[n % 2], "put", n)
        for _ in range(3):
            cleaner = start(stock, tmp_path / rng.choice("ab"), "clean", n)
            time.sleep(rng.random() * 0.4)  # a random instant is what is tested
            cleaner.kill()
            assert "Error" not in cleaner.communicate()[1]
        writer.kill()
        assert writer.stdout is not None
        out = writer.stdout.read()  # communicate() would leave out what readline() has buffered
        assert not writer.communicate()[1]
        prompts += acknowledged(out.rpartition("\n")[0], n)
    assert len(prompts) > 50
    clock.now = time.time()
    stock.store.catch_up()
    assert [p for p in prompts if stock.good(p) != len(p) // 4] == []
    report = fsck(stock.store)
    # "strange": a segment whose writer was killed before it had a header.
    expected = {"unsealed", "dropped", "orphan", "strange", "copy", "hole"}
    assert not report.damaged and report.counts.keys() <= expected, report.findings
    Collector(stock.store, force=True).run()
    with Store.open(store_dir, index=str(tmp_path / "c"), clock=clock) as fresh:
        other = Stock(fresh, fresh.namespace(stock.ns.nsid), clock)
        assert [p for p in prompts if other.good(p) != len(p) // 4] == []
    assert index_faults(stock.store.index) == []
    stock.close()
