"""What du, df, find, stat and getfattr say, and what each costs in requests."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing.chains import hashes_of, tokens_of
from kvfs.testing.mounts import Mounted, mounted

ROW = 100_000
BLOCKS = 100
CHAIN = list(range(1, BLOCKS + 1))
LINE = 128 * 11


def run(*command: object) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, errors="replace", check=True,
        timeout=60,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("attributes"), row_bytes=ROW) as place:
        place.put(*CHAIN)
        place.put(1, 9, ttl_class="agent")
        place.mount()
        yield place


@pytest.fixture(scope="module")
def node(tree: Mounted) -> Path:
    return next(tree.space.glob("000000-*"))


# values


def test_du(tree: Mounted, node: Path) -> None:
    """As many bytes as there are: blocks, and the token ids in the form they are shown in."""
    fork = next(node.glob("000001-*"))
    size = {fork: ROW + LINE, node: (BLOCKS + 1) * (ROW + LINE)}
    for path, expected in size.items():
        assert int(run("du", "-sb", path).split()[0]) == expected
    files = [os.stat(p) for p in node.rglob("*") if p.is_file()]
    assert all(s.st_blocks == -(-s.st_size // 512) for s in files)
    total = sum(s.st_blocks for s in files)
    assert int(run("du", "-s", "--block-size=512", node).split()[0]) == total
    counted = tree.store.index.counters()["blocks"]
    assert len(list(tree.point.rglob("*.kv"))) == counted == BLOCKS + 1


def test_find(tree: Mounted, node: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    assert run("find", tree.point, "-size", "+90k", "-name", "*.kv").count("\n") == BLOCKS + 1
    assert run("find", node, "-newermt", (now - hour).isoformat()).count("\n") == BLOCKS + 5
    assert run("find", node, "-newermt", (now + hour).isoformat()) == ""
    assert run("find", node, "-size", f"{ROW}c", "-perm", "0444", "-links", "1").count("kv\n") > 0
    assert run("find", node, "-type", "d").count("\n") == 2


def test_df(tree: Mounted) -> None:
    free, total = tree.store.backend.free_bytes()
    source, size, used, available = run(
        "df", "-B1", "--output=source,size,used,avail", tree.point
    ).splitlines()[1].split()  # fmt: skip
    assert source == f"kvfs:{tree.store.path}"
    assert int(size) == total // 4096 * 4096
    assert abs(int(available) - free) < 1 << 30, "others write on the same disk"
    assert abs(int(used) + int(available) - total) < 1 << 20
    found = os.statvfs(tree.point)
    assert (found.f_namemax, found.f_files) == (255, BLOCKS + 1)
    assert "fuse.kvfs" in run("df", "-t", "fuse.kvfs", "-T", tree.point)


def test_stat_agrees_with_the_store(tree: Mounted, node: Path) -> None:
    tokens = tokens_of(CHAIN, 128)
    head = hashes_of(tree.ns, tokens)[0]
    found = tree.store.index.run(tree.ns.number, head)
    assert found is not None
    st = os.stat(node / "000007.kv")
    assert st.st_mtime_ns == found.written_ms * 1_000_000
    assert st.st_size == ROW and st.st_blksize == 131_072 and st.st_nlink == 1
    assert run("stat", "-c", "%s %b %i", node / "000007.kv").split() == [
        str(ROW), str(-(-ROW // 512)), str(st.st_ino),
    ]  # fmt: skip


def test_getfattr(tree: Mounted, node: Path) -> None:
    extent = tree.store.check(tree.ns, tokens_of(CHAIN, 128)).extents[0]
    hashes = hashes_of(tree.ns, tokens_of(CHAIN, 128))
    text = run("getfattr", "--absolute-names", "-d", "-m", "-", node / "000007.kv")
    found = dict(x.split("=", 1) for x in text.splitlines() if "=" in x)
    found = {k.removeprefix("user.kvfs."): v.strip('"') for k, v in found.items()}
    assert found["segment"] == extent.segment and found["length"] == str(ROW)
    assert found["offset"] == str(extent.geometry.offset(extent.slot + 7))
    assert (found["hash"], found["parent"]) == (hashes[7].hex(), hashes[6].hex())
    assert found["block"] == "7" and found["ttl_class"] == "chatbot"
    expires = datetime.datetime.fromisoformat(found["expires"])
    assert round(expires.timestamp() * 1000) == extent.expires_ms
    path = Path(tree.store.path, found["segment"])
    with open(path, "rb") as f:
        f.seek(int(found["offset"]))
        assert f.read(ROW) == (node / "000007.kv").read_bytes(), "a locator of the payload"
    assert found.keys() == {
        "namespace", "block", "hash", "parent", "ttl_class", "expires", "segment", "offset",
        "length", "checksum",
    }  # fmt: skip


def test_renewal_shows_as_access_time(tree: Mounted, node: Path) -> None:
    before = os.stat(node / "000000.kv")
    tree.store.touch(tree.ns, tokens_of(CHAIN, 128))
    file = os.open(node, os.O_RDONLY)  # a directory read anew carries new attributes
    try:
        (entry,) = (e for e in os.scandir(file) if e.name == "000000.kv")
        after = entry.stat()
    finally:
        os.close(file)
    assert after.st_atime_ns > before.st_atime_ns and after.st_mtime_ns == before.st_mtime_ns


# requests


def cost(place: Mounted, *command: object) -> dict[str, int]:
    """The requests a command caused. Not counted: what the kernel sends when it likes, and
    attributes of directories, which are asked for again after a second."""
    before = place.requests()
    run(*command)
    after = place.requests() - before
    after["getxattr"] -= 1  # that of asking
    uncounted = ("forget", "release", "releasedir", "getattr", "lookup")
    return {k: n for k, n in after.items() if n and k not in uncounted}


def listing(directories: int, reads: int) -> dict[str, int]:
    return {"opendir": directories, "readdir": reads}


def test_what_tools_cost(tmp_path: Path) -> None:
    """Exact counts: names come with their attributes, what was read is not read again."""
    with mounted(tmp_path / "kvfs", row_bytes=ROW) as place:
        place.put(*CHAIN)
        place.mount()
        (node,) = place.space.glob("000000-*")
        # One reply takes all 103 entries, a second one says that there are no more.
        for command in (
            ["ls"], ["find"], ["find", "-L"], ["du", "-s"], ["ls", "-i"],
        ):  # fmt: skip
            assert cost(place, *command, node) == listing(1, 2), command
        assert cost(place, "find", node, "-size", "+1k", "-newermt", "2001-01-01") == listing(1, 2)
        assert cost(place, "du", "-s", place.space) == listing(2, 4)
        file = node / "000003.kv"
        assert cost(place, "stat", file) == {}
        assert cost(place, "cat", file) == {"open": 1, "read": 1, "flush": 1}
        assert cost(place, "cat", file) == {"open": 1}
        assert cost(place, "cp", file, tmp_path) == {"open": 1}
        # Names of others are asked for, and answered without a look-up.
        assert cost(place, "ls", "-l", node)["getxattr"] >= 100
