"""The slot pool: what goes in comes out or is a miss; size, order of use, time to live, life."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfs import presets
from kvfs.errors import BusyError, ConfigError, FormatError, InputError
from kvfs.state import inventory, poolfile, slots, tensors
from kvfs.state.poolfile import Geometry
from kvfs.state.slot import META_BYTES, Anchor, SlotMeta
from kvfs.state.slots import SlotPool

SWA = presets.get("tiny-swa", weights="w", tokenizer="t")
FLASH = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
SLOT = 134 * 16


def budget(n: int, slot_bytes: int = SLOT) -> int:
    return Geometry(n, slot_bytes).file_bytes


def anchor(number: int) -> Anchor:
    return Anchor(number.to_bytes(16, "big"), 128 * (number % 1000 + 1), bytes([number % 251]) * 16)


def data_of(key: Anchor, size: int = SLOT) -> bytes:
    """Data that tell which anchor they are of, in every stretch of 16 bytes."""
    return (key.hash * (size // 16 + 1))[:size]


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shm(tmp_path: Path) -> str:
    path = tmp_path / "shm"
    path.mkdir()
    return str(path)


@pytest.fixture
def pool(shm: str, clock: Clock) -> Iterator[SlotPool]:
    with SlotPool.open(SWA, budget(4), directory=shm, ttl_seconds=60, clock=clock) as opened:
        yield opened


# in and out


def test_what_goes_in_comes_out(pool: SlotPool) -> None:
    key = anchor(1)
    stored = pool.write(key, data_of(key), rotation=133, overshoot=5)
    assert stored.new and stored.evicted is None
    found = pool.read(key)
    assert found is not None and found.data == data_of(key)
    assert found.meta == stored.meta == pool.lookup(key)
    assert (found.meta.rotation, found.meta.overshoot) == (133, 5)
    assert (found.meta.nsid, found.meta.pool) == (SWA.nsid, pool.pool_id)
    assert found.meta.layout == SWA.state and found.meta.position == key.position
    into = bytearray(SLOT)
    again = pool.read(key, into)
    assert again is not None and into == data_of(key)
    assert pool.read(anchor(2)) is None and pool.lookup(anchor(2)) is None


def test_a_slot_of_another_prompt_is_a_miss(pool: SlotPool) -> None:
    """The chain hash is not cryptographic: the lineage decides, and the position."""
    key = anchor(1)
    pool.write(key, data_of(key))
    for other in (Anchor(key.hash, key.position, b"x" * 16), Anchor(key.hash, 128, key.lineage)):
        assert pool.read(other) is None and pool.lookup(other) is None
        assert pool.remove(other) is None and pool.left_ms(other) == 0
    hint = Anchor(key.hash, key.position)  # a hint of another host knows no lineage
    assert pool.read(hint) is not None
    replaced = pool.write(Anchor(key.hash, key.position, b"x" * 16), bytes(SLOT))
    assert replaced.new and replaced.evicted is not None
    assert pool.read(key) is None and pool.stats()["used"] == 1


def test_anchors_of_a_prompt() -> None:
    from kvfs.chain import PrefixHasher

    tokens = list(range(1000))
    hasher = PrefixHasher(SWA, tokens)
    found = Anchor.of(hasher, 256)
    assert found == Anchor.of(PrefixHasher(SWA, tokens[:300]), 256)
    assert found.hash == hasher.digest(2) and len(found.lineage) == 16
    other = Anchor.of(PrefixHasher(SWA, [7, *tokens[1:]]), 256)
    assert found.lineage != other.lineage and found.hash != other.hash
    for position in (0, 100, 1024, -128):
        with pytest.raises(InputError):
            Anchor.of(hasher, position)


def test_there_is_one_copy(pool: SlotPool) -> None:
    key = anchor(1)
    first = pool.write(key, data_of(key))
    second = pool.write(key, bytes(SLOT))
    assert not second.new and second.meta == first.meta
    found = pool.read(key)
    assert found is not None and found.data == data_of(key)
    assert pool.stats()["used"] == 1 and pool.stats()["kept"] == 1


def test_generations_are_never_given_twice(pool: SlotPool, shm: str) -> None:
    seen = set()
    for i in range(20):
        meta = pool.write(anchor(i % 6), data_of(anchor(i % 6))).meta
        pool.remove(anchor(i % 6))
        seen.add(meta.generation)
    assert len(seen) == 20 and all(g % 2 == 0 for g in seen)
    with SlotPool.open(SWA, directory=shm) as other:
        assert other.write(anchor(7), data_of(anchor(7))).meta.generation > max(seen)


def test_what_does_not_fit_is_refused(pool: SlotPool) -> None:
    key = anchor(1)
    bad = [
        (key, bytes(SLOT - 1), 0, 0), (key, bytes(SLOT + 1), 0, 0), (key, bytes(SLOT), 134, 0),
        (key, bytes(SLOT), -1, 0), (key, bytes(SLOT), 0, 7), (key, bytes(SLOT), 0, -1),
        (Anchor(key.hash, 100, key.lineage), bytes(SLOT), 0, 0),
        (Anchor(key.hash, 0, key.lineage), bytes(SLOT), 0, 0),
        (Anchor(key.hash, 128), bytes(SLOT), 0, 0),
        (Anchor(b"", 128, key.lineage), bytes(SLOT), 0, 0),
    ]  # fmt: skip
    for where, data, rotation, overshoot in bad:
        with pytest.raises(InputError):
            pool.write(where, data, rotation=rotation, overshoot=overshoot)
    assert pool.stats()["used"] == 0


def test_a_copy_that_fails_stores_nothing(pool: SlotPool) -> None:
    for i in range(4):
        pool.write(anchor(i), data_of(anchor(i)))

    def fail(into: memoryview) -> None:
        into[:10] = b"halfhalfha"
        raise RuntimeError("the GPU is gone")

    with pytest.raises(RuntimeError):
        pool.write(anchor(9), fail)
    assert pool.read(anchor(9)) is None
    assert pool.stats()["used"] == 3 and pool.stats()["recovered"] == 0
    assert pool.write(anchor(9), data_of(anchor(9))).evicted is None


def test_no_slots_without_a_window(shm: str) -> None:
    dense = presets.get("tiny", weights="w", tokenizer="t")
    with pytest.raises(ConfigError, match="no sliding window"):
        SlotPool.open(dense, 1 << 20, directory=shm)


# order of use and time to live


def test_the_one_used_longest_ago_goes(pool: SlotPool) -> None:
    for i in range(4):
        pool.write(anchor(i), data_of(anchor(i)))
    pool.read(anchor(0))
    pool.write(anchor(1), data_of(anchor(1)))  # storing it again is a use as well
    evicted = [pool.write(anchor(i), data_of(anchor(i))).evicted for i in range(4, 8)]
    assert [e.anchor for e in evicted if e] == [anchor(i).hash for i in (2, 3, 0, 1)]
    assert pool.stats()["evicted"] == 4
    assert sorted(m.anchor for m in pool.metas()) == [anchor(i).hash for i in range(4, 8)]


def test_a_slot_expires_when_nobody_uses_it(pool: SlotPool, clock: Clock) -> None:
    for i in range(3):
        pool.write(anchor(i), data_of(anchor(i)))
    clock.ms += 59_999
    assert pool.left_ms(anchor(0)) == 1
    assert pool.read(anchor(0)) is not None  # a use: 60 seconds more
    clock.ms += 1
    assert pool.read(anchor(1)) is None and pool.lookup(anchor(1)) is None
    assert [m.anchor for m in pool.metas()] == [anchor(0).hash]
    assert sorted(m.anchor for m in pool.expire()) == [anchor(1).hash, anchor(2).hash]
    assert pool.expire() == [] and pool.stats()["used"] == 1
    assert pool.stats()["expired"] == 2
    # One that has expired is no eviction: nobody has to be told.
    pool.write(anchor(4), data_of(anchor(4)))
    clock.ms += 60_000
    assert all(pool.write(anchor(i), data_of(anchor(i))).evicted is None for i in range(5, 9))
    again = pool.write(anchor(5), data_of(anchor(5)))
    assert not again.new


def test_removing(pool: SlotPool) -> None:
    for i in range(3):
        pool.write(anchor(i), data_of(anchor(i)))
    gone = pool.remove(anchor(1))
    assert gone is not None and gone.anchor == anchor(1).hash
    assert pool.remove(anchor(1)) is None and pool.read(anchor(1)) is None
    assert {m.anchor for m in pool.clear()} == {anchor(0).hash, anchor(2).hash}
    assert pool.stats()["used"] == 0 and pool.clear() == []


class PoolMachine(RuleBasedStateMachine):
    """Against an ordered dictionary; two handles take turns, as two processes would."""

    @initialize(n=st.integers(1, 6))
    def begin(self, n: int) -> None:
        import tempfile

        self.directory = tempfile.mkdtemp()
        self.clock, self.n = Clock(), n
        self.model: OrderedDict[int, int] = OrderedDict()  # number -> expiry, oldest use first
        self.handles = [self.open(budget(n)), self.open(None)]

    def open(self, size: int | None) -> SlotPool:
        return SlotPool.open(SWA, size, directory=self.directory, ttl_seconds=10, clock=self.clock)

    def live(self, number: int) -> bool:
        return self.model.get(number, 0) > self.clock.ms

    def use(self, number: int) -> None:
        self.model[number] = self.clock.ms + 10_000
        self.model.move_to_end(number)

    @rule(number=st.integers(0, 9), handle=st.integers(0, 1))
    def write(self, number: int, handle: int) -> None:
        # Anchors 0..9 meet in few buckets: their first four bytes are all zero.
        stored = self.handles[handle].write(anchor(number), data_of(anchor(number)))
        assert stored.new == (not self.live(number))
        expected = None
        if number not in self.model and len(self.model) == self.n:
            oldest = next(iter(self.model))
            expected = anchor(oldest).hash if self.live(oldest) else None
            del self.model[oldest]
        assert (stored.evicted.anchor if stored.evicted else None) == expected
        self.use(number)

    @rule(number=st.integers(0, 9), handle=st.integers(0, 1))
    def read(self, number: int, handle: int) -> None:
        found = self.handles[handle].read(anchor(number))
        assert (found is not None) == self.live(number)
        if found is not None:
            assert found.data == data_of(anchor(number))
            self.use(number)

    @rule(number=st.integers(0, 9), handle=st.integers(0, 1))
    def remove(self, number: int, handle: int) -> None:
        gone = self.handles[handle].remove(anchor(number))
        assert (gone is not None) == (self.model.pop(number, None) is not None)

    @rule(ms=st.integers(1, 12_000))
    def wait(self, ms: int) -> None:
        self.clock.ms += ms

    @rule(handle=st.integers(0, 1))
    def expire(self, handle: int) -> None:
        gone = {m.anchor for m in self.handles[handle].expire()}
        over = [n for n in self.model if not self.live(n)]
        assert gone == {anchor(n).hash for n in over}
        for n in over:
            del self.model[n]

    @rule(handle=st.integers(0, 1))
    def reopen(self, handle: int) -> None:
        self.handles[handle].close()
        self.handles[handle] = self.open(None)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        for pool in self.handles:
            assert {m.anchor for m in pool.metas()} == {
                anchor(n).hash for n in self.model if self.live(n)
            }
            assert pool.stats()["used"] == len(self.model)

    def teardown(self) -> None:
        import shutil

        for pool in getattr(self, "handles", ()):
            pool.close()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# size


@pytest.mark.parametrize("size", [SLOT, 1, 63, 64, 65, 1_415_040])
def test_the_budget_is_kept_and_used(size: int) -> None:
    for slots_ in (1, 2, 7, 16, 17, 1000):
        exact = Geometry(slots_, size).file_bytes
        assert Geometry.within(exact, size).slots == slots_
        assert Geometry.within(exact - 1, size).slots == slots_ - 1 if slots_ > 1 else True
    for bytes_ in (10_000_000, 33 << 20, 1 << 30, 100 << 30):
        found = Geometry.within(bytes_, size)
        assert found.file_bytes <= bytes_ < Geometry(found.slots + 1, size).file_bytes
    with pytest.raises(ConfigError, match="no room for a slot"):
        Geometry.within(Geometry(1, size).file_bytes - 1, size)


def test_sizes_are_exact_and_reserved(shm: str) -> None:
    """Slots of 1,415,040 bytes take 0.02 % more than their data, and all of it at once."""
    with SlotPool.open(FLASH, 33 << 20, directory=shm) as pool:
        assert pool.slots == 24 and pool.slot_bytes == 1_415_040
        assert pool.file_bytes <= 33 << 20
        stat = os.stat(pool.path)
        assert stat.st_size == pool.file_bytes and stat.st_blocks * 512 >= stat.st_size
        assert pool.file_bytes < 24 * 1_415_040 * 1.0005
        data = os.urandom(pool.slot_bytes)
        for i in range(30):
            pool.write(anchor(i), data)
        after = os.stat(pool.path)
        assert (after.st_size, after.st_blocks) == (stat.st_size, stat.st_blocks)


def test_memory_that_is_not_there_is_refused_with_both_numbers(
    shm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"needs {budget(4)} bytes and there are \d+ free"):
        SlotPool.open(SWA, budget(4), directory=shm)
    (path,) = Path(shm).iterdir()
    assert path.stat().st_size == 0  # nothing is held; the next start begins anew
    monkeypatch.undo()
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        assert pool.slots == 4


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[str]:
    """A file system of 256 KiB, as a container's /dev/shm may be too small."""
    path = tmp_path / "small"
    path.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs")
    yield str(path)
    subprocess.run(["umount", str(path)], check=True)


def test_a_file_system_that_is_too_small(small_tmpfs: str) -> None:
    """Refused when it is opened, not killed by SIGBUS when it is written."""
    with pytest.raises(ConfigError, match=rf"needs {budget(200)} bytes and there are 262144 free"):
        SlotPool.open(SWA, budget(200), directory=small_tmpfs)
    with SlotPool.open(SWA, budget(100), directory=small_tmpfs) as pool:
        with (
            open(os.path.join(small_tmpfs, "others"), "wb", buffering=0) as f,
            contextlib.suppress(OSError),
        ):
            while True:
                f.write(bytes(4096))  # somebody else takes the rest
        for i in range(200):
            pool.write(anchor(i), data_of(anchor(i)))
        assert pool.stats()["used"] == 100
        assert all(pool.read(anchor(i)) is not None for i in range(100, 200))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_in_real_shared_memory() -> None:
    """On tmpfs, where it belongs; the memory is taken at once and given back."""
    with SlotPool.open(SWA, budget(64)) as pool:
        assert os.path.dirname(pool.path) == "/dev/shm"
        assert os.stat(pool.path).st_blocks * 512 >= pool.file_bytes
        pool.write(anchor(1), data_of(anchor(1)))
        assert pool.read(anchor(1)) is not None
        path = pool.path
    os.unlink(path)


# a pool's life


def test_slots_outlive_their_process(shm: str) -> None:
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        pool.write(anchor(1), data_of(anchor(1)))
        life = pool.pool_id
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        found = pool.read(anchor(1))
        assert found is not None and found.data == data_of(anchor(1)) and pool.pool_id == life
    code = (
        "import sys; from kvfs import presets; from kvfs.state.slots import SlotPool\n"
        "from kvfs.state.slot import Anchor\n"
        "swa = presets.get('tiny-swa', weights='w', tokenizer='t')\n"
        "with SlotPool.open(swa, directory=sys.argv[1]) as pool:\n"
        "    print(pool.read(Anchor(bytes.fromhex(sys.argv[2]), 256)).data[:16].hex())\n"
    )
    args = [sys.executable, "-c", code, shm, anchor(1).hash.hex()]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == anchor(1).hash.hex()


def test_slots_do_not_outlive_the_host(shm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        pool.write(anchor(1), data_of(anchor(1)))
        life = pool.pool_id
    monkeypatch.setattr(poolfile, "this_boot", lambda: b"b" * 16)
    with pytest.raises(ConfigError, match="before the host was started"):
        SlotPool.open(SWA, directory=shm)
    monkeypatch.setattr(inventory, "this_boot", lambda: b"b" * 16)
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        assert pool.read(anchor(1)) is None and pool.pool_id != life


def test_another_budget_makes_it_anew_if_nobody_is_in(shm: str) -> None:
    with SlotPool.open(SWA, budget(4), directory=shm) as first:
        first.write(anchor(1), data_of(anchor(1)))
        with pytest.raises(ConfigError, match="has 4 slots, not 8, and is in use"):
            SlotPool.open(SWA, budget(8), directory=shm)
        with SlotPool.open(SWA, budget(4) + 100, directory=shm) as same:  # room for as many
            assert same.read(anchor(1)) is not None
        assert first.read(anchor(1)) is not None
    with SlotPool.open(SWA, budget(8), directory=shm) as larger:
        assert larger.slots == 8 and larger.read(anchor(1)) is None


def test_one_pool_for_each_namespace(shm: str) -> None:
    other = presets.get("tiny-swa", weights="other", tokenizer="t")
    with SlotPool.open(SWA, budget(4), directory=shm) as a:
        with SlotPool.open(other, budget(4), directory=shm) as b:
            a.write(anchor(1), data_of(anchor(1)))
            assert b.read(anchor(1)) is None and a.path != b.path
            b_path = b.path
        with pytest.raises(ConfigError):
            SlotPool.open(presets.get("tiny-swa", weights="no", tokenizer="t"), directory=shm)
        os.replace(a.path, b_path)
        with pytest.raises(ConfigError, match="of another namespace, and is in use"):
            SlotPool.open(other, budget(4), directory=shm)


@pytest.mark.parametrize("what", ["empty", "header", "cut", "longer", "noise"])
def test_a_file_that_is_not_whole_is_made_anew(shm: str, what: str) -> None:
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        pool.write(anchor(1), data_of(anchor(1)))
        path = Path(pool.path)
    whole = path.read_bytes()
    spoilt = {
        "empty": b"", "header": whole[:70] + b"\xff" + whole[71:], "cut": whole[:-4096],
        "longer": whole + bytes(8), "noise": os.urandom(len(whole)),
    }[what]  # fmt: skip
    path.write_bytes(spoilt)
    with pytest.raises(ConfigError):
        SlotPool.open(SWA, directory=shm)
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        assert pool.read(anchor(1)) is None
        pool.write(anchor(1), data_of(anchor(1)))
        assert pool.read(anchor(1)) is not None


def test_files_of_others_are_left_alone(shm: str, tmp_path: Path) -> None:
    path = Path(poolfile.pool_path(SWA, shm))
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        SlotPool.open(SWA, budget(4), directory=shm)
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    if os.geteuid() == 0:
        path.touch()
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigError, match="another user"):
            SlotPool.open(SWA, budget(4), directory=shm)


def test_pools_of_this_user_and_sweeping(shm: str, clock: Clock) -> None:
    other = presets.get("tiny-swa", weights="other", tokenizer="t")
    (Path(shm) / "kvfs-unrelated.slots").touch()
    with SlotPool.open(other, budget(2), directory=shm, ttl_seconds=60, clock=clock) as old:
        old.write(anchor(1), data_of(anchor(1)))
        old_path = old.path
    with SlotPool.open(SWA, budget(4), directory=shm, ttl_seconds=60, clock=clock) as pool:
        found = {f.path: f for f in inventory.pools(shm, clock)}
        assert set(found) == {pool.path, old_path}
        assert (found[old_path].slots, found[old_path].live, found[old_path].in_use) == (
            2,
            1,
            False,
        )
        assert found[pool.path].in_use and found[pool.path].namespace == SWA.name
        assert inventory.sweep(shm, clock=clock) == []
        clock.ms += 60_000
        assert [f.path for f in inventory.sweep(shm, clock=clock)] == [old_path]
        assert inventory.sweep(shm, live=True, clock=clock) == []  # the other one is in use
    assert [f.path for f in inventory.sweep(shm, live=True, clock=clock)] == [pool.path]
    with pytest.raises(ConfigError):
        inventory.pools(shm + "/none")


def test_making_a_pool_sweeps_what_is_out_of_use(shm: str) -> None:
    other = presets.get("tiny-swa", weights="other", tokenizer="t")
    with SlotPool.open(other, budget(2), directory=shm):
        pass
    with SlotPool.open(SWA, budget(4), directory=shm) as pool:
        assert [f.path for f in inventory.pools(shm)] == [pool.path]


# damage


def test_a_flipped_byte_is_a_miss(pool: SlotPool) -> None:
    key = anchor(1)
    size = os.path.getsize(pool.path)
    entry, data = 4096, Geometry(4, SLOT).data_at
    slot = 3  # the first to be used: they are taken from the end
    places = [entry + slot * 192 + i for i in range(0, META_BYTES, 5)]
    places += [data + slot * Geometry(4, SLOT).stride + i for i in range(0, SLOT, 97)]
    for place in places:
        pool.clear()
        pool.write(key, data_of(key))
        with open(pool.path, "r+b") as f:
            f.seek(place)
            old = f.read(1)
            f.seek(place)
            f.write(bytes([old[0] ^ 0x10]))
        found = pool.read(key)
        assert found is None, place
    assert pool.stats()["damaged"] > 0 and os.path.getsize(pool.path) == size
    pool.write(key, data_of(key))
    assert pool.read(key) is not None


def test_a_damaged_slot_is_emptied(pool: SlotPool) -> None:
    key = anchor(1)
    pool.write(key, data_of(key))
    place = Path(pool.path).read_bytes().index(data_of(key))
    with open(pool.path, "r+b") as f:
        f.seek(place)
        f.write(b"\xff")
    assert pool.read(key) is None and pool.stats()["damaged"] == 1
    assert pool.lookup(key) is None and pool.stats()["used"] == 0
    assert pool.write(key, data_of(key)).new


def test_a_slot_overwritten_while_it_is_copied_is_a_miss(
    pool: SlotPool, shm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = anchor(1)
    copied = slots._copied
    with SlotPool.open(SWA, directory=shm) as writer:

        def slowly(data: memoryview, into: object) -> bytes:
            half = bytes(data[:1000])
            for i in range(2, 6):  # meanwhile every slot is given to another anchor
                writer.write(anchor(i), data_of(anchor(i)))
            return half + bytes(data[1000:])

        pool.write(key, data_of(key))
        monkeypatch.setattr(slots, "_copied", slowly)
        assert pool.read(key) is None and pool.stats()["torn"] == 1
        monkeypatch.setattr(slots, "_copied", copied)
        assert pool.read(anchor(5)) is not None
        # The same anchor, written anew meanwhile: the next try reads it.
        pool.clear()
        calls = []

        def once(data: memoryview, into: object) -> bytes:
            if not calls:
                calls.append(1)
                writer.remove(key)
                writer.write(anchor(8), data_of(anchor(8)))
                writer.write(key, data_of(key))
            return bytes(data)

        pool.write(key, data_of(key))
        monkeypatch.setattr(slots, "_copied", once)
        found = pool.read(key)
        assert found is not None and found.data == data_of(key)


def test_descriptions_that_are_not_whole(pool: SlotPool) -> None:
    meta = pool.write(anchor(1), data_of(anchor(1))).meta
    data = meta.encode()
    assert len(data) == META_BYTES and SlotMeta.decode(data) == meta
    assert SlotMeta.decode(memoryview(bytearray(data))) == meta
    assert meta.accepts(data_of(anchor(1))) and not meta.accepts(data_of(anchor(2)))
    assert not meta.accepts(data_of(anchor(1))[:-1])
    for i in range(META_BYTES):
        with pytest.raises(FormatError):
            SlotMeta.decode(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
    with pytest.raises(FormatError):
        SlotMeta.decode(data[:-1])


# several at once


def test_threads_share_a_pool(shm: str) -> None:
    wrong: list[int] = []
    with SlotPool.open(SWA, budget(5), directory=shm) as pool:
        done = threading.Event()

        def write(seed: int) -> None:
            for i in range(300):
                number = (i * 7 + seed) % 20
                pool.write(anchor(number), data_of(anchor(number)), wait=30)

        def read() -> None:
            number = 0
            while not done.is_set():
                number = (number + 3) % 20
                found = pool.read(anchor(number))
                if found is not None and found.data != data_of(anchor(number)):
                    wrong.append(number)

        readers = [threading.Thread(target=read) for _ in range(2)]
        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
        assert not wrong and pool.stats()["used"] == 5 and pool.stats()["damaged"] == 0


def test_a_lock_that_is_held_is_busy_and_reads_go_on(pool: SlotPool, shm: str) -> None:
    pool.write(anchor(1), data_of(anchor(1)))
    with SlotPool.open(SWA, directory=shm) as other:
        with other._file.locked(0):
            with pytest.raises(BusyError):
                pool.write(anchor(2), data_of(anchor(2)), wait=0)
            assert pool.read(anchor(1)) is not None
        assert pool.write(anchor(2), data_of(anchor(2)), wait=0).new


def test_a_forked_child_has_a_lock_of_its_own(pool: SlotPool) -> None:
    pool.write(anchor(1), data_of(anchor(1)))
    child = os.fork()
    if not child:
        code = 1
        try:
            ok = pool.read(anchor(1)) is not None
            pool.write(anchor(2), data_of(anchor(2)))
            with pool._file.locked(0):
                pass
            code = 0 if ok else 2
        finally:
            os._exit(code)
    with pool._file.locked(1):
        pass
    assert os.waitpid(child, 0)[1] == 0
    found = pool.read(anchor(2))
    assert found is not None and found.data == data_of(anchor(2))


# tensors


def test_tensors_go_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    import tempfile

    size = SLOT // 2
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        ring = torch.arange(SLOT, dtype=torch.uint8).view(dtype)
        with (
            tempfile.TemporaryDirectory() as directory,
            SlotPool.open(SWA, budget(2), directory=directory) as pool,
        ):
            pool.write(anchor(1), tensors.filler(ring))
            found = pool.read(anchor(1))
            assert found is not None
            other = torch.zeros_like(ring)
            tensors.load(found.data, other)
            assert torch.equal(other.view(torch.uint8), ring.view(torch.uint8))
            other.view(torch.uint8).zero_()
            assert pool.read(anchor(1), tensors.buffer(other)) is not None
            assert torch.equal(other.view(torch.uint8), ring.view(torch.uint8))
            with pytest.raises(InputError):
                pool.write(anchor(2), tensors.filler(ring[:-8]))
            with pytest.raises(InputError):
                tensors.load(found.data[:-8], other)
    with pytest.raises(InputError):
        tensors.filler(torch.zeros(size, 2, dtype=torch.uint8).t())
    with pytest.raises(InputError):
        tensors.buffer(bytearray(4))


def test_a_tensor_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    import tempfile

    ring = torch.randint(0, 256, (SLOT,), dtype=torch.uint8, device="cuda")
    with (
        tempfile.TemporaryDirectory() as directory,
        SlotPool.open(SWA, budget(2), directory=directory) as pool,
    ):
        pool.write(anchor(1), tensors.filler(ring))
        found = pool.read(anchor(1))
        assert found is not None and found.data == bytes(ring.cpu().numpy())
        other = torch.zeros_like(ring)
        tensors.load(found.data, other)
        assert torch.equal(other, ring)
        with pytest.raises(InputError):
            tensors.buffer(ring)
