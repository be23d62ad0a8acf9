"""The library as a caller meets it: what goes in comes out, and what cannot be meant is refused."""

from __future__ import annotations

import array
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfs
from kvfs.backend.select import open_backend
from kvfs.chain import PrefixHasher
from kvfs.errors import (
    BackendError,
    ConfigError,
    FormatError,
    InputError,
    NoStoreError,
)
from kvfs.index.place import remember
from kvfs.layout import Span, StateLayout
from kvfs.local import LocalStore
from kvfs.plan import Plan
from kvfs.store import Store
from kvfs.testing.blocks import first_wrong, payloads, small_identity
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.stock import START, Stock, tokens

PROMPT = tokens(1, 40)  # 10 blocks of 4 tokens and 96 bytes


@pytest.fixture
def stock(quick_store: Path) -> Iterator[Stock]:
    made = Stock.make(quick_store)
    yield made
    made.close()


def rows(stock: Stock, prompt: list[int] = PROMPT) -> bytes:
    return payloads(stock.ns.hasher(prompt), stock.ns.row_bytes)


# tokens and blocks in every form


TOKENS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "bytes": lambda ids: array.array("I", ids).tobytes(),
    "array": lambda ids: array.array("I", ids),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "strided": lambda ids: np.repeat(np.array(ids), 2)[::2],
}


@pytest.mark.parametrize("form", TOKENS)
def test_tokens_of_every_kind_are_the_same_prompt(stock: Stock, form: str) -> None:
    """One prompt, put as one kind, checked and fetched as any other."""
    given = TOKENS[form](PROMPT)
    assert stock.store.put(stock.ns, given, rows(stock)).stored == 10
    for other in TOKENS.values():
        asked = other(PROMPT)
        plan = stock.store.check(stock.ns, asked)
        got = stock.store.fetch(stock.ns, plan, asked, blocks=10)
        assert plan.stored_tokens == 40 and got.complete
        assert bytes(got.data) == rows(stock)


def test_torch_tokens_and_blocks(stock: Stock) -> None:
    torch = pytest.importorskip("torch")
    data = torch.frombuffer(bytearray(rows(stock)), dtype=torch.float16).reshape(10, -1)
    assert stock.store.put(stock.ns, torch.tensor(PROMPT), data).stored == 10
    plan = stock.store.check(stock.ns, torch.tensor(PROMPT, dtype=torch.int32))
    assert stock.good(PROMPT) == 10 and plan.stored_blocks == 10


BLOCKS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "numpy": lambda data: np.frombuffer(data, np.uint8),
    "numpy rows": lambda data: np.frombuffer(data, np.uint8).reshape(10, -1),
    "numpy floats": lambda data: np.frombuffer(data, np.float32),
    "longer than needed": lambda data: data + b"more",
    "list of bytes": lambda data: [data[i : i + 96] for i in range(0, 960, 96)],
    "tuple of views": lambda data: tuple(memoryview(data)[i : i + 96] for i in range(0, 960, 96)),
    "list of numpy": lambda data: list(np.frombuffer(data, np.uint8).reshape(10, -1)),
    "longer list": lambda data: [data[i : i + 96] for i in range(0, 960, 96)] + [b"left out"],
}


@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_of_every_kind(stock: Stock, form: str) -> None:
    result = stock.store.put(stock.ns, PROMPT, BLOCKS[form](rows(stock)))
    assert (result.stored, result.bytes, result.error) == (10, 960, None)
    assert stock.good(PROMPT) == 10


REFUSED: dict[str, Any] = {
    "too short": bytes(959),
    "too few": [bytes(96)] * 9,
    "one too short": [bytes(96)] * 9 + [bytes(95)],
    "one too long": [bytes(96)] * 9 + [bytes(97)],
    "a number": 5,
    "text": "x" * 960,
    "not contiguous": np.zeros((10, 192), np.uint8)[:, ::2],
    "nothing": None,
}


@pytest.mark.parametrize("form", REFUSED)
def test_blocks_that_do_not_fit_are_refused(stock: Stock, form: str) -> None:
    with pytest.raises(InputError):
        stock.store.put(stock.ns, PROMPT, REFUSED[form])
    assert stock.stored(PROMPT) == 0
    assert not list(Path(stock.store.path).glob("seg/**/*.seg"))


# whole blocks only


def test_a_remainder_is_left_out_and_counted(quick_store: Path) -> None:
    """Only whole blocks can be found."""
    stock = Stock.make(quick_store, identity={"block_tokens": 128})
    for n, (count, blocks) in enumerate(
        [(100, 0), (127, 0), (128, 1), (129, 1), (255, 1), (256, 2)]
    ):
        prompt = tokens(n, count)
        result = stock.put(prompt)
        assert (result.stored, result.remainder_tokens) == (blocks, count - 128 * blocks)
        assert stock.stored(prompt) == blocks
    short = tokens(0, 100)
    for more in (tokens(50, 28), tokens(51, 28)):
        assert stock.stored(short + more) == 0
        assert stock.put(short + more).stored == 1
    assert stock.good(short + tokens(50, 28)) == 1
    stock.close()


def test_an_empty_prompt(stock: Stock) -> None:
    for prompt, reason in (([], "no tokens"), ([1], "short")):
        result = stock.store.put(stock.ns, prompt, b"")
        assert (result.blocks, result.stored, result.complete) == (0, 0, True)
        plan = stock.store.check(stock.ns, prompt)
        assert (plan.stored_tokens, plan.hit_tokens, plan.reason) == (0, 0, reason)
        assert stock.store.fetch(stock.ns, plan, prompt).complete


@given(
    row=st.integers(1, 9000), block=st.integers(1, 16),
    extent=st.sampled_from([4096, 16384, 65536]),
    blocks=st.integers(1, 12), segment=st.sampled_from([1, 3]), data=st.data(),
)  # fmt: skip
@settings(max_examples=25)
def test_every_shape_of_block_comes_back(
    ram_dir: Path, row: int, block: int, extent: int, blocks: int, segment: int, data: Any
) -> None:
    """Rows of any length, extents smaller than a record, segments of a few records."""
    import shutil
    import tempfile

    place = Path(tempfile.mkdtemp(dir=ram_dir))
    stock = Stock.make(
        place / "store", index=str(place / "index"), extent=extent,
        segment_bytes=max(extent, segment * 16384),
        identity={"row_bytes": row, "block_tokens": block},
    )  # fmt: skip
    prompt = tokens(row, blocks * block)
    first = data.draw(st.integers(0, blocks))
    assert stock.put(prompt[: first * block]).complete
    assert stock.put(prompt).stored == blocks - first
    assert stock.fetch(prompt) == (blocks, None)
    other = stock.another(index=str(place / "other"))
    assert other.good(prompt) == blocks
    stock.close()
    shutil.rmtree(place)


# putting a part


def test_blocks_from_the_middle_on(stock: Stock) -> None:
    data = rows(stock)
    assert stock.store.put(stock.ns, PROMPT[:16], data[: 4 * 96]).stored == 4
    result = stock.store.put(stock.ns, PROMPT, data[4 * 96 :], first_block=4)
    assert (result.stored, result.existing) == (6, 4)
    assert stock.good(PROMPT) == 10
    again = stock.store.put(stock.ns, PROMPT, data[2 * 96 :], first_block=2)
    assert (again.stored, again.existing, again.bytes) == (0, 10, 0)


def test_blocks_behind_a_gap_are_not_stored(stock: Stock) -> None:
    result = stock.store.put(stock.ns, PROMPT, rows(stock)[4 * 96 :], first_block=4)
    assert isinstance(result.error, InputError) and "blocks 0 to 3" in str(result.error)
    assert (result.stored, result.complete) == (0, False)
    assert stock.stored(PROMPT) == 0
    assert stock.store.stats().get("store_failures", 0) == 0  # the caller's fault
    for first in (-1, 11):
        with pytest.raises(InputError):
            stock.store.put(stock.ns, PROMPT, rows(stock), first_block=first)


def test_what_is_there_is_not_written_again(stock: Stock) -> None:
    assert stock.put(PROMPT).stored == 10
    before = sum(os.path.getsize(path) for path in stock.paths())
    result = stock.put(PROMPT)
    assert (result.stored, result.existing, result.bytes, result.complete) == (0, 10, 0, True)
    branch = PROMPT[:20] + tokens(9, 20)
    result = stock.put(branch)
    assert (result.stored, result.existing) == (5, 5)
    assert stock.good(branch) == 10 and stock.good(PROMPT) == 10
    after = sum(os.path.getsize(path) for path in stock.paths())
    assert after - before <= 5 * 4096


@pytest.mark.parametrize("durability", ["none", "batch", "always"])
def test_durability_is_what_the_store_says(quick_store: Path, durability: str) -> None:
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root))
    stock = Stock.make(root, backend=faults, durability=durability)
    before = faults.calls.get("sync", 0)
    assert stock.put(PROMPT).durable == (durability != "none")
    assert (faults.calls.get("sync", 0) > before) == (durability != "none")
    stock.close()


# plans and fetches


def test_a_plan_says_what_may_be_hit(stock: Stock) -> None:
    assert stock.put(PROMPT).complete
    plan = stock.store.check(stock.ns, PROMPT)
    assert (plan.stored_tokens, plan.hit_tokens, plan.reason) == (40, 36, "hit")
    longer = stock.store.check(stock.ns, PROMPT + [1])
    assert (longer.stored_tokens, longer.hit_tokens) == (40, 40)
    other = stock.store.check(stock.ns, PROMPT[:20] + tokens(5, 20))
    assert (other.stored_tokens, other.reason) == (20, "diverged at block 5")
    assert stock.store.check(stock.ns, tokens(7, 40)).reason == "root unknown"
    assert stock.store.fetch(stock.ns, plan, PROMPT).blocks == 9


@pytest.mark.parametrize(("tokens_", "hit"), [(261, 0), (262, 128), (1280, 1024), (1414, 1280)])
def test_a_ring_is_left_to_compute(quick_store: Path, tokens_: int, hit: int) -> None:
    """With a window of 128 and 6 tokens to take back."""
    state = StateLayout(window=128, backtrack=6, layers=1, token_bytes=16)
    stock = Stock.make(quick_store, identity={"block_tokens": 128, "state": state})
    prompt = tokens(1, tokens_)
    assert stock.put(prompt).complete
    assert stock.store.check(stock.ns, prompt).hit_tokens == hit
    stock.close()


def test_a_plan_goes_to_another_host_as_json(stock: Stock, tmp_path: Path) -> None:
    """An inference host needs the mount and the plan, no index that knows the blocks."""
    with Store.open(stock.store.path, index=str(tmp_path / "other")) as other:
        ns = other.namespace(stock.ns.nsid)
        assert stock.put(PROMPT).complete
        plan = stock.store.check(stock.ns, PROMPT)
        copy = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        assert copy == plan
        assert other.check(ns, PROMPT).stored_blocks == 0
        got = other.fetch(ns, copy, PROMPT, blocks=10)
        assert got.complete and bytes(got.data) == rows(stock)


INTO: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(960),
    "larger": lambda: bytearray(5000),
    "numpy": lambda: np.zeros(960, np.uint8),
    "numpy floats": lambda: np.zeros(240, np.float32),
    "memoryview": lambda: memoryview(bytearray(960)),
}


@pytest.mark.parametrize("form", INTO)
def test_fetch_into_a_buffer_of_the_caller(stock: Stock, form: str) -> None:
    assert stock.put(PROMPT).complete
    buffer = INTO[form]()
    plan = stock.store.check(stock.ns, PROMPT)
    got = stock.store.fetch(stock.ns, plan, PROMPT, buffer, blocks=10)
    assert bytes(memoryview(buffer).cast("B")[:960]) == bytes(got.data) == rows(stock)


def test_fetches_that_do_not_fit_are_refused(stock: Stock) -> None:
    assert stock.put(PROMPT).complete
    plan = stock.store.check(stock.ns, PROMPT)
    other = stock.store.create_namespace(small_identity(weights="other"))
    refused: list[Callable[[], Any]] = [
        lambda: stock.store.fetch(stock.ns, plan, PROMPT, bytearray(959), blocks=10),
        lambda: stock.store.fetch(stock.ns, plan, PROMPT, bytes(960), blocks=10),
        lambda: stock.store.fetch(stock.ns, plan, PROMPT, blocks=11),
        lambda: stock.store.fetch(stock.ns, plan, PROMPT, blocks=-1),
        lambda: stock.store.fetch(stock.ns, plan, PROMPT[:20], blocks=10),
        lambda: stock.store.fetch(other, plan, PROMPT),
        lambda: stock.store.fetch(stock.ns, plan, other.hasher(PROMPT)),
        lambda: stock.store.check(stock.ns, other.hasher(PROMPT)),
        lambda: stock.store.put(stock.ns, other.hasher(PROMPT), rows(stock)),
    ]
    for call in refused:
        with pytest.raises(InputError):
            call()
    assert stock.good(PROMPT) == 10


def test_tokens_of_another_prompt_do_not_get_the_blocks_of_a_plan(stock: Stock) -> None:
    """The plan is of one prompt, the tokens are of another: what they share, and no more."""
    assert stock.put(PROMPT).complete
    plan = stock.store.check(stock.ns, PROMPT)
    got = stock.store.reader().fetch(
        stock.ns, plan, stock.ns.hasher(PROMPT[:12] + tokens(3, 28)), blocks=10
    )
    assert (got.blocks, got.reason) == (3, "identity mismatch: tokens")


def test_a_hasher_lives_as_long_as_its_request(stock: Stock) -> None:
    hasher = stock.ns.hasher(PROMPT[:20])
    stock.store.put(stock.ns, hasher, payloads(hasher, 96))
    hasher.extend(PROMPT[20:])
    assert stock.store.check(stock.ns, hasher).stored_tokens == 20
    stock.store.put(stock.ns, hasher, payloads(hasher, 96))
    assert stock.store.check(stock.ns, hasher).stored_tokens == 40
    assert stock.good(PROMPT) == 10


# processes


PUT_OR_CHECK = """
import json, sys
from kvfs.store import Store
from kvfs.testing.blocks import payloads, small_identity
from kvfs.testing.stock import tokens
what, path, index = sys.argv[1:]
with Store.open(path, index=index) as store:
    ns = store.create_namespace(small_identity(block_tokens=128))
    prompt = tokens(1, 1000)
    if what == "put":
        hasher = ns.hasher(prompt)
        print(store.put(ns, hasher, payloads(hasher, ns.row_bytes)).stored)
    else:
        print(store.check(ns, prompt).stored_blocks)
"""


def test_put_in_one_process_check_in_others(store_dir: Path, tmp_path: Path) -> None:
    """Whatever the seed of Python's own hash."""
    Store.init(store_dir).close()
    base = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    base["PYTHONPATH"] = str(Path(kvfs.__file__).parents[1])
    ways: list[tuple[list[str], dict[str, str]]] = [
        ([], {}),
        ([], {"PYTHONHASHSEED": "0"}),
        ([], {"PYTHONHASHSEED": "1"}),
        ([], {"PYTHONHASHSEED": "random"}),
        (["-O"], {"PYTHONHASHSEED": "random"}),
        (["-OO"], {}),
    ]
    running = []
    for n, (options, env) in enumerate(ways):
        command = [sys.executable, *options, "-c", PUT_OR_CHECK]
        command += ["check" if n else "put", str(store_dir), str(tmp_path / f"index{n % 2}")]
        process = subprocess.Popen(command, env={**base, **env}, stdout=subprocess.PIPE, text=True)
        if not n:
            assert process.communicate()[0] == "7\n"
        else:
            running.append(process)
    assert [process.communicate()[0] for process in running] == ["7\n"] * 5


def test_check_asks_nothing_of_the_storage(quick_store: Path) -> None:
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root))
    stock = Stock.make(root, backend=faults)
    assert stock.put(PROMPT).complete
    faults.on("*", do=Fail(errno.EIO), times=None)
    before = dict(faults.calls)
    assert stock.stored(PROMPT) == 10
    assert faults.calls == before
    local = Store.open_index(root)
    assert local is not None and not isinstance(local, Store)
    with local:
        local.clock = stock.clock
        assert local.check(local.namespace(stock.ns.nsid), PROMPT).stored_blocks == 10
    faults.clear()
    stock.close()
    assert Store.open_index(quick_store / "never opened") is None


def test_counters_are_those_of_all_processes(stock: Stock) -> None:
    other = stock.another()
    assert stock.put(PROMPT).complete and other.good(PROMPT) == 10
    other.store.close()
    stats = stock.store.stats()
    assert (stats["put_blocks"], stats["fetch_blocks"]) == (10, 10)
    assert (stats["blocks"], stats["namespaces"], stats["segments"]) == (10, 1, 1)


# stores, namespaces, classes


def test_a_store_begins_in_an_empty_directory(store_dir: Path) -> None:
    store_dir.mkdir()
    (store_dir / "something").write_text("here")
    with pytest.raises(ConfigError, match="not empty"):
        Store.init(store_dir)
    assert os.listdir(store_dir) == ["something"]


@pytest.mark.parametrize("what", ["nothing", "empty", "a file", "other files"])
def test_where_no_store_is(store_dir: Path, what: str) -> None:
    if what == "a file":
        store_dir.write_text("x")
    elif what != "nothing":
        store_dir.mkdir()
    if what == "other files":
        (store_dir / "x").write_text("x")
    with pytest.raises(NoStoreError, match="no store here"):
        Store.open(store_dir)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kvfs": 2}', "store format 2"),
        ("{}", "not a kvfs store marker"),
        ("", "not a kvfs store marker"),
        ("[1]", "not a kvfs store marker"),
        ('{"kvfs": 1}', "damaged store marker"),
        ('{"kvfs": 1, "uuid": "zz"}', "damaged store marker"),
    ],
)
def test_markers_that_are_not_ours(store_dir: Path, content: str, message: str) -> None:
    store_dir.mkdir()
    (store_dir / "kvfs.json").write_text(content)
    with pytest.raises(FormatError, match=message):
        Store.open(store_dir)


def test_what_opening_meets_is_told_for_what_it_is(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage that fails, or the place of the index; and nothing is left open."""
    path, uuid = stock.store.path, stock.store.uuid.hex()
    released: list[str] = []

    class Backend(FaultyBackend):
        def release(self) -> None:
            released.append(self.root)

    faults = Backend(open_backend(path))
    monkeypatch.setattr("kvfs.store.open_backend", lambda _: faults)
    for op, what in (("load", "kvfs.json"), ("names", "ns"), ("names", "log"), ("names", "seg")):
        with (
            faults.during(op, what, do=Fail(errno.EIO)),
            faults.during("names", "log", do=lambda _: [], times=None),
            pytest.raises(BackendError, match="Input/output error"),
        ):
            Store.open(path, index=str(tmp_path / what))
    place = tmp_path / "place"
    (place / uuid / "users.lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{place}: Is a directory"):
        Store.open(path, index=str(place))
    assert released == [path] * 5
    remember(str(place), path, uuid)
    (place / uuid / "data.mdb").touch()
    with pytest.raises(ConfigError, match=f"{place}: Is a directory"):
        LocalStore.open_index(path, index=str(place))


def test_a_store_that_is_away_takes_nothing(stock: Stock) -> None:
    """Nothing is written below the mount point while the mount is away."""
    away = Path(f"{stock.store.path}.away")
    fresh = stock.another()  # whose process has not stored anything yet
    os.rename(stock.store.path, away)
    os.mkdir(stock.store.path)
    for some in (stock, fresh):
        result = some.put(PROMPT)
        assert isinstance(result.error, NoStoreError) and result.stored == 0
        with pytest.raises(NoStoreError):
            fresh.store.define_class("new", 60)
    assert os.listdir(stock.store.path) == []
    os.rmdir(stock.store.path)
    os.rename(away, stock.store.path)
    assert stock.put(PROMPT).complete


def test_another_store_in_its_place_is_noticed(stock: Stock, ram_dir: Path) -> None:
    os.rename(stock.store.path, f"{stock.store.path}.old")
    Store.init(stock.store.path).close()
    assert isinstance(stock.put(PROMPT).error, NoStoreError)
    assert not os.path.exists(f"{stock.store.path}/seg")


@pytest.mark.parametrize(
    "settings_",
    [{"extent": 5000}, {"extent": 0}, {"extent": 1 << 20, "segment_bytes": 4096},
     {"durability": "sometimes"}, {"classes": {"bad name": 1}}, {"classes": {"a": 0}},
     {"classes": {"a": 1.5}}, {"grace_seconds": -1}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work(store_dir: Path, settings_: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Store.init(store_dir, **settings_)
    assert not (store_dir / "kvfs.json").exists()


def test_namespaces_are_found_by_name(stock: Stock) -> None:
    other = stock.store.create_namespace(small_identity(weights="other"))
    assert stock.store.create_namespace(small_identity(weights="other")) is other
    for key in (other.name, other.nsid):
        assert stock.store.namespace(key).nsid == other.nsid
    with pytest.raises(InputError, match="more than one"):
        stock.store.namespace("small")
    with pytest.raises(InputError, match="no namespace"):
        stock.store.namespace("large")
    assert {ns.nsid for ns in stock.store.namespaces()} == {stock.ns.nsid, other.nsid}
    assert len(stock.again().store.namespaces()) == 2


def test_a_layout_that_cannot_be_stored_is_refused_early(stock: Stock) -> None:
    spans = tuple(Span(0, f"part{i}", i, 1) for i in range(4))
    with pytest.raises(InputError, match="at most 3 parts"):
        stock.store.create_namespace(small_identity(spans=spans, row_bytes=100))
    assert len(stock.store.namespaces()) == 1


def test_classes_are_defined_for_what_comes(stock: Stock) -> None:
    stock.store.define_class("hour", 3600)
    assert stock.store.classes()["hour"] == 3600
    assert stock.put(PROMPT, ttl_class="hour").complete
    stock.store.define_class("hour", 60)
    stock.clock.now += 3599
    assert stock.stored(PROMPT) == 10
    stock.clock.now += 1
    assert stock.stored(PROMPT) == 0
    assert stock.store.check(stock.ns, PROMPT).reason == "expired at block 0"
    for name, seconds in (("", 5), ("a/b", 5), ("x" * 33, 5), ("a", 0), ("a", 1 << 40)):
        with pytest.raises(InputError):
            stock.store.define_class(name, seconds)
    with pytest.raises(InputError, match="no TTL class"):
        stock.put(PROMPT, ttl_class="minute")


def test_a_closed_store_can_be_closed_again(stock: Stock) -> None:
    stock.store.close()
    stock.store.close()
    with Store.open(stock.store.path, clock=lambda: START) as store:
        hasher = PrefixHasher(stock.ns.identity, PROMPT)
        assert store.check(store.namespaces()[0], hasher).stored_blocks == 0
    assert first_wrong(b"", hasher, 96) is None


def test_what_create_namespace_meets(quick_store: Path) -> None:
    root = str(quick_store)
    faults = FaultyBackend(open_backend(root))
    store = Store.init(root, backend=faults)
    faults.on("put_new", do=Fail(errno.EIO))
    with pytest.raises(BackendError):
        store.create_namespace(small_identity())
    assert store.namespaces() == []
    assert store.create_namespace(small_identity()).row_bytes == 96
    store.close()


def test_segments_that_nobody_uses_are_sealed(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all namespaces that were ever stored in keep a file open: the longest unused go first."""
    monkeypatch.setattr("kvfs.segment_writer.MOST_OPEN", 3)
    prompt = tokens(1, 40)
    spaces = [stock.store.create_namespace(small_identity(salt=f"tenant {n}")) for n in range(6)]

    def put(n: int, prompt: list[int] = prompt) -> set[int]:
        """Whose segments are open behind a put into the n-th namespace."""
        hasher = spaces[n].hasher(prompt)
        data = payloads(hasher, spaces[n].row_bytes)
        assert stock.store.put(spaces[n], hasher, data).complete
        files = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
        return {n for n, ns in enumerate(spaces) for f in files if f"/{ns.name}/" in f}

    assert [put(n) for n in (0, 1, 2)][-1] == {0, 1, 2}
    assert put(0, tokens(2, 40)) == {0, 1, 2}
    assert put(3) == {0, 2, 3}
    assert put(4) == {0, 3, 4}
    assert put(5) == {3, 4, 5}
    stock.clock.now += 86400
    assert put(5, tokens(2, 40)) == {4, 5}
    assert put(0, tokens(3, 40)) == {0, 5}
    monkeypatch.setattr("kvfs.segment_writer.IDLE_SECONDS", -1.0)
    assert put(0, tokens(4, 40)) == {0}
    for ns in spaces:
        plan = stock.store.check(ns, prompt)
        assert stock.store.fetch(ns, plan, prompt, blocks=10).blocks == 10
