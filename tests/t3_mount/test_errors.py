"""One bad record, or one bug, is one caller's error and a log line; the mount lives on."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.index.schema import run_key
from kvfs.testing.chains import hashes_of, payload, tokens_of
from kvfs.testing.mounts import Mounted
from kvfs.vfs import Tree
from kvfs.vfs.inodes import Inodes
from kvfs.vfs.node import folder_name

pyfuse3 = pytest.importorskip("pyfuse3")
trio = pytest.importorskip("trio")
trio_testing = pytest.importorskip("trio.testing")


def fails(code: int, work: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        work()
    assert caught.value.errno == code, errno.errorcode[caught.value.errno or 0]


def spoil(place: Mounted, blocks: list[int], *, offset: int = 5) -> Path:
    """Flips a byte of the record of the last block of a chain; returns its segment's file."""
    tokens = tokens_of(blocks, place.ns.block_tokens)
    extent = place.store.check(place.ns, tokens).extents[-1]
    path = Path(place.store.path) / extent.segment
    at = extent.geometry.offset(extent.slot + extent.count - 1) + offset
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    return path


def test_damaged_and_missing_records(place: Mounted) -> None:
    place.put(1, 2, 3)
    place.put(5, ttl_class="agent")
    place.mount()
    pid = place.pid
    good, other = sorted(place.space.glob("000000-*"), key=lambda n: -len(os.listdir(n)))
    path = spoil(place, [1, 2, 3])
    fails(errno.EIO, lambda: (good / "000002.kv").read_bytes())
    assert "read: block 2" in place.log() and "checksum of part kv" in place.log()
    spoil(place, [1, 2], offset=place.ns.stride - 100)
    fails(errno.EIO, lambda: (good / "000001.kv").read_bytes())
    fails(errno.EIO, lambda: (good / "tokens").read_bytes())
    fails(errno.EIO, lambda: os.getxattr(good / "000001.kv", "user.kvfs.checksum"))
    assert (good / "000000.kv").read_bytes() == payload(
        hashes_of(place.ns, tokens_of([1], 128))[0], place.ns.row_bytes
    )
    Path(place.store.path, os.getxattr(other / "000000.kv", "user.kvfs.segment").decode()).unlink()
    fails(errno.EIO, lambda: (other / "000000.kv").read_bytes())
    assert "segment missing" in place.log()
    path.unlink()
    assert (good / "000000.kv").stat().st_size == place.ns.row_bytes
    assert len(os.listdir(good)) == 4
    assert place.pid == pid and "Traceback" not in place.log()


@pytest.mark.expect_logs(r"damaged run", optional=True)
def test_garbage_in_the_index(place: Mounted) -> None:
    for i in range(5):
        place.put(i, 7)
    place.mount()
    pid = place.pid
    nodes = sorted(place.space.glob("000000-*"))
    for node, row in zip(nodes, [b"", b"x", bytes(72), b"\xff" * 88, os.urandom(500)], strict=True):
        head = bytes.fromhex(os.getxattr(node, "user.kvfs.hash").decode())
        key = run_key(place.ns.number, head)
        place.store.index.write(lambda a, key=key, row=row: a.txn.put(key, row))
        fails(errno.EIO, lambda node=node: os.getxattr(node, "user.kvfs.hash"))
        fails(errno.EIO, lambda node=node: os.listdir(node))
        assert len(os.listdir(place.space)) == 5 - nodes.index(node)
    assert os.listdir(place.space) == ["namespace.json"]
    assert place.pid == pid and "Traceback" not in place.log()
    assert "kvctl rebuild" in place.log()


def test_what_is_gone_while_it_is_looked_at(place: Mounted) -> None:
    place.put(1, 2, 3)
    place.mount()
    (node,) = place.space.glob("000000-*")
    assert len([os.stat(e.path) for e in os.scandir(node)]) == 4  # the kernel knows all names now
    opened = os.open(node / "000002.kv", os.O_RDONLY)
    inside = os.open(node, os.O_RDONLY)
    first = os.pread(opened, 100, 0)
    place.store.remove(place.ns, tokens_of([1], 128))
    assert os.fstat(opened).st_size == place.ns.row_bytes
    assert os.pread(opened, 100, 0) == first, "what was read stays in the open file"
    fails(errno.ENOENT, lambda: (node / "000001.kv").read_bytes())
    fails(errno.ENOENT, lambda: os.listdir(node))
    fails(errno.ESTALE, lambda: os.listdir(inside))
    os.close(opened)
    os.close(inside)
    place.put(1, 2, 3)
    assert (node / "000002.kv").read_bytes()[:100] == first


def test_other_bytes_under_the_same_name(place: Mounted) -> None:
    """The same tokens computed again are other bytes; those before are never served for them."""
    place.put(1, 2)
    place.mount()
    (node,) = place.space.glob("000000-*")
    file, tokens = node / "000001.kv", tokens_of([1, 2], 128)
    old, ino = file.read_bytes(), os.stat(file).st_ino
    opened = os.open(file, os.O_RDONLY)
    place.store.remove(place.ns, tokens, from_block=1)
    row = bytes(reversed(old))
    assert place.store.put(place.ns, tokens, row, first_block=1).stored == 1
    assert file.read_bytes() == row
    assert os.stat(file).st_ino != ino
    # Through the file that was opened before one sees what was there then, or nothing.
    fails(errno.ESTALE, lambda: os.getxattr(opened, "user.kvfs.hash"))
    assert os.pread(opened, 1 << 20, 0) == old and os.fstat(opened).st_ino == ino
    os.close(opened)
    place.store.remove(place.ns, tokens, from_block=1)
    place.put(1, 3)
    assert file.read_bytes() == payload(hashes_of(place.ns, tokens_of([1, 3], 128))[1], 300_000)


# the guard, in process: no bug is known that could be provoked from outside


def operations() -> pyfuse3.Operations:
    from kvfs.errors import DamageError, InputError
    from kvfs.mount.guard import GuardedOperations

    class Broken(GuardedOperations):
        def __init__(self) -> None:
            super().__init__()
            self.requests = Counter()

        async def lookup(self, parent: int, name: bytes, ctx: object) -> object:
            raise KeyError(name)

        async def getattr(self, inode: int, ctx: object) -> object:
            return None

        async def read(self, fh: int, off: int, size: int) -> object:
            return "text"

        async def open(self, inode: int, flags: int, ctx: object) -> object:
            raise PermissionError(errno.EACCES, "no")

        async def opendir(self, inode: int, ctx: object) -> object:
            raise DamageError("block 7: damaged")

        async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: object) -> None:
            raise InputError("no such class")

        async def statfs(self, ctx: object) -> object:
            raise pyfuse3.FUSEError(errno.ETIMEDOUT)

        async def release(self, fh: int) -> None:
            raise OSError

        async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
            return b"fine"

    return Broken()


@pytest.mark.expect_logs(
    r"lookup failed; this is a bug", r"getattr returned a NoneType", r"read returned a str",
    r"opendir: block 7: damaged",
)  # fmt: skip
def test_the_guard() -> None:
    broken = operations()

    def answer(name: str, *args: object) -> int:
        with pytest.raises(pyfuse3.FUSEError) as caught:
            trio.run(getattr(broken, name), *args)
        return int(caught.value.errno)

    assert answer("lookup", 1, b"x", None) == errno.EIO
    assert answer("getattr", 1, None) == errno.EIO
    assert answer("read", 1, 0, 1) == errno.EIO
    assert answer("open", 1, 0, None) == errno.EACCES
    assert answer("opendir", 1, None) == errno.EIO
    assert answer("setxattr", 1, b"a", b"b", None) == errno.EINVAL
    assert answer("statfs", None) == errno.ETIMEDOUT
    assert answer("release", 1) == errno.EIO
    assert trio.run(broken.getxattr, 1, b"a", None) == b"fine"
    assert broken.requests["lookup"] == broken.requests["getxattr"] == 1


# the handlers, in process: what the kernel does not let one provoke, or takes long


def handlers(place: Mounted) -> pyfuse3.Operations:
    from kvfs.mount.operations import Owner, ReadOnly

    return ReadOnly(Tree(place.store), Owner(0, 0))


async def find(ask: pyfuse3.Operations, place: Mounted, *names: str) -> list[int]:
    """The inode numbers of files in the only node of a store."""
    head = hashes_of(place.ns, tokens_of([1], place.ns.block_tokens))[0]
    at = pyfuse3.ROOT_INODE
    for name in (place.ns.name, folder_name(0, head).decode()):
        at = (await ask.lookup(at, name.encode())).st_ino
    return [(await ask.lookup(at, name.encode())).st_ino for name in names]


@pytest.mark.expect_logs(r"read: the storage did not answer")
def test_waiting_for_others_that_read_a_file_counts(
    place: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits behind a read that hangs waits no longer than it does."""
    from kvfs.mount.operations import STORAGE_SECONDS

    place.put(1)
    ask, go_on = handlers(place), threading.Event()
    monkeypatch.setattr("kvfs.vfs.file.read_payload", lambda *a: memoryview(b"x" * go_on.wait(60)))
    gave_up: list[float] = []

    async def read(handle: int) -> None:
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await ask.read(handle, 0, 10)
        assert caught.value.errno == errno.ETIMEDOUT
        gave_up.append(trio.current_time())

    async def main() -> float:
        (ino,) = await find(ask, place, "000000.kv")
        handle = (await ask.open(ino, os.O_RDONLY, None)).fh
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(read, handle)
        return float(began)

    began = trio.run(main, clock=trio_testing.MockClock(autojump_threshold=0))
    assert not ask.threads.end(0), "the thread is in the storage, and may use the index yet"
    go_on.set()
    assert ask.threads.end(60)
    assert gave_up == pytest.approx([began + STORAGE_SECONDS] * 5)


def test_what_is_opened_is_what_was_looked_up(place: Mounted) -> None:
    """A line that has grown since has another number: the kernel looks the name up anew."""
    place.put(1, 2)
    ask = handlers(place)

    async def main() -> None:
        (old,) = await find(ask, place, "tokens")
        place.put(1, 2, 3)
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await ask.open(old, os.O_RDONLY, None)
        assert caught.value.errno == errno.ESTALE
        (new,) = await find(ask, place, "tokens")
        await ask.open(new, os.O_RDONLY, None)
        place.put(1, 2, 3, 4)
        assert (await ask.getattr(new)).st_size * 2 == 3 * place.ns.block_tokens * 11 * 2

    trio.run(main)


def test_an_open_file_outlives_its_number(place: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which only so many are kept."""
    monkeypatch.setattr("kvfs.mount.operations.Inodes", functools.partial(Inodes, files=1))
    place.put(1, 2)
    ask = handlers(place)

    async def main() -> None:
        (first,) = await find(ask, place, "000000.kv")
        opened = [(await ask.open(first, os.O_RDONLY, None)).fh for _ in range(2)]
        await find(ask, place, "000001.kv")
        for handle in opened:
            assert (await ask.getattr(first)).st_size == place.ns.row_bytes
            assert await ask.getxattr(first, b"user.kvfs.block", None) == b"0"
            await ask.release(handle)
        with pytest.raises(pyfuse3.FUSEError):
            await ask.getattr(first)

    trio.run(main)


@pytest.mark.expect_logs(r"following the journals: (ValueError|RuntimeError)")
def test_a_bug_in_following_ends_nothing(
    place: Mounted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a turn that no thread can be had for; each is said once, until it changes."""
    from kvfs.mount.process import _follow
    from kvfs.mount.threads import Threads

    turns = [ValueError("a bug")] * 2 + [RuntimeError("can't start new thread")] * 2

    async def main() -> None:
        with trio.CancelScope() as done:

            async def run(*args: object, **options: object) -> str:
                if turns:
                    raise turns.pop(0)
                done.cancel()
                return ""

            threads = Threads()
            monkeypatch.setattr(threads, "run", run)
            await _follow(place.store, threads)

    trio.run(main, clock=trio_testing.MockClock(autojump_threshold=0))
    assert [r.getMessage().split(": ")[1][:12] for r in caplog.records] == [
        "ValueError('", "RuntimeError",
    ]  # fmt: skip
    assert all(r.exc_info for r in caplog.records), "it is told where"


def test_every_handler_is_guarded() -> None:
    from kvfs.mount.operations import ReadOnly
    from kvfs.mount.write import Writable

    for kind in (ReadOnly, Writable):
        handlers = [n for n in vars(kind) if hasattr(pyfuse3.Operations, n) and n[0] != "_"]
        assert len(handlers) > 5
        for name in handlers:
            if name not in ("forget", "directory_mode"):
                assert hasattr(getattr(kind, name), "__wrapped__"), (kind, name)
