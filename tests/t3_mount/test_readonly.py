"""What a read-only mount answers, call by call: one mount, many short checks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.testing.chains import hashes_of, payload, tokens_of
from kvfs.testing.mounts import Mounted, mounted

ROW = 300_000
CHAIN = [1, 2, 3]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("readonly"), row_bytes=ROW) as place:
        place.put(*CHAIN)
        place.put(1, 9)
        place.mount()
        yield place


@pytest.fixture(scope="module")
def node(tree: Mounted) -> Path:
    return next(tree.space.glob("000000-*"))


@pytest.fixture(scope="module")
def block(node: Path) -> Path:
    return node / "000001.kv"


@pytest.fixture(scope="module")
def data(tree: Mounted) -> bytes:
    return payload(hashes_of(tree.ns, tokens_of(CHAIN, 128))[1], ROW)


def fails(code: int, work: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        work()
    assert caught.value.errno == code, errno.errorcode[caught.value.errno or 0]


# nothing can be changed

CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "open for writing": lambda n, b: os.open(b, os.O_WRONLY),
    "open for both": lambda n, b: os.open(b, os.O_RDWR),
    "truncate at open": lambda n, b: os.open(b, os.O_WRONLY | os.O_TRUNC),
    "create": lambda n, b: os.open(n / "new", os.O_CREAT | os.O_WRONLY),
    "truncate": lambda n, b: os.truncate(b, 0),
    "unlink": lambda n, b: os.unlink(b),
    "rmdir": lambda n, b: os.rmdir(n),
    "mkdir": lambda n, b: os.mkdir(n / "new"),
    "mknod": lambda n, b: os.mknod(n / "new", stat.S_IFREG | 0o600),
    "mkfifo": lambda n, b: os.mkfifo(n / "new"),
    "symlink": lambda n, b: os.symlink("x", n / "new"),
    "link": lambda n, b: os.link(b, n / "new"),
    "rename": lambda n, b: os.rename(b, n / "new"),
    "rename a directory": lambda n, b: os.rename(n, n.parent / "new"),
    "chmod": lambda n, b: os.chmod(b, 0o777),
    "chown": lambda n, b: os.chown(b, 1, 1),
    "utime": lambda n, b: os.utime(b),
    "setxattr": lambda n, b: os.setxattr(b, "user.kvfs.ttl_class", b"agent"),
    "setxattr of another name": lambda n, b: os.setxattr(b, "user.x", b"y"),
    "removexattr": lambda n, b: os.removexattr(b, "user.kvfs.hash"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_refused(node: Path, block: Path, what: str) -> None:
    fails(errno.EROFS, lambda: CHANGES[what](node, block))


# names

NAMES: dict[str, tuple[int, bytes]] = {
    "absent": (errno.ENOENT, b"000099.kv"),
    "no such name": (errno.ENOENT, b"anything"),
    "bytes that are no text": (errno.ENOENT, b"\xff\xfe\x80"),
    "255 bytes": (errno.ENOENT, b"n" * 255),
    "256 bytes": (errno.ENAMETOOLONG, b"n" * 256),
    "1,025 bytes": (errno.ENAMETOOLONG, b"n" * 1025),
    "4,000 bytes": (errno.ENAMETOOLONG, b"n" * 4000),
    "5,000 bytes": (errno.ENAMETOOLONG, b"n" * 5000),
    "below a file": (errno.ENOTDIR, b"000000.kv/x"),
    "a file as a directory": (errno.ENOTDIR, b"000000.kv/"),
    "newline": (errno.ENOENT, b"000000.kv\n"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name(node: Path, what: str) -> None:
    code, name = NAMES[what]
    fails(code, lambda: os.stat(os.fsencode(node) + b"/" + name))


def test_dots(node: Path) -> None:
    assert os.stat(node / ".").st_ino == os.stat(node).st_ino
    assert os.stat(f"{node}/..").st_ino == os.stat(node.parent).st_ino


def test_a_directory_is_not_read_as_a_file(node: Path, block: Path) -> None:
    file = os.open(node, os.O_RDONLY)
    fails(errno.EISDIR, lambda: os.read(file, 1))
    os.close(file)
    fails(errno.ENOTDIR, lambda: os.listdir(block))
    fails(errno.EINVAL, lambda: os.readlink(block))


# directories


def test_listing(node: Path, tree: Mounted) -> None:
    for directory in (tree.point, tree.space, node):
        entries = list(os.scandir(directory))
        assert len({e.name for e in entries}) == len(entries)
        for entry in entries:
            found = os.stat(entry.path)
            assert entry.inode() == found.st_ino == entry.stat().st_ino
            assert entry.is_dir() == stat.S_ISDIR(found.st_mode)


def test_dots_are_listed(node: Path) -> None:
    listed = subprocess.run(["ls", "-fia", node], capture_output=True, text=True, check=True)
    inodes = {n: int(i) for i, n in (line.split() for line in listed.stdout.splitlines())}
    assert inodes["."] == os.stat(node).st_ino
    assert inodes[".."] == os.stat(node.parent).st_ino


# reading


def test_bytes(block: Path, data: bytes) -> None:
    assert block.read_bytes() == data
    assert subprocess.run(["cat", block], capture_output=True, check=True).stdout == data


READS = [(0, 10), (ROW - 5, 5), (ROW - 5, 100), (ROW, 10), (ROW + 9999, 10), (4095, 2),
         (131_071, 2), (0, 2 * ROW), (131_072, 131_072)]  # fmt: skip


@pytest.mark.parametrize("offset,size", READS)
def test_read_at(block: Path, data: bytes, offset: int, size: int) -> None:
    file = os.open(block, os.O_RDONLY)
    try:
        assert os.pread(file, size, offset) == data[offset : offset + size]
    finally:
        os.close(file)


def test_seek(block: Path, data: bytes) -> None:
    with open(block, "rb") as f:
        assert f.seek(-7, os.SEEK_END) == ROW - 7 and f.read() == data[-7:]
        assert os.lseek(f.fileno(), 5, os.SEEK_DATA) == 5
        assert os.lseek(f.fileno(), 5, os.SEEK_HOLE) == ROW
        fails(errno.ENXIO, lambda: os.lseek(f.fileno(), ROW, os.SEEK_DATA))


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_mmap(block: Path, data: bytes, flags: int) -> None:
    with open(block, "rb") as f, mmap.mmap(f.fileno(), 0, flags, mmap.PROT_READ) as m:
        assert m[:] == data


def test_mapped_writing_is_refused(block: Path) -> None:
    with open(block, "rb") as f:
        fails(errno.EACCES, lambda: mmap.mmap(f.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_WRITE))


def test_direct_reads(block: Path, data: bytes) -> None:
    file = os.open(block, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 1 << 20) as buffer:
            assert os.preadv(file, [buffer], 0) == ROW
            assert buffer[:ROW] == data
    finally:
        os.close(file)


def test_copies(block: Path, data: bytes, tmp_path: Path) -> None:
    shutil.copyfile(block, tmp_path / "a")  # sendfile or copy_file_range
    subprocess.run(["cp", block, tmp_path / "b"], check=True)
    with open(block, "rb") as source, open(tmp_path / "c", "wb") as target:
        done = 0
        while n := os.sendfile(target.fileno(), source.fileno(), done, ROW):
            done += n
    subprocess.run(["tar", "-C", block.parent, "-cf", tmp_path / "d", block.name], check=True)
    subprocess.run(["tar", "-C", tmp_path, "-xf", tmp_path / "d"], check=True)
    for name in ("a", "b", "c", block.name):
        assert (tmp_path / name).read_bytes() == data, name


def test_tokens(node: Path) -> None:
    rows = [[int(t) for t in line.split()] for line in (node / "tokens").read_text().splitlines()]
    assert rows == [tokens_of([b], 128) for b in CHAIN]
    with open(node / "tokens", "rb") as f:
        f.seek(1408 + 11)
        assert int(f.read(11)) == tokens_of([2], 128)[1]


def test_the_same_bytes_elsewhere(tree: Mounted, tmp_path: Path) -> None:
    """A copy of the tree is the tree: diff, and every size and type."""
    subprocess.run(["cp", "-r", tree.point, tmp_path / "copy"], check=True)
    subprocess.run(["diff", "-r", tree.point, tmp_path / "copy"], check=True)


# what else one may ask of a file


def test_locks(block: Path) -> None:
    with open(block, "rb") as f:
        fcntl.flock(f, fcntl.LOCK_SH)
        fcntl.lockf(f, fcntl.LOCK_SH)


def test_sync(block: Path, node: Path) -> None:
    for path in (block, node):
        file = os.open(path, os.O_RDONLY)
        try:
            try:
                os.fsync(file)
            except OSError as e:
                assert e.errno in (errno.EINVAL, errno.ENOSYS)
        finally:
            os.close(file)


def test_ioctl(block: Path) -> None:
    with open(block, "rb") as f:
        fails(errno.ENOTTY, lambda: fcntl.ioctl(f, 0x5401))


def test_access(block: Path, node: Path) -> None:
    assert os.access(block, os.R_OK) and not os.access(block, os.W_OK)
    assert not os.access(block, os.X_OK) and os.access(node, os.R_OK | os.X_OK)


def test_modes(block: Path, node: Path, tree: Mounted) -> None:
    assert stat.filemode(os.stat(block).st_mode) == "-r--r--r--"
    assert stat.filemode(os.stat(node).st_mode) == "dr-xr-xr-x"
    assert (os.stat(block).st_uid, os.stat(block).st_gid) == (os.getuid(), os.getgid())
    assert os.statvfs(tree.point).f_flag & os.ST_RDONLY


def xattr(function: str, path: Path, *args: object) -> int:
    """The call itself: os.getxattr hides the protocol of sizes."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(libc, function)(os.fsencode(path), *args)
    return result if result >= 0 else -ctypes.get_errno()


def test_the_protocol_of_attribute_sizes(block: Path) -> None:
    name = b"user.kvfs.hash"
    buffer = ctypes.create_string_buffer(100)
    assert xattr("getxattr", block, name, None, 0) == 32
    assert xattr("getxattr", block, name, buffer, 31) == -errno.ERANGE
    assert xattr("getxattr", block, name, buffer, 32) == 32
    assert xattr("getxattr", block, name, buffer, 100) == 32
    size = xattr("listxattr", block, None, 0)
    assert xattr("listxattr", block, buffer, 1) == -errno.ERANGE
    assert size == sum(len(n) + 1 for n in os.listxattr(block))
    for absent in (b"user.kvfs.nothing", b"user.x", b"security.capability", b"trusted.x"):
        assert xattr("getxattr", block, absent, buffer, 100) == -errno.ENODATA
    assert os.listxattr(block.parent.parent / "namespace.json") == []


def test_the_mount_is_the_one_that_began(tree: Mounted) -> None:
    """After all of this: the same process, and nothing in its log."""
    assert "WARNING" not in tree.log() and "ERROR" not in tree.log()
    assert tree.log().count("mounted at") == 1
