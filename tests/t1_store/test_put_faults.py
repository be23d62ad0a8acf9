"""Puts on storage that fails: nothing half stored is ever found, everything acknowledged is.

The storage fails through kvfs.testing.faults, through a full file system, and by killing the
writer.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError, IndexFault, KvfsError, SpaceError
from kvfs.frames import ClassEntry, Entry
from kvfs.index.apply import Applier
from kvfs.index.schema import JOURNALS, NS, scan
from kvfs.store import Store
from kvfs.testing.faults import Call, CutAt, Fail, FaultyBackend, Short
from kvfs.testing.stock import Stock, tokens

PAGE = 4096
PROMPT = tokens(1, 40)  # 10 blocks of 4 tokens, a page each
Open = Callable[..., Stock]


@pytest.fixture
def faults(quick_store: Path) -> FaultyBackend:
    return FaultyBackend(open_backend(str(quick_store)))


@pytest.fixture(params=["none", "batch"])
def stock(faults: FaultyBackend, request: pytest.FixtureRequest) -> Iterator[Stock]:
    made = Stock.make(faults.root, backend=faults, durability=request.param)
    yield made
    faults.clear()
    made.close()


def seen_elsewhere(stock: Stock, place: Path, prompt: list[int] = PROMPT) -> int:
    """Good blocks that a host sees which knows nothing but the journals."""
    other = stock.another(index=str(place / "elsewhere"))
    try:
        return other.good(prompt)
    finally:
        other.store.close()


# errors while records are written


class ShortThenNothing:
    """The third block's write ends early, and the disk takes nothing more."""

    def __call__(self, call: Call) -> Any:
        room = 3 * PAGE + 1000 - call.offset
        return call.proceed(min(room, call.size)) if room > 0 else 0


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (CutAt(3 * PAGE + 1000, errno.EIO), BackendError),
        (CutAt(3 * PAGE, errno.EIO), BackendError),
        (CutAt(3 * PAGE + 1000, errno.ENOSPC), SpaceError),
        (CutAt(3 * PAGE + 1000, errno.EDQUOT), SpaceError),
        (CutAt(4 * PAGE - 1, errno.EFBIG), SpaceError),
        (CutAt(3 * PAGE + 1000, errno.ESTALE), BackendError),
        (ShortThenNothing(), SpaceError),
    ],
)
def test_an_error_in_the_third_block_leaves_two(
    stock: Stock, faults: FaultyBackend, tmp_path: Path, effect: Any, error: type[KvfsError]
) -> None:
    """What was stored before the error is found, the rest is not, and a retry stores it."""
    faults.on("writev", "seg/*", do=effect, times=None)
    result = stock.put(PROMPT)
    assert isinstance(result.error, error)
    assert (result.stored, result.existing, result.complete) == (2, 0, False)
    assert stock.stored(PROMPT) == 2 and stock.good(PROMPT) == 2
    assert stock.store.stats()["store_failures"] == 1
    faults.clear()
    assert seen_elsewhere(stock, tmp_path) == 2
    again = stock.put(PROMPT)
    assert (again.error, again.stored, again.existing) == (None, 8, 2)
    assert stock.good(PROMPT) == 10
    assert seen_elsewhere(stock, tmp_path) == 10
    assert stock.store.stats()["store_failures"] == 1


def test_a_short_count_is_no_error(stock: Stock, faults: FaultyBackend) -> None:
    rule = faults.on("writev", do=Short(1001), times=None)
    assert stock.put(PROMPT).complete
    assert rule.hits > 40
    assert stock.good(PROMPT) == 10


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EIO])
def test_what_only_makes_it_faster_may_be_missing(
    stock: Stock, faults: FaultyBackend, code: int
) -> None:
    """A file system that takes no reservations and no hints."""
    for op in ("reserve", "write_behind"):
        faults.on(op, do=Fail(code), times=None)
    assert stock.put(tokens(1, 4000)).complete
    assert stock.good(tokens(1, 4000)) == 1000


# errors before and after


@pytest.mark.parametrize(
    ("op", "path", "code"),
    [
        ("create", "seg/*", errno.EACCES),
        ("create", "seg/*", errno.ENOSPC),
        ("create", "log/*", errno.EIO),
        ("create", "log/*", errno.ENOSPC),
        ("writev", "seg/*", errno.EIO),
        ("writev", "log/*", errno.EIO),
        ("writev", "log/*", errno.ENOSPC),
        ("sync", "seg/*", errno.EIO),
        ("sync", "log/*", errno.EIO),
    ],
)
def test_an_error_anywhere_else_leaves_nothing(
    quick_store: Path, tmp_path: Path, op: str, path: str, code: int
) -> None:
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root))
    stock = Stock.make(root, backend=faults, durability="batch")
    stock = stock.again(backend=faults)  # whose writer has made no file yet
    rule = faults.on(op, path, do=Fail(code), times=None)
    result = stock.put(PROMPT)
    assert rule.hits
    assert isinstance(result.error, SpaceError if code == errno.ENOSPC else BackendError)
    assert (result.stored, result.durable and result.stored) == (0, 0)
    assert stock.stored(PROMPT) == 0
    assert stock.store.stats()["store_failures"] == 1
    assert seen_elsewhere(stock, tmp_path) == 0
    faults.clear()
    assert stock.put(PROMPT).complete
    assert stock.good(PROMPT) == 10
    assert seen_elsewhere(stock, tmp_path) == 10
    stock.close()
    assert Stock.another(stock).good(PROMPT) == 10
    stock.close()


@pytest.mark.parametrize("op", ["writev", "sync", "create"])
def test_one_failed_journal_is_replaced(
    stock: Stock, faults: FaultyBackend, tmp_path: Path, op: str
) -> None:
    """The blocks are written and sound: they need not be written again for a journal's sake."""
    assert stock.put(tokens(2, 8)).complete
    if op == "create":
        faults.on("writev", "log/*", do=Fail(errno.EIO))
    faults.on(op, "log/*", do=Fail(errno.EIO))
    result = stock.put(PROMPT)
    if op == "create":
        assert isinstance(result.error, BackendError)
    elif op == "sync" and stock.store.config.durability == "none":
        assert result.complete
    else:
        assert result.complete
    faults.clear()
    assert stock.put(PROMPT).complete
    assert stock.good(PROMPT) == 10 and stock.good(tokens(2, 8)) == 2
    assert seen_elsewhere(stock, tmp_path) == 10
    assert stock.another(index=str(tmp_path / "third")).good(tokens(2, 8)) == 2


@pytest.mark.parametrize("nth", [1, 2], ids=["header", "entries"])
def test_a_journal_that_can_be_neither_written_nor_removed(
    stock: Stock, faults: FaultyBackend, tmp_path: Path, nth: int
) -> None:
    """What is stored after it is seen on other hosts, and here."""
    assert stock.put(tokens(2, 8)).complete
    faults.on("writev", "log/*/000000.log", do=Fail(errno.EIO))
    rule = faults.on("writev", "log/*/000001.log", nth=nth, do=Fail(errno.EIO), times=None)
    faults.on("unlink", "log/*", do=Fail(errno.EIO), times=None)
    assert isinstance(stock.put(PROMPT).error, BackendError) and rule.hits
    if nth == 1:  # it is in the way for as long as it cannot be removed
        assert isinstance(stock.put(PROMPT).error, BackendError)
    faults.clear()
    for prompt in (PROMPT, tokens(3, 40)):
        assert stock.put(prompt).complete
        assert stock.good(prompt) == 10
        assert seen_elsewhere(stock, tmp_path, prompt) == 10
    assert stock.store.catch_up().problems == []


def test_a_seal_that_is_lost_hides_nothing(
    quick_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal is ended and its seal not made durable, then the machine goes down."""
    monkeypatch.setattr("kvfs.publisher.ROLL_BYTES", 0)
    faults = FaultyBackend(open_backend(str(quick_store)), volatile=True)
    stock = Stock.make(faults.root, backend=faults, durability="batch")
    assert stock.put(tokens(2, 8)).complete
    faults.on("sync", "log/*", do=Fail(errno.EIO))
    assert stock.put(PROMPT).complete
    faults.crash()
    assert seen_elsewhere(stock, tmp_path) == 10
    stock.close()


def unread(stock: Stock, *, namespace: bool) -> None:
    """The index is as one that has read nothing of the journals, nor, maybe, of the namespace."""

    def work(applier: Applier) -> None:
        keys = [bytes(key) for key, _ in scan(applier.txn, JOURNALS)]
        for key in [*keys, *([NS + stock.ns.nsid] if namespace else [])]:
            applier.txn.delete(key)

    stock.store.index.write(work)


def test_an_error_names_the_file_once(stock: Stock, faults: FaultyBackend) -> None:
    """Whether the storage gives the name within the store or the whole path."""

    def full(call: Call) -> Any:
        path = f"{faults.root}/{call.path}"
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    for effect in (full, Fail(errno.EACCES)):
        with faults.during("create", "seg/*", do=effect):
            error = str(stock.put(PROMPT).error)
        assert error.startswith(f"{faults.root}/seg/") and error.count(faults.root) == 1
        assert error.endswith(".seg: Permission denied")
    with faults.during("create", "seg/*", do=lambda call: os.close(-1)):
        assert str(stock.put(PROMPT).error) == f"{faults.root}: Bad file descriptor"


def test_an_index_that_is_behind_reads_the_journal_first(
    stock: Stock, faults: FaultyBackend
) -> None:
    """Whatever goes wrong then is an error of the put, or of what was to be published."""
    assert stock.put(tokens(2, 8)).complete
    unread(stock, namespace=True)
    faults.on("names", "ns", do=Fail(errno.EIO), times=None)
    assert isinstance(stock.put(PROMPT).error, BackendError)
    faults.clear()
    assert stock.put(PROMPT).complete and stock.good(PROMPT) == 10
    unread(stock, namespace=False)
    faults.on("open", "log/*", do=Fail(errno.EIO), times=None)
    noted: list[Entry] = [ClassEntry("weekly", 7 * 86400, 1)]
    with pytest.raises(IndexFault, match="entries begin at"):
        stock.store.writer().publish_checked(lambda _: noted)
    faults.clear()
    assert stock.store.writer().publish_checked(lambda _: noted) == noted
    assert stock.store.classes()["weekly"] == 7 * 86400


def test_an_index_that_fails_is_an_error_of_the_put(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexFault("the index is gone")

    for name in ("stored", "query", "classes", "class_names"):
        with monkeypatch.context() as patched:
            patched.setattr(stock.store.index, name, fail)
            result = stock.put(PROMPT)
        assert isinstance(result.error, IndexFault) and not result.complete, name
    assert stock.put(PROMPT).complete
    assert stock.good(PROMPT) == 10


def test_a_segment_that_failed_takes_nothing_more(stock: Stock, faults: FaultyBackend) -> None:
    assert stock.put(tokens(2, 8)).complete
    faults.on("writev", "seg/*", do=Fail(errno.EIO))
    assert stock.put(PROMPT).error is not None
    assert stock.put(PROMPT).complete
    first, second = (s.number for s in stock.store.index.segments())
    assert [r.count for r in stock.store.index.runs_of(first)] == [2]
    assert [r.count for r in stock.store.index.runs_of(second)] == [10]
    assert stock.good(PROMPT) == 10 and stock.good(tokens(2, 8)) == 2


def test_puts_that_are_published_together_fail_together(quick_store: Path, tmp_path: Path) -> None:
    """Whatever goes wrong while one publishes for others: none of them is told that it worked."""
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root))
    stock = Stock.make(root, backend=faults, durability="batch")
    assert stock.put(tokens(1, 4)).complete
    writers = 4
    together = threading.Barrier(writers + 1)

    class Bug(Exception):
        pass

    def wait_then_break(call: Call) -> Any:
        # The first publisher waits here; those behind it queue up and are taken by the next one.
        together.wait()
        raise Bug

    def break_(call: Call) -> Any:
        raise Bug

    faults.on("sync", "seg/*", do=wait_then_break)
    faults.on("sync", "seg/*", do=break_, times=None)
    outcomes: list[Any] = []

    def put(seed: int) -> None:
        try:
            outcomes.append(stock.put(tokens(seed, 40)).error)
        except Bug as e:
            outcomes.append(e)

    threads = [threading.Thread(target=put, args=(seed,)) for seed in range(10, 10 + writers)]
    first = threading.Thread(target=put, args=(9,))
    first.start()
    for thread in threads:
        thread.start()
    queue = stock.store.writer()._publisher._queue
    while len(queue) < writers:
        queue = stock.store.writer()._publisher._queue
    for _ in range(writers):
        threading.Thread(target=together.wait).start()
    for thread in [first, *threads]:
        thread.join()
    assert len(outcomes) == writers + 1 and all(outcomes), outcomes
    assert [stock.stored(tokens(seed, 40)) for seed in range(9, 10 + writers)] == [0] * 5
    faults.clear()
    assert all(stock.put(tokens(seed, 40)).complete for seed in range(9, 10 + writers))
    stock.close()


# many faults, many threads


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_is_there_after_any_faults(
    quick_store: Path, tmp_path: Path, seed: int
) -> None:
    """One call in eight fails, in one way or another, under four threads; then the machine goes
    down, and what was not synced is gone, or not, page by page."""
    print(f"seed {seed}")
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root), seed=seed, volatile=True)
    stock = Stock.make(root, backend=faults, durability="batch")
    for op in ("create", "writev", "sync"):
        faults.on(op, do=Fail(errno.EIO), times=None, chance=1 / 16)
        faults.on(op, do=Fail(errno.ENOSPC), times=None, chance=1 / 32)
    faults.on("writev", do=Short(5000), times=None, chance=1 / 16)
    rng = random.Random(seed)
    prompts = [tokens(rng.randrange(6), 4 * rng.randrange(1, 30)) for _ in range(160)]
    acknowledged: list[tuple[list[int], int]] = []

    def put(some: list[list[int]]) -> None:
        for prompt in some:
            result = stock.put(prompt)
            if result.durable:
                acknowledged.append((prompt, result.stored + result.existing))

    threads = [threading.Thread(target=put, args=(prompts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faults.clear()
    for prompt, blocks in acknowledged:
        assert stock.good(prompt) >= blocks
    for survive in (0.5, 0.0):
        faults.crash(survive=survive)
        after = Stock.another(stock, index=str(tmp_path / f"after{survive}"))
        for prompt, blocks in acknowledged:
            assert after.good(prompt) >= blocks, f"seed {seed}"
    stock.close()


# a writer that stops in the middle


WRITER = """
import json, sys
from kvfs.backend.select import open_backend
from kvfs.store import Store
from kvfs.testing.blocks import payloads, small_identity
from kvfs.testing.faults import FaultyBackend, Hold
path, index, op, pattern, nth, after, durability, prompt = json.loads(sys.argv[1])
faults = FaultyBackend(open_backend(path))
store = Store.open(path, index=index, backend=faults)
ns = store.create_namespace(small_identity())
hasher = ns.hasher(prompt)
data = payloads(hasher, ns.row_bytes)
hold = Hold(after, on_reach=lambda: print("held", flush=True))
faults.on(op, pattern, nth=nth, do=hold)
import threading
threading.Thread(target=lambda: (sys.stdin.readline(), hold.release()), daemon=True).start()
print(store.put(ns, hasher, data).stored, flush=True)
store.close()
"""

# Where the writer stops, and whether all that a reader needs is there by then.
STOPS = {
    "in the header of the segment": ("writev", "seg/*", 1, 0.5, False),
    "in the payload": ("writev", "seg/*", 2, 0.5, False),
    "after the payload": ("sync", "seg/*", 1, 0.0, False),
    "before the entry": ("writev", "log/*", 1, 0.0, False),
    "in the entry": ("writev", "log/*", 1, 0.9, False),
    "after the entry": ("sync", "log/*", 1, 0.0, True),
}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[str], tuple[Stock, subprocess.Popen[str]]]]:
    """Starts a writer process that stops at a point; returns a reader's store as well."""
    started: list[subprocess.Popen[str]] = []
    path = str(tmp_path / "store")
    stock = Stock.make(path, index=str(tmp_path / "reader"), durability="batch")
    # The clock of the process is the real one.
    stock.store.clock = __import__("time").time

    def start(stop: str) -> tuple[Stock, subprocess.Popen[str]]:
        op, pattern, nth, after, _ = STOPS[stop]
        job = [path, str(tmp_path / "writer"), op, pattern, nth, after, "batch", PROMPT]
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(writer)
        assert writer.stdout is not None and writer.stdout.readline() == "held\n"
        return stock, writer

    yield start
    for writer in started:
        writer.kill()
        writer.communicate()
    stock.close()


def look(stock: Stock, rounds: int, found: list[int]) -> None:
    for _ in range(rounds):
        stock.store.catch_up()
        found.append(stock.good(PROMPT))


@pytest.mark.parametrize("stop", ["in the payload", "in the entry"])
def test_readers_see_nothing_until_it_is_all_there(held: Any, stop: str) -> None:
    """Eight readers while a writer stands still in the middle."""
    stock, writer = held(stop)
    found: list[int] = []
    readers = [threading.Thread(target=look, args=(stock, 20, found)) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [0] * 160
    writer.stdin.write("go on\n")
    assert writer.communicate()[0] == "10\n"
    look(stock, 1, found)
    assert found[-1] == 10


@pytest.mark.parametrize("stop", STOPS)
def test_a_killed_writer_leaves_all_or_nothing(held: Any, stop: str, tmp_path: Path) -> None:
    stock, writer = held(stop)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found: list[int] = []
    look(stock, 1, found)
    assert found == [10 * STOPS[stop][-1]]
    # The host of the writer: its index was in use when it died.
    with Store.open(stock.store.path, index=str(tmp_path / "writer")) as again:
        ns = again.namespace(stock.ns.nsid)
        assert again.check(ns, PROMPT).stored_blocks == found[0]
    assert stock.put(PROMPT).complete
    assert stock.good(PROMPT) == 10


# a full file system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "kvfs-test", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_refuses_stores_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    """With a record that is no multiple of anything."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(12 << 20))
    identity = {"row_bytes": 1_000_003}
    stock = Stock.make(
        small_disk / "store", identity=identity, segment_bytes=16 << 20, extent=4 << 20
    )
    stored: dict[int, int] = {}
    for seed in range(100):
        result = stock.put(tokens(seed, 12))  # 3 blocks
        stored[seed] = result.stored
        if result.error is not None:
            break
    assert isinstance(result.error, SpaceError) and result.error.exit_code == 6
    assert "no room" in str(result.error) or "No space left" in str(result.error)
    assert 40 < sum(stored.values()) <= 54
    refused = stock.put(tokens(1000, 12))
    assert isinstance(refused.error, SpaceError) and refused.stored == 0
    # Reads go on, and a host that comes now sees the same.
    for some in (stock, stock.another(index=str(small_disk.parent / "other"))):
        assert {seed: some.good(tokens(seed, 12)) for seed in stored} == stored
        assert some.good(tokens(1000, 12)) == 0
    ballast.unlink()
    assert stock.put(tokens(1000, 12)).complete  # without opening it again
    assert stock.good(tokens(1000, 12)) == 3
    assert stock.store.stats()["store_failures"] == 2
    stock.close()


LIMITED = """
import resource, sys
from kvfs.errors import SpaceError
from kvfs.testing.stock import Stock, tokens
stock = Stock.make(sys.argv[1], index=sys.argv[2], segment_bytes=8 << 20, extent=1 << 20,
                   identity={"row_bytes": 50_000})
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
results = [stock.put(tokens(seed, 20)) for seed in range(40)]
failed = [r for r in results if r.error is not None]
assert failed and all(isinstance(r.error, SpaceError) for r in failed), failed
for seed, result in enumerate(results):
    assert stock.good(tokens(seed, 20)) == result.stored
for seed in range(40):
    while not stock.put(tokens(seed, 20)).complete:
        pass
    assert stock.good(tokens(seed, 20)) == 5
print("failed", len(failed), "of", len(results))
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """A short count, then EFBIG: the segment ends there and the next one begins."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "store"), str(tmp_path / "index")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "failed" in done.stdout, done.stderr
