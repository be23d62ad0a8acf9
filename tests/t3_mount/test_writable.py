"""A mount with -o rw: rm evicts, touch renews, setfattr changes the class; nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from kvfs.testing.chains import hashes_of, tokens_of
from kvfs.testing.mounts import Mounted


@pytest.fixture
def node(place: Mounted) -> Path:
    """The node 1, 2, 3, 4 with a fork behind 2 and one behind 3."""
    place.put(1, 2)
    place.put(1, 2, 3, 4)
    time.sleep(0.002)  # the earliest, by milliseconds, continues the line
    place.put(1, 2, 9)
    place.put(1, 2, 3, 8)
    place.put(5)
    place.mount("-o", "rw")
    return next(n for n in place.space.glob("000000-*") if len(os.listdir(n)) > 2)


def stored(place: Mounted, *blocks: int) -> int:
    return place.store.check(place.ns, tokens_of(blocks, 128)).stored_blocks


def fails(code: int, work: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        work()
    assert caught.value.errno == code, errno.errorcode[caught.value.errno or 0]


def run(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_rm_evicts_a_block_and_what_follows(place: Mounted, node: Path) -> None:
    run("rm", node / "000002.kv")
    assert len(list(node.glob("000002*"))) == 1, "a name that was removed is gone at once"
    assert stored(place, 1, 2, 3, 4) == 2 and stored(place, 1, 2, 3, 8) == 2
    assert stored(place, 1, 2, 9) == 3
    # What was a fork behind block 1 continues the line now.
    assert sorted(os.listdir(node)) == ["000000.kv", "000001.kv", "000002.kv", "tokens"]


@pytest.mark.parametrize("options", [["-r"], ["-rf"], ["-rv"]])
def test_rm_r_removes_a_node(place: Mounted, node: Path, options: list[str]) -> None:
    done = subprocess.run(
        ["rm", *options, node], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not node.exists()
    assert stored(place, 1, 2, 3, 4) == stored(place, 1, 2, 9) == 0
    assert stored(place, 5) == 1 and len(list(place.space.glob("000000-*"))) == 1
    assert "Traceback" not in place.log()


def test_rm_r_of_a_node_whose_names_were_forgotten(place: Mounted, node: Path) -> None:
    """Inode order, slow storage, dropped caches: each name is looked up again."""
    names = sorted(os.listdir(node))
    file = os.open(node, os.O_RDONLY)
    try:
        for name in names:
            for lookup in (os.lstat, os.lstat):
                lookup(f"/proc/self/fd/{file}/{name}")
            if name.endswith((".kv", "tokens")):
                os.unlink(name, dir_fd=file)
                if name == "000000.kv":
                    time.sleep(1.2)  # `tokens` and directories are asked for again
            else:
                assert os.listdir(f"/proc/self/fd/{file}/{name}") == []
                os.rmdir(name, dir_fd=file)
    finally:
        os.close(file)
    os.rmdir(node)
    assert stored(place, 1) == 0


def test_a_node_that_is_put_again_is_there_again(place: Mounted, node: Path) -> None:
    run("rm", "-r", node)
    place.put(1, 2)
    assert node.name in os.listdir(place.space)
    assert sorted(os.listdir(node)) == ["000000.kv", "000001.kv", "tokens"]
    assert len((node / "000001.kv").read_bytes()) == place.ns.row_bytes


def expires(path: Path) -> float:
    text = os.getxattr(path, "user.kvfs.expires").decode()
    return datetime.fromisoformat(text).timestamp()


def test_touch_renews(place: Mounted, node: Path) -> None:
    block = node / "000003.kv"
    before = {i: expires(node / f"{i:06d}.kv") for i in range(4)}
    time.sleep(0.01)
    run("touch", block)
    after = {i: expires(node / f"{i:06d}.kv") for i in range(4)}
    assert all(after[i] > before[i] for i in range(4)), "and what it builds on"
    st = os.stat(block)
    assert abs(st.st_atime - time.time()) < 60 and st.st_mtime < st.st_atime
    time.sleep(0.01)
    run("touch", node)
    assert expires(block) > after[3]


def test_setfattr_changes_the_class(place: Mounted, node: Path) -> None:
    block = node / "000003.kv"
    run("setfattr", "-n", "user.kvfs.ttl_class", "-v", "agent", block)
    assert os.getxattr(block, "user.kvfs.ttl_class") == b"agent"
    assert os.getxattr(node / "000000.kv", "user.kvfs.ttl_class") == b"chatbot"
    assert abs(expires(block) - time.time() - 3 * 86400) < 60
    run("setfattr", "-n", "user.kvfs.ttl_class", "-v", "agent", node)
    assert os.getxattr(node / "000000.kv", "user.kvfs.ttl_class") == b"agent"
    fails(errno.EINVAL, lambda: os.setxattr(block, "user.kvfs.ttl_class", b"nope"))
    fails(errno.EEXIST, lambda: os.setxattr(block, "user.kvfs.ttl_class", b"agent", 1))
    os.setxattr(block, "user.kvfs.ttl_class", b"chatbot", 2)
    assert os.getxattr(block, "user.kvfs.ttl_class") == b"chatbot"


REFUSED: dict[str, tuple[int, Callable[[Path], object]]] = {
    "write": (errno.EPERM, lambda n: os.open(n / "000000.kv", os.O_WRONLY)),
    "append": (errno.EPERM, lambda n: os.open(n / "000000.kv", os.O_RDWR | os.O_APPEND)),
    "truncate": (errno.EPERM, lambda n: os.truncate(n / "000000.kv", 0)),
    "create": (errno.EPERM, lambda n: os.open(n / "new", os.O_CREAT | os.O_WRONLY)),
    "mkdir": (errno.EPERM, lambda n: os.mkdir(n / "new")),
    "mkfifo": (errno.EPERM, lambda n: os.mkfifo(n / "new")),
    "symlink": (errno.EPERM, lambda n: os.symlink("x", n / "new")),
    "link": (errno.EPERM, lambda n: os.link(n / "000000.kv", n / "new")),
    "rename": (errno.EPERM, lambda n: os.rename(n / "000000.kv", n / "new")),
    "chmod": (errno.EPERM, lambda n: os.chmod(n / "000000.kv", 0o600)),
    "chown": (errno.EPERM, lambda n: os.chown(n / "000000.kv", 1, 1)),
    "rmdir": (errno.ENOTEMPTY, lambda n: os.rmdir(n)),
    "rmdir of the namespace": (errno.EPERM, lambda n: os.rmdir(n.parent)),
    "unlink of namespace.json": (errno.EPERM, lambda n: os.unlink(n.parent / "namespace.json")),
    "unlink of README": (errno.EPERM, lambda n: os.unlink(n.parent.parent / "README")),
    "touch of namespace.json": (errno.EPERM, lambda n: os.utime(n.parent / "namespace.json")),
    "another attribute": (errno.EPERM, lambda n: os.setxattr(n, "user.kvfs.hash", b"x")),
    "an attribute of others": (errno.EOPNOTSUPP, lambda n: os.setxattr(n, "user.x", b"x")),
    "no class": (errno.EPERM, lambda n: os.removexattr(n, "user.kvfs.ttl_class")),
}


def test_everything_else_is_refused(place: Mounted, node: Path) -> None:
    before = sorted(str(p) for p in place.point.rglob("*"))
    for what, (code, work) in REFUSED.items():
        with pytest.raises(OSError) as caught:
            work(node)
        assert caught.value.errno == code, f"{what}: {caught.value}"
    assert sorted(str(p) for p in place.point.rglob("*")) == before
    assert "WARNING" not in place.log()
    assert stored(place, 1, 2, 3, 4) == 4
    assert hashes_of(place.ns, tokens_of([1], 128))[0].hex()[:16] in node.name
