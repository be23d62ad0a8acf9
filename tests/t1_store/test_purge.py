"""Erasing: no byte of what was purged is left, and everything else is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.gc.purge import Purge, Receipt
from kvfs.repair.fsck import fsck
from kvfs.testing import children
from kvfs.testing.blocks import payload
from kvfs.testing.command import kvctl_json
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Stock, overwrite, tokens
from kvfs.writer import Writer

A, B = tokens(1, 40), tokens(2, 40)
LONG = tokens(9, 40, after=A)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir, grace_seconds=60.0)
    yield stock
    assert index_faults(stock.store.index) == []
    stock.close()


def purge(stock: Stock, prompt: list[int], keep: int = 0) -> Receipt:
    def sleep(seconds: float) -> None:
        stock.clock.now += seconds

    head = stock.ns.hasher(prompt).digest(1)
    return Purge(stock.store, stock.ns, sleep).run([(head, keep)])


def on_disk(stock: Stock, prompt: list[int], block: int) -> bool:
    """The payload of a block is in some file of the store."""
    hasher = stock.ns.hasher(prompt)
    wanted = payload(hasher.lineages(block + 1)[16 * block :], stock.ns.row_bytes)
    return any(wanted in p.read_bytes() for p in Path(stock.store.path).rglob("*.seg"))


def test_no_byte_is_left_and_the_others_are(stock: Stock) -> None:
    stock.put(A)
    stock.put(B)
    stock.put(LONG)
    assert on_disk(stock, A, 5) and on_disk(stock, LONG, 15)
    receipt = purge(stock, A, keep=4)
    assert receipt.complete and receipt.blocks == 16
    assert [f.removed_ms is not None for f in receipt.files] == [True]
    assert receipt.removed_bytes > 30 * 4096 and receipt.copied_bytes == 14 * 4096
    assert not any(on_disk(stock, LONG, i) for i in range(4, 20))
    assert (stock.good(A), stock.good(LONG), stock.good(B)) == (4, 4, 10)
    assert not fsck(stock.store).damaged
    again = stock.again()
    assert (again.good(A), again.good(B)) == (4, 10)
    stock.put = again.put  # type: ignore[method-assign]
    stock.store = again.store
    assert again.put(A).complete and again.good(A) == 10


def test_copies_that_others_have_left_go_too(stock: Stock, tmp_path: Path) -> None:
    other = stock.another(index=str(tmp_path / "other"))
    stock.put(A)
    other.put(A)
    other.store.close()
    assert len(list(Path(stock.store.path).rglob("*.seg"))) == 2
    receipt = purge(stock, A)
    assert receipt.complete and len(receipt.files) == 2
    assert not any(on_disk(stock, A, i) for i in range(10))
    fresh = stock.another(index=str(tmp_path / "fresh"))
    assert fresh.good(A) == 0


def test_a_segment_that_is_being_written_is_pending(stock: Stock, tmp_path: Path) -> None:
    other = stock.another(index=str(tmp_path / "other"))
    other.put(A)
    stock.store.catch_up()
    receipt = purge(stock, A)
    assert not receipt.complete and receipt.files[0].pending and stock.stored(A) == 0
    other.store.close()
    other = stock.another(index=str(tmp_path / "other"))
    assert other.stored(A) == 0


@pytest.mark.parametrize("of", ["writer", "header"])
def test_what_no_journal_tells_of_is_pending(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """A writer, or a cleaner, that was killed between the records and the journal left a copy."""
    with monkeypatch.context() as m:
        m.setattr(Writer, "publish", lambda *_: os._exit(7))
        assert children.run(lambda: stock.elsewhere("killed").put(A)) == 7
    (left,) = Path(stock.store.path).rglob("*.seg")
    if of == "header":
        overwrite(str(left), 0, bytes(4096))
    stock.put(A)
    stock.put(B)
    receipt = purge(stock, A)
    path = str(left.relative_to(stock.store.path))
    pending = [f for f in receipt.files if f.pending]
    assert [f.path for f in pending] == [path] and not receipt.complete and stock.stored(A) == 0
    assert of == "header" or "no journal tells of it" in str(pending[0].pending)
    assert purge(stock, B).complete is (of == "writer")
    left.unlink()
    stock.put(A)
    assert purge(stock, A).complete


def test_the_receipt_of_kvctl(cli_store: Path, cli_namespace: str) -> None:
    ids = ("--tokens", " ".join(str(i) for i in range(512)))
    kvctl_json("init", str(cli_store) + ".2", "--grace", "1s")
    kvctl_json("ns", "create", "--store", str(cli_store) + ".2", "--preset", "tiny", "--weights",
               "w", "--tokenizer", "t")  # fmt: skip
    at = ("--store", str(cli_store) + ".2")
    put = kvctl_json("put", "--synthetic", *ids, *at)
    receipt = kvctl_json("rm", "--all", "--purge", *at)
    assert receipt["complete"] and receipt["blocks"] == put["stored"]
    assert receipt["removed_bytes"] > 0 and receipt["files"][0]["removed_ms"]
    assert kvctl_json("rm", "--all", "--purge", *at, code=3)["blocks"] == 0
