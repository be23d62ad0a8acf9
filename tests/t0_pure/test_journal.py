"""Journals: readers see the leading whole entries of the right file, at every moment."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs.backend import PosixBackend, WriteCut
from kvfs.errors import FormatError
from kvfs.frames import DropEntry, Entry, SealEntry
from kvfs.journal import (
    HEADER_BYTES,
    Header,
    JournalReader,
    JournalWriter,
    decode_header,
    frame_seed,
    journal_path,
)
from kvfs.testing.faults import CutAt, FaultyBackend, Short

WRITER_ID, STORE = b"w" * 12, b"s" * 16
WRITER = f"host-boot-{WRITER_ID.hex()}"
ENTRIES: list[Entry] = [DropEntry(bytes([i]) * 16, i) for i in range(5)]


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(str(tmp_path))


def header(number: int = 0, writer_id: bytes = WRITER_ID) -> Header:
    return Header(writer_id, number, 0, STORE, 1234)


def write(backend: PosixBackend, number: int = 0, entries: list[Entry] | None = None) -> bytes:
    """Writes a journal and returns the file."""
    journal = JournalWriter(backend, WRITER, header(number))
    journal.append(ENTRIES if entries is None else entries)
    journal.close()
    return backend.load(journal_path(WRITER, number), 1 << 20)


def read(backend: PosixBackend, number: int = 0, offset: int = 0) -> list[tuple[Entry | None, int]]:
    reader = JournalReader(backend, WRITER, number, STORE)
    return list(reader.decode(reader.read(offset), offset))


def place(backend: PosixBackend, data: bytes, number: int = 0) -> None:
    path = Path(backend.root, journal_path(WRITER, number))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_entries_come_back_with_the_offsets_behind_them(backend: PosixBackend) -> None:
    journal = JournalWriter(backend, WRITER, header())
    assert journal.append(ENTRIES[:2])[0] == HEADER_BYTES
    start, ends = journal.append(ENTRIES[2:])
    journal.close()
    found = read(backend)
    assert [entry for entry, _ in found] == ENTRIES
    assert [end for _, end in found[2:]] == ends and found[1][1] == start
    for i, (_, end) in enumerate(found):  # reading on from any of them
        assert read(backend, offset=end) == found[i + 1 :]


def test_torn_at_every_byte(backend: PosixBackend) -> None:
    whole = write(backend)
    found = read(backend)
    for cut in range(len(whole) + 1):
        place(backend, whole[:cut])
        assert read(backend) == [(e, end) for e, end in found if end <= cut], cut
        place(backend, whole[:cut].ljust(len(whole) + 512, b"\0"))
        if cut < HEADER_BYTES and whole[cut:HEADER_BYTES].strip(b"\0") and cut:
            with pytest.raises(FormatError):  # part of a header and zeros: no journal, no entry
                read(backend)
        else:
            kept = read(backend)
            assert kept == found[: len(kept)] and len(kept) >= sum(e <= cut for _, e in found)


@given(bit=st.integers(0, HEADER_BYTES * 8 - 1))
def test_every_bit_of_the_header_counts(bit: int) -> None:
    raw = bytearray(header(3).encode())
    assert decode_header(bytes(raw), "log/x", STORE) == header(3)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError, match="log/x"):
        decode_header(bytes(raw), "log/x", STORE)


def test_a_header_that_is_not_whole_yet_is_none_yet() -> None:
    raw = header().encode()
    for size in range(HEADER_BYTES):
        assert decode_header(raw[:size], "log/x", STORE) is None
    assert decode_header(bytes(HEADER_BYTES), "log/x", STORE) is None


def test_another_version_is_refused_by_number() -> None:
    raw = bytearray(header().encode())
    struct.pack_into("<I", raw, 8, 2)
    struct.pack_into("<Q", raw, 56, xxhash.xxh3_64_intdigest(bytes(raw[:56])))
    with pytest.raises(FormatError, match=r"log/x: journal version 2; this kvfs reads 1"):
        decode_header(bytes(raw), "log/x", STORE)


def test_another_store_is_refused() -> None:
    with pytest.raises(FormatError, match="another store"):
        decode_header(header().encode(), "log/x", b"t" * 16)


def test_frames_of_other_journals_are_not_read(backend: PosixBackend) -> None:
    """Whatever old blocks of other files a file system shows behind the end."""
    own = header(0).encode()
    for number in range(1, 40):
        other = write(backend, number)[HEADER_BYTES:]
        for shift in (0, 8, 8 * number):
            place(backend, own + bytes(shift) + other)
            assert read(backend) == [], (number, shift)
            place(backend, own + other[shift:])
            assert read(backend) == [], (number, shift)


def test_seeds_of_a_writers_journals_are_apart() -> None:
    """No offset within a journal makes up for another number."""
    seeds = sorted(frame_seed(WRITER_ID, number) for number in range(100))
    assert all(b - a > 1 << 39 for a, b in itertools.pairwise(seeds))


def test_a_short_count_is_written_on(tmp_path: Path) -> None:
    faults = FaultyBackend(PosixBackend(str(tmp_path)))
    faults.on("writev", do=Short(7), times=None)
    journal = JournalWriter(faults, WRITER, header())
    journal.append(ENTRIES)
    journal.close()
    assert [entry for entry, _ in read(PosixBackend(str(tmp_path)))] == ENTRIES


def test_a_failed_append_leaves_the_entries_before_it(tmp_path: Path) -> None:
    faults = FaultyBackend(PosixBackend(str(tmp_path)))
    journal = JournalWriter(faults, WRITER, header())
    _, ends = journal.append(ENTRIES[:2])
    for cut in range(ends[-1], ends[-1] + 48 * 3, 5):
        faults.clear()
        faults.on("writev", do=CutAt(cut), times=None)
        with pytest.raises(WriteCut):
            journal.append([*ENTRIES[2:], SealEntry(1, True)])
        assert journal.end == ends[-1]
        found = [entry for entry, _ in read(PosixBackend(str(tmp_path)))]
        assert found == ENTRIES[: len(found)] and len(found) >= 2
    journal.close()


def test_a_header_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    faults = FaultyBackend(PosixBackend(str(tmp_path)))
    faults.on("writev", do=CutAt(10, errno.EIO), times=None)
    with pytest.raises(OSError):
        JournalWriter(faults, WRITER, header())
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_a_journal_is_never_made_twice(backend: PosixBackend) -> None:
    write(backend)
    with pytest.raises(FileExistsError):
        JournalWriter(backend, WRITER, header())
