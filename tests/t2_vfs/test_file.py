"""What files hold: every byte verified, or an error that says where and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import BackendError, DamageError
from kvfs.testing.chains import hashes_of, payload, tokens_of
from kvfs.testing.trees import Garden
from kvfs.vfs import xattr
from kvfs.vfs.file import BlockContent, Place, Shelf, TokensContent, read_payload
from kvfs.vfs.node import BlockFile, Folder

CHAIN = [1, 2, 3, 4, 5]


@pytest.fixture
def folder(place: Garden) -> Folder:
    place.put(*CHAIN[:2])
    place.put(*CHAIN)
    return place.folders(place.space)[0]


def where(place: Garden, folder: Folder, number: int) -> Place:
    found = place.tree.where.place(folder, number)
    assert found is not None
    return found


def block(place: Garden, folder: Folder, number: int) -> bytes:
    entry = place.entry(folder, f"{number:06d}.kv")
    assert isinstance(entry.node, BlockFile)
    content = place.tree.open(entry.node, entry.stat.ino)
    try:
        return bytes(content.read(0, entry.stat.size + 1))
    finally:
        content.close()


def segment(place: Garden, folder: Folder, number: int) -> Path:
    return Path(place.store.path) / where(place, folder, number).segment.path


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def test_blocks_are_what_was_put(place: Garden, folder: Folder) -> None:
    for i, h in enumerate(hashes_of(place.ns, tokens_of(CHAIN))):
        assert block(place, folder, i) == payload(h, 64)


@pytest.mark.parametrize("offset,size", [(0, 1), (63, 5), (64, 5), (1000, 5), (10, 0), (0, 64)])
def test_reads_anywhere(place: Garden, folder: Folder, offset: int, size: int) -> None:
    entry = place.entry(folder, "000003.kv")
    content = place.tree.open(entry.node, entry.stat.ino)  # type: ignore[arg-type]
    assert not content.ready
    whole = payload(hashes_of(place.ns, tokens_of(CHAIN))[3], 64)
    assert bytes(content.read(offset, size)) == whole[offset : offset + size]
    assert content.ready
    content.close()


def test_tokens_at_any_offset(place: Garden, folder: Folder) -> None:
    entry = place.entry(folder, "tokens")
    content = place.tree.open(entry.node, entry.stat.ino)  # type: ignore[arg-type]
    assert isinstance(content, TokensContent)
    whole = bytes(content.read(0, 1 << 20))
    rows = [tokens_of([b]) for b in CHAIN]
    assert [[int(t) for t in line.split()] for line in whole.decode().splitlines()] == rows
    assert len(whole) == entry.stat.size
    for offset in range(len(whole) + 2):
        assert content.read(offset, 50) == whole[offset : offset + 50]


# damage: where in the record, and what is said of it


@pytest.mark.parametrize(
    "offset,why",
    [(0, "checksum"), (63, "checksum"), (-128, "no record|bad trailer"), (-100, "bad trailer"),
     (-140, "bad trailer"), (-1, "bad trailer")],
)  # fmt: skip
def test_a_flipped_byte_is_never_served(
    place: Garden, folder: Folder, offset: int, why: str
) -> None:
    at = where(place, folder, 3).offset + (offset if offset >= 0 else place.ns.stride + offset)
    path = segment(place, folder, 3)
    byte = path.read_bytes()[at]
    overwrite(path, at, bytes([byte ^ 1]))
    with pytest.raises(DamageError, match=f"block 3 .*{why}"):
        block(place, folder, 3)
    assert block(place, folder, 2) and block(place, folder, 4)
    overwrite(path, at, bytes([byte]))
    assert block(place, folder, 3)


def test_another_blocks_record_is_not_believed(place: Garden, folder: Folder) -> None:
    path, stride = segment(place, folder, 3), place.ns.stride
    at, other = where(place, folder, 3).offset, where(place, folder, 4).offset
    overwrite(path, at, path.read_bytes()[other : other + stride])
    with pytest.raises(DamageError, match="another block"):
        block(place, folder, 3)


def test_a_segment_that_is_cut_short(place: Garden, folder: Folder) -> None:
    path = segment(place, folder, 4)
    with open(path, "r+b") as f:
        f.truncate(where(place, folder, 4).offset + 100)
    with pytest.raises(DamageError, match="block 4 .*short read"):
        block(place, folder, 4)
    assert block(place, folder, 3)


def test_a_missing_segment(place: Garden, folder: Folder) -> None:
    entry = place.entry(folder, "tokens")
    content = place.tree.open(entry.node, entry.stat.ino)  # type: ignore[arg-type]
    segment(place, folder, 1).unlink()
    for work in (
        lambda: block(place, folder, 1),
        lambda: content.read(0, 10),
        lambda: xattr.value(place.tree, BlockFile(folder, 1), xattr.CHECKSUM),
    ):
        with pytest.raises(BackendError, match="segment missing"):
            work()
    assert place.tree.stat(BlockFile(folder, 1)).size == 64, "stat asks the index alone"


# what is kept


def contents(place: Garden, folder: Folder, shelf: Shelf) -> list[BlockContent]:
    places = [where(place, folder, i) for i in range(5)]
    return [BlockContent(place.store.backend, place.ns, p, shelf) for p in places]


def test_open_files_keep_no_more_than_the_limit(place: Garden, folder: Folder) -> None:
    files = contents(place, folder, Shelf(limit=3 * 64))
    for file in files:
        assert len(file.read(0, 64)) == 64
    assert [f.ready for f in files] == [False, False, True, True, True]
    files[2].read(0, 1)
    assert len(files[0].read(0, 64)) == 64
    assert [f.ready for f in files] == [True, False, True, False, True]
    for file in files:
        file.close()
        file.close()
    assert not any(f.ready for f in files)


def test_a_read_that_ends_late_keeps_and_counts_nothing_twice(
    place: Garden, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gave up waiting for a read goes on, asks again, or closes the file, and it ends then."""
    late, other, *_ = contents(place, folder, Shelf(limit=2 * 64))
    other.read(0, 1)
    meanwhile: list[Callable[[], object]] = []

    def slowly(*args: Any) -> memoryview:
        payload = read_payload(*args)
        while meanwhile:
            meanwhile.pop()()
        return payload

    monkeypatch.setattr("kvfs.vfs.file.read_payload", slowly)
    meanwhile.append(lambda: late.read(0, 1))
    assert len(late.read(0, 64)) == 64
    assert late.ready and other.ready, "there is room for both"
    late.close()
    (late, *_) = contents(place, folder, Shelf())
    meanwhile.append(late.close)
    assert len(late.read(0, 64)) == 64 and not late.ready


def test_files_are_read_from_many_threads(place: Garden, folder: Folder) -> None:
    shelf = Shelf(limit=2 * 64)
    expected = [payload(h, 64) for h in hashes_of(place.ns, tokens_of(CHAIN))]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(100):
            i = (seed + step) % 5
            (file,) = contents(place, folder, shelf)[i : i + 1]
            if bytes(file.read(0, 64)) != expected[i]:
                wrong.append(i)
            file.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# extended attributes


def test_attributes_locate_the_payload(place: Garden, folder: Folder) -> None:
    node = BlockFile(folder, 3)
    values = {n: xattr.value(place.tree, node, n) for n in xattr.names(node)}
    found = {n.decode().removeprefix("user.kvfs."): v.decode() for n, v in values.items() if v}
    hashes = hashes_of(place.ns, tokens_of(CHAIN))
    assert (found["hash"], found["parent"]) == (hashes[3].hex(), hashes[2].hex())
    assert (found["block"], found["ttl_class"]) == ("3", "chatbot")
    assert found["namespace"] == place.ns.name
    data = (Path(place.store.path) / found["segment"]).read_bytes()
    at, length = int(found["offset"]), int(found["length"])
    assert data[at : at + length] == payload(hashes[3], 64)
    import xxhash

    assert found["checksum"] == f"{xxhash.xxh3_64_intdigest(data[at : at + length]):016x}"
    assert found["expires"].endswith("Z") and found["expires"].startswith("2023-11-14T22:")


def test_names_of_others_are_not_there(place: Garden, folder: Folder) -> None:
    node = BlockFile(folder, 0)
    for name in (b"security.selinux", b"user.kvfs", b"user.kvfs.", b"user.kvfs.nothing", b"user.x",
                 b"user.kvfs.\xff"):  # fmt: skip
        assert xattr.value(place.tree, node, name) is None
    assert xattr.names(place.entry(place.space, "namespace.json").node) == []
    for known in (folder, place.space, place.tree.root, place.entry(folder, "tokens").node):
        for name in xattr.names(known):
            assert xattr.value(place.tree, known, name)
