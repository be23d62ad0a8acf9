"""Fetches from storage that fails or lies: the right bytes or a miss with a reason, nothing else.

The reader must live through all of it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import chain
from kvfs.backend.select import open_backend
from kvfs.chain import PrefixHasher
from kvfs.layout import Partition, Span
from kvfs.store import Store
from kvfs.testing.blocks import first_wrong, payloads, small_identity
from kvfs.testing.faults import Call, CutAt, Fail, FaultyBackend, Flip, Short
from kvfs.testing.stock import Stock, flip, overwrite, tokens

PAGE = 4096
PROMPT = tokens(1, 40)  # 10 blocks of 4 tokens, a page each, from the second page on
OTHER = tokens(2, 40)


@pytest.fixture
def faults(quick_store: Path) -> FaultyBackend:
    return FaultyBackend(open_backend(str(quick_store)))


@pytest.fixture
def stock(faults: FaultyBackend) -> Iterator[Stock]:
    """Two prompts of 10 blocks, each in a segment of its own."""
    made = Stock.make(faults.root, backend=faults, segment_bytes=1 << 16)
    assert made.put(PROMPT).complete
    made = made.again(backend=faults)
    assert made.put(OTHER).complete
    yield made
    faults.clear()
    made.close()


def open_segments() -> list[str]:
    """Segments this process holds open."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [t for t in targets if ".seg" in t]


# errors of the storage


# What says that the block itself is bad or gone, and what only that it is out of reach.
LASTING = (errno.EIO, errno.EACCES, errno.ESTALE, errno.EISDIR, errno.ENOENT, errno.EPERM,
           errno.EBADF, errno.EINVAL)  # fmt: skip
PASSING = (errno.ENODEV, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EMFILE,
           errno.ENOMEM, errno.EHOSTDOWN)  # fmt: skip


@pytest.mark.parametrize("code", [*LASTING, *PASSING], ids=lambda c: errno.errorcode[c])
def test_an_error_ends_the_prefix_where_it_is(
    stock: Stock, faults: FaultyBackend, code: int
) -> None:
    """At each block of ten; then the other prompt, then the same again."""
    for block in (9, 5, 4, 1, 0):
        assert stock.put(PROMPT).complete and stock.good(PROMPT) == 10
        faults.on("readv", "seg/*", do=CutAt(PAGE * (1 + block), code), times=None)
        hasher = stock.ns.hasher(PROMPT)
        plan = stock.store.check(stock.ns, hasher)
        # Blocks that were put again lie in front of a segment of their own.
        first = [e for e in plan.extents if e.block == 0][0]
        good = block if first.count > block else first.count
        buffer = bytearray(b"\xee" * (10 * stock.ns.row_bytes))
        got = stock.store.fetch(stock.ns, plan, hasher, buffer, blocks=10)
        assert errno.errorcode[code] in (got.reason or "")
        assert got.blocks <= good and len(got.data) == got.blocks * stock.ns.row_bytes
        assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None
        assert not got.complete and got.lasting == (code in LASTING)
        faults.clear()
        assert stock.good(OTHER) == 10
        assert stock.stored(PROMPT) == (got.blocks if code in LASTING else 10)
    assert stock.put(PROMPT).complete and stock.good(PROMPT) == 10
    counted = [n for n in stock.store.stats() if n.startswith("fetch_miss.")]
    assert len(counted) == 1 and errno.errorcode[code] in counted[0]


@pytest.mark.parametrize("op", ["open", "readv"])
def test_a_file_that_does_not_open_or_read(stock: Stock, faults: FaultyBackend, op: str) -> None:
    faults.on(op, "seg/*", do=Fail(errno.EIO))
    assert stock.fetch(PROMPT) == (0, "I/O error (EIO)")
    assert stock.stored(PROMPT) == 0
    assert stock.good(OTHER) == 10


def test_short_counts_are_read_on(stock: Stock, faults: FaultyBackend) -> None:
    rule = faults.on("readv", "seg/*", do=Short(1000), times=None)
    assert stock.fetch(PROMPT) == (10, None)
    assert rule.hits >= 40


def test_a_store_that_is_away_is_not_forgotten(stock: Stock, faults: FaultyBackend) -> None:
    """Its mount is gone: every segment is missing, and so is the marker."""
    faults.on("*", do=Fail(errno.ENOENT), times=None)
    assert stock.fetch(PROMPT) == (0, "segment missing (ENOENT)")
    assert stock.stored(PROMPT) == 10
    faults.clear()
    assert stock.good(PROMPT) == 10
    assert stock.store.stats()["backend_down"] == 1


# files that are not what they were


def segment_of(stock: Stock, prompt: list[int]) -> str:
    (path,) = {extent.segment for extent in stock.store.check(stock.ns, prompt).extents}
    return stock.full(path)


def replaced_by_directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


@pytest.mark.parametrize("opened", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("what", ["removed", "a directory", "empty", "a dangling link"])
def test_a_segment_that_is_gone(stock: Stock, what: str, opened: bool) -> None:
    """A reader that holds the file may still read it; one that opens it may not."""
    if opened:
        assert stock.good(PROMPT) == 10
    path = segment_of(stock, PROMPT)
    if what == "removed":
        os.unlink(path)
    elif what == "a directory":
        replaced_by_directory(path)
    elif what == "empty":
        os.truncate(path, 0)
    else:
        os.unlink(path)
        os.symlink("nowhere", path)
    blocks, reason = stock.fetch(PROMPT)
    assert blocks in ((0, 10) if opened and what != "empty" else (0,))
    if not blocks:
        assert reason is not None and stock.stored(PROMPT) == 0
    stock = stock.another()
    assert stock.good(PROMPT) == 0
    assert stock.good(OTHER) == 10
    assert stock.put(PROMPT).complete and stock.good(PROMPT) == 10


@pytest.mark.parametrize("block", [0, 3, 9])
@pytest.mark.parametrize("rest", [0, 1, 2000, 4095])
def test_a_segment_cut_short(stock: Stock, block: int, rest: int) -> None:
    os.truncate(segment_of(stock, PROMPT), PAGE * (1 + block) + rest)
    assert stock.fetch(PROMPT) == (block, "short read")
    assert stock.stored(PROMPT) == block
    assert stock.put(PROMPT).stored == 10 - block and stock.good(PROMPT) == 10


def test_a_segment_of_zeros(stock: Stock) -> None:
    """As a file system that lost what it had not written yet shows it."""
    overwrite(segment_of(stock, PROMPT), PAGE * 5, bytes(PAGE * 6))
    assert stock.fetch(PROMPT) == (4, "no record")


@pytest.fixture
def nobody(stock: Stock, ram_dir: Path) -> Iterator[Stock]:
    """The store of an ordinary user, with this process being that user."""
    if os.geteuid():
        yield stock
        return
    mode = stat.S_IMODE(ram_dir.stat().st_mode)
    ram_dir.chmod(0o755)
    index = ram_dir / "index-of-nobody"
    mine = stock.another(index=str(index))
    for top in (stock.store.path, str(index)):
        for directory, _, files in os.walk(top):
            for path in (directory, *(os.path.join(directory, f) for f in files)):
                os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield mine
    finally:
        os.seteuid(0)
        ram_dir.chmod(mode)
        mine.store.close()
        shutil.rmtree(index)


@pytest.mark.posix("the mounts of a run lie where others may not go")
def test_a_segment_that_may_not_be_read(nobody: Stock) -> None:
    path = segment_of(nobody, PROMPT)
    os.chmod(path, 0)
    assert nobody.fetch(PROMPT) == (0, "I/O error (EACCES)")
    assert nobody.stored(PROMPT) == 0
    assert nobody.good(OTHER) == 10
    os.chmod(path, 0o600)


# stale handles


STALE, MISSING = "I/O error (ESTALE)", "segment missing (ENOENT)"


def test_stale_handles_are_misses_and_not_kept(stock: Stock, faults: FaultyBackend) -> None:
    """On NFS or 3FS a removed file is gone for those who have it open."""
    path = segment_of(stock, PROMPT)
    removed = threading.Event()

    def stale(call: Call) -> Any:
        if removed.is_set():
            raise call.error(errno.ESTALE)
        return call.proceed()

    relative = os.path.relpath(path, stock.store.path)
    faults.on("readv", relative, do=stale, times=None)
    faults.on("open", relative, do=stale, times=None)
    wrong: list[Any] = []
    together = threading.Barrier(9)

    def read() -> None:
        hasher = stock.ns.hasher(PROMPT)
        plan = stock.store.check(stock.ns, hasher)
        together.wait()
        for _ in range(50):
            got = stock.store.fetch(stock.ns, plan, hasher, blocks=10)
            right = first_wrong(got.data, hasher, stock.ns.row_bytes) is None
            # Missing: who asked just before it was removed may come to open it just behind that.
            if not right or (got.blocks, got.reason) not in ((10, None), (0, STALE), (0, MISSING)):
                wrong.append((got.blocks, got.reason))

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    together.wait()
    removed.set()
    os.unlink(path)
    for reader in readers:
        reader.join()
    assert wrong == []
    assert not [s for s in open_segments() if relative in s]
    assert stock.stored(PROMPT) == 0 and stock.good(OTHER) == 10


def test_segments_that_nobody_reads_are_closed(stock: Stock) -> None:
    """An open file takes its room also when it was removed."""
    assert stock.good(PROMPT) == 10 and stock.good(OTHER) == 10
    before = open_segments()
    reader = stock.store.reader()
    reader._files._used[os.path.relpath(segment_of(stock, PROMPT), stock.store.path)] -= 11
    stock.store.catch_up()
    assert len(open_segments()) == len(before) - 1
    assert stock.good(PROMPT) == 10


# bytes that are not what they were


def test_flipped_bits_never_get_through(stock: Stock) -> None:
    """One bit in each of 200 places of a segment."""
    seed = 20_240_501
    rng = random.Random(seed)
    path = segment_of(stock, PROMPT)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    reasons = set()
    for n in range(200):
        offset, bit = rng.randrange(PAGE * 11), rng.randrange(8)
        if n % 2:  # half of them where it hurts: payload, token ids, trailer
            page = PAGE * rng.randrange(1, 11)
            offset = page + rng.choice([rng.randrange(96), PAGE - 1 - rng.randrange(144)])
        flip(path, offset, bit)
        got = stock.store.reader().fetch(stock.ns, plan, hasher, blocks=10)
        flip(path, offset, bit)
        where = f"seed {seed}: bit {bit} of byte {offset}"
        assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None, where
        inside = offset % PAGE
        harmless = offset < PAGE or 96 <= inside < PAGE - 144
        assert (got.reason is None) == harmless, where
        if not harmless:
            assert got.blocks == offset // PAGE - 1 and got.lasting, where
        reasons.add(got.reason)
    assert reasons >= {None, "bad trailer", "checksum of part kv", "checksum of part index"}
    assert stock.good(PROMPT) == 10


def test_bits_that_flip_on_the_way(stock: Stock, faults: FaultyBackend) -> None:
    """A bad cable: every second read has a wrong bit, and the bytes on disk are right."""
    faults.on("readv", "seg/*", do=Flip(), times=None, chance=0.5)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    complete = 0
    for _ in range(300):
        got = stock.store.reader().fetch(stock.ns, plan, hasher, blocks=10)
        assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None
        complete += got.complete
    assert 0 < complete < 300


def test_swapped_records(stock: Stock) -> None:
    """Each is sound and of the namespace, but in the place of the other."""
    path = segment_of(stock, PROMPT)
    with open(path, "r+b") as f:
        f.seek(PAGE * 4)
        a, b = f.read(PAGE), f.read(PAGE)
        f.seek(PAGE * 4)
        f.write(b + a)
    blocks, reason = stock.fetch(PROMPT)
    assert blocks == 3 and reason == "identity mismatch: tokens"


def test_a_segment_in_place_of_another(stock: Stock) -> None:
    """Same writer, same namespace, same size: a slip of whoever restores a backup."""
    shutil.copyfile(segment_of(stock, OTHER), segment_of(stock, PROMPT))
    blocks, reason = stock.fetch(PROMPT)
    assert blocks == 0 and reason is not None and "identity mismatch" in reason
    assert stock.good(OTHER) == 10


# the identity


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"weights": "w1"},
    "tokenizer": {"tokenizer": "t1"},
    "dtype": {"record_format": "fp8"},
    "partition": {"partition": Partition(tp_rank=1, tp_size=2)},
    "context partition": {"partition": Partition(cp_rank=0, cp_size=2)},
    "parts": {"spans": (Span(0, "kv", 0, 96),)},
    "adapter": {"adapter": "lora"},
    "salt": {"salt": "tenant"},
    "model": {"model": "other"},
    "hash": {"hash": "blake3"},
}


@pytest.mark.parametrize("field", OTHERS)
def test_one_field_makes_another_namespace(stock: Stock, field: str) -> None:
    other = stock.store.create_namespace(small_identity(**OTHERS[field]))
    assert other.stride == stock.ns.stride
    plan = stock.store.check(other, PROMPT)
    assert (plan.stored_tokens, plan.reason) == (0, "root unknown")


@pytest.mark.parametrize("field", OTHERS)
def test_a_segment_of_another_namespace_is_foreign(stock: Stock, field: str) -> None:
    """Equal sizes, equal tokens: only the identity differs."""
    other = Stock(
        stock.store, stock.store.create_namespace(small_identity(**OTHERS[field])), stock.clock
    )
    assert other.put(PROMPT).complete
    shutil.copyfile(segment_of(other, PROMPT), segment_of(stock, PROMPT))
    assert stock.fetch(PROMPT) == (0, "foreign namespace")
    assert other.good(PROMPT) == 10


def test_a_changed_header_does_not_make_records_foreign(stock: Stock) -> None:
    """A fetch believes records, each of which names its namespace; the header is for rebuilds."""
    overwrite(segment_of(stock, PROMPT), 32, b"\0" * 48)
    assert stock.fetch(PROMPT) == (10, None)


# hashes that collide


class Shortened:
    """xxh3-128 of which only a few bytes are left."""

    def __init__(self, state: Any, size: int) -> None:
        self._state = state
        self._size = size

    def update(self, data: Any) -> None:
        self._state.update(data)

    def copy(self) -> Shortened:
        return Shortened(self._state.copy(), self._size)

    def digest(self) -> bytes:
        return bytes(self._state.digest()[: self._size].ljust(16, b"\0"))


@pytest.fixture
def colliding(
    quick_store: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stock]:
    """A namespace whose chain hash has so many bytes."""
    full = chain.HASHES["xxh3-128"]
    monkeypatch.setitem(
        chain.HASHES, "shortened", lambda root: Shortened(full(root), request.param)
    )
    made = Stock.make(quick_store, identity={"hash": "shortened"})
    yield made
    made.close()


@pytest.mark.parametrize("colliding", [2], indirect=True)
def test_a_collision_is_a_miss(colliding: Stock) -> None:
    """2,000 blocks and 65,536 hashes: some thirty pairs share one."""
    stock, rng = colliding, random.Random(16)
    prompts = [[rng.randrange(1 << 32) for _ in range(4)] for _ in range(2000)]
    for prompt in prompts:
        assert stock.put(prompt).complete
    reasons: dict[str | None, int] = {}
    for prompt in prompts:
        hasher = stock.ns.hasher(prompt)
        plan = stock.store.check(stock.ns, hasher)
        got = stock.store.reader().fetch(stock.ns, plan, hasher, blocks=plan.stored_blocks)
        assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None
        reasons[got.reason] = reasons.get(got.reason, 0) + 1
    assert reasons.keys() == {None, "identity mismatch: tokens"}
    assert 10 < reasons["identity mismatch: tokens"] < 100


@pytest.mark.parametrize("colliding", [1, 2], indirect=True)
def test_chains_that_collide_never_mix(colliding: Stock, request: pytest.FixtureRequest) -> None:
    """Branching chains of thousands of blocks, any of which may collide with any other."""
    stock, rng = colliding, random.Random(17)
    prompts: list[list[int]] = []
    for _ in range(300):
        start = rng.choice(prompts)[: 4 * rng.randrange(20)] if prompts else []
        prompt = start + [rng.randrange(1 << 32) for _ in range(4 * rng.randrange(1, 12))]
        assert stock.put(prompt).error is None
        prompts.append(prompt)
    good = misses = 0
    for prompt in prompts:
        hasher = PrefixHasher(stock.ns.identity, prompt)
        plan = stock.store.check(stock.ns, hasher)
        got = stock.store.fetch(stock.ns, plan, hasher, blocks=plan.stored_blocks)
        assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None
        good, misses = good + got.blocks, misses + (got.reason is not None)
    assert good > 500
    assert misses or "2" in request.node.name


# the caller's side


def test_nothing_behind_the_good_prefix_is_called_good(stock: Stock, faults: FaultyBackend) -> None:
    buffer = bytearray(10 * stock.ns.row_bytes + 100)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    faults.on("readv", "seg/*", do=CutAt(PAGE * 4, errno.EIO), times=None)
    got = stock.store.fetch(stock.ns, plan, hasher, buffer, blocks=10)
    assert (got.blocks, got.wanted) == (3, 10)
    assert bytes(got.data) == payloads(hasher, stock.ns.row_bytes, 0, 3)
    assert bytes(buffer[-100:]) == bytes(100)


def test_a_plan_of_another_host_may_be_old(stock: Stock, tmp_path: Path) -> None:
    """Its blocks were removed, stored again elsewhere, and its segment is gone."""
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    stock.store.remove(stock.ns, PROMPT)
    assert stock.put(PROMPT).complete
    os.unlink(stock.full(plan.extents[0].segment))
    with Store.open(stock.store.path, index=str(tmp_path / "other")) as other:
        ns = other.namespace(stock.ns.nsid)
        got = other.fetch(ns, plan, hasher, blocks=10)
        assert (got.blocks, got.reason) == (0, "segment missing (ENOENT)")
    assert stock.good(PROMPT) == 10  # the new ones were not forgotten for the old ones' sake
