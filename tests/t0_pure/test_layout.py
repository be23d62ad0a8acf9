"""Identities: one description, one fingerprint, everywhere; two descriptions, two namespaces.

The encoding is decoded here a second time, from the tables of docs/identity.md alone, and the
examples of that page are compared with what the code computes.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import presets
from kvfs.chain import HASHES, PrefixHasher
from kvfs.errors import InputError
from kvfs.keys import KeyChain
from kvfs.layout import Identity, Partition, Span, StateLayout

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "identity.md").read_text(encoding="utf-8")

BASE = Identity(
    model="model",
    weights="weights",
    tokenizer="tokenizer",
    spans=(Span(0, "kv", 0, 64), Span(2, "kv", 70, 64)),
    row_bytes=160,
    record_format="raw",
    partition=Partition(0, 2, 0, 2, 0, 2),
    state=StateLayout(window=128, backtrack=6, layers=1, token_bytes=16),
)


# every field counts


def init_fields(item: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(item) if field.init]


def other_values(name: str, value: Any) -> Iterator[Any]:
    """Values that differ from `value` in one place, for a field of any of the classes."""
    if name == "hash":
        yield from (known for known in (*HASHES, "external") if known != value)
    elif isinstance(value, str):
        yield from (value + "x", value + "\0", value.upper() or "X")
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, tuple):
        yield value[:-1]
        yield value[::-1]
        for at, span in enumerate(value):
            yield from ((*value[:at], changed, *value[at + 1 :]) for changed in one_change(span))
    elif dataclasses.is_dataclass(value):
        yield from one_change(value)
        if isinstance(value, StateLayout):
            yield None
    else:
        raise AssertionError(f"a field of a type that this test does not know: {name}")


def one_change(item: Any) -> Iterator[Any]:
    for name in init_fields(item):
        for value in other_values(name, getattr(item, name)):
            yield dataclasses.replace(item, **{name: value})


def test_any_single_change_is_another_namespace() -> None:
    all_of_them = [BASE, *one_change(BASE)]
    changed = {
        name
        for item in all_of_them
        for name in init_fields(BASE)
        if getattr(item, name) != getattr(BASE, name)
    }
    assert changed == set(init_fields(BASE))
    for key in (Identity.canonical, lambda i: i.fingerprint, lambda i: i.nsid, lambda i: i.name):
        assert len({key(item) for item in all_of_them}) == len(all_of_them)


def test_each_partition_and_state_field_is_seen() -> None:
    assert len(list(one_change(BASE.partition))) == 6
    assert BASE.state is not None and len(list(one_change(BASE.state))) == 4


# property tests

texts = st.text(st.sampled_from("ab\0\x01\x02kvé日/-.: "), max_size=4) | st.text(max_size=12)
names = texts.filter(bool)
counts = st.integers(1, 5) | st.integers(1, 2**63 - 1)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    sizes = [draw(st.integers(1, 3) | counts) for _ in range(3)]
    ranks = [draw(st.integers(0, size - 1)) for size in sizes]
    tp, pp, cp = zip(ranks, sizes, strict=True)
    return Partition(*tp, *pp, *cp)


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[Span, ...], int]:
    keys = draw(st.lists(st.tuples(st.integers(0, 3), names), min_size=1, max_size=4, unique=True))
    spans, at = [], 0
    for layer, part in keys:
        at += draw(st.integers(0, 2))
        spans.append(Span(layer, part, at, draw(st.integers(1, 300))))
        at = spans[-1].end
    return tuple(draw(st.permutations(spans))), at + draw(st.integers(0, 2))


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    spans, row_bytes = draw(rows())
    return Identity(
        model=draw(names),
        weights=draw(names),
        tokenizer=draw(names),
        spans=spans,
        row_bytes=row_bytes,
        record_format=draw(names),
        block_tokens=draw(counts),
        partition=draw(partitions()),
        adapter=draw(texts),
        hash=draw(st.sampled_from((*HASHES, "external"))),
        salt=draw(texts),
        state=draw(st.none() | st.builds(StateLayout, counts, st.integers(0, 9), counts, counts)),
    )


def decode(data: bytes) -> Identity:
    """The encoding read back by the tables of docs/identity.md; raises if a byte is left over."""
    head, data = data[:16], data[16:]
    assert head == b"kvfs-identity\0" + struct.pack("<H", 1)
    values = []
    for number in range(1, 13):
        value, data = frame(data, number)
        values.append(value)
    assert not data
    model, weights, tokenizer, spans, row, record, tokens, share, adapter, hash, salt, state = (
        values
    )
    return Identity(
        model=model.decode(),
        weights=weights.decode(),
        tokenizer=tokenizer.decode(),
        spans=tuple(decode_spans(spans)),
        row_bytes=struct.unpack("<Q", row)[0],
        record_format=record.decode(),
        block_tokens=struct.unpack("<Q", tokens)[0],
        partition=Partition(*struct.unpack("<6Q", share)),
        adapter=adapter.decode(),
        hash=hash.decode(),
        salt=salt.decode(),
        state=StateLayout(*struct.unpack("<4Q", state)) if state else None,
    )


def frame(data: bytes, expected: int) -> tuple[bytes, bytes]:
    tag, length = struct.unpack_from("<HI", data)
    assert tag == expected and len(data) >= 6 + length
    return data[6 : 6 + length], data[6 + length :]


def decode_spans(data: bytes) -> Iterator[Span]:
    while data:
        value, data = frame(data, 32)
        layer, offset, length = struct.unpack_from("<3Q", value)
        yield Span(layer, value[24:].decode(), offset, length)


@given(identities())
def test_the_encoding_can_be_read_back(identity: Identity) -> None:
    """So no two identities have one encoding, whatever their strings hold."""
    assert decode(identity.canonical()) == identity


@given(identities(), identities())
def test_encodings_are_prefix_free(one: Identity, two: Identity) -> None:
    """So root and tokens, hashed one behind the other, cannot be cut in two ways."""
    if one != two:
        a, b = one.canonical(), two.canonical()
        assert not a.startswith(b) and not b.startswith(a)
        assert one.fingerprint != two.fingerprint


def test_a_byte_that_moves_to_the_next_field_is_seen() -> None:
    left = dataclasses.replace(BASE, model="ab", weights="c")
    right = dataclasses.replace(BASE, model="a", weights="bc")
    assert left.canonical() != right.canonical()


@given(identities())
def test_json_round_trip(identity: Identity) -> None:
    text = json.dumps(identity.to_json())
    again = Identity.from_json(json.loads(text))
    assert again == identity
    assert again.canonical() == identity.canonical()


@given(identities())
def test_copies_are_equal(identity: Identity) -> None:
    fingerprint = identity.fingerprint
    for same in (pickle.loads(pickle.dumps(identity)), copy.deepcopy(identity)):
        assert same == identity and hash(same) == hash(identity)
        assert same.fingerprint == fingerprint


def test_replace_forgets_the_cached_fingerprint() -> None:
    assert BASE.fingerprint
    assert dataclasses.replace(BASE, salt="s").fingerprint != BASE.fingerprint


@given(identities(), st.integers(0, 4000))
def test_hit_cap(identity: Identity, tokens: int) -> None:
    keep = identity.state.ring if identity.state else 1
    cap = identity.hit_cap(tokens)
    assert cap % identity.block_tokens == 0
    assert cap == 0 or cap <= tokens - keep
    assert cap + identity.block_tokens > tokens - keep


def test_hit_cap_for_all_short_prompts() -> None:
    for tokens in range(1, 4001):
        assert BASE.hit_cap(tokens) == max(0, (tokens - 134) // 128 * 128)


@pytest.mark.parametrize("tokens", [-1, 1.0, True, "1", None])
def test_hit_cap_refuses_what_is_no_length(tokens: Any) -> None:
    with pytest.raises(InputError):
        BASE.hit_cap(tokens)


# names, parts


@pytest.mark.parametrize(
    "model, stem",
    [
        ("llama", "llama"),
        ("org/Model v1", "org-Model-v1"),
        ("../../etc", "etc"),
        (".hidden", "hidden"),
        ("日本", "model"),
        ("a\nb\0c", "a-b-c"),
        ("x" * 500, "x" * 80),
    ],
)
def test_name_is_one_safe_path_component(model: str, stem: str) -> None:
    identity = dataclasses.replace(BASE, model=model)
    assert identity.name == f"{stem.strip('-') or 'model'}-{identity.fingerprint.hex()[:12]}"
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", identity.name)
    assert len(identity.name) < 100


def test_nsid_is_the_start_of_the_fingerprint() -> None:
    assert len(BASE.fingerprint) == 32
    assert BASE.nsid == BASE.fingerprint[:16]


def test_parts_put_the_largest_first() -> None:
    spans = (Span(0, "a", 0, 1), Span(0, "b", 1, 2), Span(0, "c", 3, 5), Span(1, "c", 8, 1))
    assert dataclasses.replace(BASE, spans=spans).parts == ("c", "a", "b")
    assert BASE.parts == ("kv",)


# refusals


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"weights": ""},
        {"tokenizer": ""},
        {"record_format": ""},
        {"weights": None},
        {"weights": b"bytes"},
        {"salt": "\ud800"},
        {"model": "x" * 70_000},
        {"row_bytes": 0},
        {"row_bytes": 133},
        {"row_bytes": 160.0},
        {"row_bytes": 1 << 31},
        {"block_tokens": 0},
        {"block_tokens": True},
        {"block_tokens": 1 << 63},
        {"hash": "sha1"},
        {"hash": ""},
        {"hash": None},
        {"hash": ["xxh3-128"]},
        {"partition": None},
        {"state": (128, 6, 1, 16)},
        {"spans": ()},
        {"spans": [Span(0, "kv", 0, 64)]},
        {"spans": ((0, "kv", 0, 64),)},
        {"spans": (Span(0, "kv", 0, 64), Span(1, "kv", 63, 64))},
        {"spans": (Span(0, "kv", 0, 64), Span(0, "kv", 64, 64))},
        {"spans": (Span(0, "kv", 100, 64),)},
    ],
    ids=repr,
)
def test_an_identity_that_is_not_consistent_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        dataclasses.replace(BASE, **change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Span(-1, "kv", 0, 1),
        lambda: Span(0, "", 0, 1),
        lambda: Span(0, "kv", -1, 1),
        lambda: Span(0, "kv", 0, 0),
        lambda: StateLayout(0, 6, 1, 1),
        lambda: StateLayout(128, -1, 1, 1),
        lambda: StateLayout(128, 6, 0, 1),
        lambda: StateLayout(128, 6, 1, 0),
        lambda: Partition(tp_rank=1),
        lambda: Partition(pp_rank=-1, pp_size=2),
        lambda: Partition(cp_size=0),
        lambda: Partition(tp_size=2.0),  # type: ignore[arg-type]
    ],
)
def test_parts_of_an_identity_are_checked(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def _without(key: str) -> Any:
    def change(data: dict[str, Any]) -> None:
        del data[key]

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(_without(key) for key in BASE.to_json()),
        lambda data: data.update(extra=1),
        lambda data: data.update(version=2),
        lambda data: data.update(version="1"),
        lambda data: data.update(version=True),
        lambda data: data.update(spans={}),
        lambda data: data.update(spans=[[0, "kv", 0, 64]]),
        lambda data: data["spans"][0].pop("part"),
        lambda data: data["spans"][0].update(dtype="bf16"),
        lambda data: data["partition"].pop("cp_size"),
        lambda data: data["partition"].update(dp_rank=0),
        lambda data: data["state"].pop("window"),
        lambda data: data.update(state=False),
        lambda data: data.update(row_bytes=160.0),
        lambda data: data.update(partition=None),
    ],
)
def test_json_is_read_strictly(change: Any) -> None:
    data = BASE.to_json()
    change(data)
    with pytest.raises(InputError):
        Identity.from_json(data)


@pytest.mark.parametrize("data", [None, [], "{}", 1])
def test_json_that_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(InputError):
        Identity.from_json(data)


# secrets


def test_the_salt_is_not_shown() -> None:
    identity = dataclasses.replace(BASE, salt="open sesame")
    shown = identity.redacted()
    assert "open sesame" not in json.dumps(shown)
    assert "open sesame" not in repr(identity)
    assert shown["salt_digest"] != dataclasses.replace(BASE, salt="other").redacted()["salt_digest"]
    assert BASE.redacted()["salt_digest"] == ""
    with pytest.raises(InputError):
        Identity.from_json(shown)


# the documentation's vectors


def fenced(label: str) -> str:
    """The fenced block of docs/identity.md behind the comment <!-- label -->."""
    found = re.search(rf"<!-- {label} -->\n+```\w*\n(.*?)\n```", DOCS, re.DOTALL)
    assert found, f"docs/identity.md has no block {label}"
    return found[1]


def vectors(label: str) -> dict[str, str]:
    pairs = (line.split(None, 1) for line in fenced(label).splitlines() if line.strip())
    return {key: value.strip() for key, value in pairs}


def flash(hash: str = "xxh3-128") -> Identity:
    return presets.get(
        "deepseek-v4.1-flash", weights="demo-weights", tokenizer="demo-tokenizer", hash=hash
    )


def computed(hash: str) -> dict[str, str]:
    """What the vectors' blocks of the documentation hold, from this process."""
    identity = flash(hash)
    hasher = PrefixHasher(identity, list(range(384)))
    digests = bytes(hasher.hashes())
    return {
        "canonical_length": str(len(identity.canonical())),
        "canonical_sha256": hashlib.sha256(identity.canonical()).hexdigest(),
        "fingerprint": identity.fingerprint.hex(),
        "nsid": identity.nsid.hex(),
        "name": identity.name,
        "root": hasher.digest(0).hex(),
        **{f"h[{i}]": digests[16 * i : 16 * i + 16].hex() for i in range(3)},
    }


@pytest.mark.parametrize("hash", HASHES)
def test_documented_vectors(hash: str) -> None:
    assert vectors(f"vectors {hash}") == computed(hash)


def test_documented_keys() -> None:
    identity = flash("external")
    chain = KeyChain(identity, ["page-1"])
    assert vectors("vectors external") == {
        "fingerprint": identity.fingerprint.hex(),
        "root": chain.digest(0).hex(),
        "h": chain.digest(1).hex(),
        "lineage": chain.lineages(1).hex(),
    }


def test_documented_bytes() -> None:
    tiny = presets.get("tiny", weights="demo-weights", tokenizer="demo-tokenizer")
    lines = fenced("bytes").splitlines()
    assert bytes.fromhex("".join(line.split("|")[0] for line in lines)) == tiny.canonical()


def test_documented_json() -> None:
    tiny = presets.get("tiny", weights="demo-weights", tokenizer="demo-tokenizer")
    assert json.loads(fenced("json")) == tiny.to_json()


def test_documented_boundaries() -> None:
    """Rows `| prompt | cap with state | cap without |`."""
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", DOCS, re.MULTILINE)
    table = [[int(cell.replace(",", "")) for cell in row] for row in rows]
    named = {1, 127, 128, 133, 134, 261, 262, 263, 389, 390, 1280, 131072}
    assert named <= {row[0] for row in table}
    without = dataclasses.replace(BASE, state=None)
    for tokens, cap, cap_without in table:
        assert (BASE.hit_cap(tokens), without.hit_cap(tokens)) == (cap, cap_without)


# the same in every process

IN_A_PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from kvfs import presets
from kvfs.chain import PrefixHasher
out = []
for hash in sys.argv[2:]:
    identity = presets.get(
        "deepseek-v4.1-flash", weights="demo-weights", tokenizer="demo-tokenizer", hash=hash
    )
    hasher = PrefixHasher(identity, list(range(1000)))
    out += [identity.fingerprint.hex(), identity.name, bytes(hasher.hashes()).hex()]
print(json.dumps(out))
"""


def other_pythons() -> list[str]:
    """Other versions of Python on this host that have the hash packages."""
    found = []
    for minor in range(11, 16):
        python = f"python3.{minor}"
        probe = [python, "-c", "import sys, xxhash, blake3; assert sys.version_info >= (3, 11)"]
        try:
            done = subprocess.run(probe, capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            found.append(python)
    return found


def test_the_same_in_every_process() -> None:
    runs: list[tuple[list[str], dict[str, str]]] = [
        ([sys.executable], {}),
        ([sys.executable], {"PYTHONHASHSEED": "0"}),
        ([sys.executable], {"PYTHONHASHSEED": "1"}),
        ([sys.executable], {"PYTHONHASHSEED": "random"}),
        ([sys.executable, "-O"], {"LC_ALL": "C"}),
        ([sys.executable, "-OO", "-X", "utf8=0"], {"PYTHONHASHSEED": "4294967295"}),
        *(([python], {}) for python in other_pythons()),
    ]
    results = set()
    for command, extra in runs:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"} | extra
        command = [*command, "-c", IN_A_PROCESS, str(ROOT), *HASHES]
        results.add(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
    (result,) = results
    first = json.loads(result)[:3]
    documented = vectors("vectors xxh3-128")
    assert first[:2] == [documented["fingerprint"], documented["name"]]
    assert first[2].startswith("".join(documented[f"h[{i}]"] for i in range(3)))


def test_importing_the_layout_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvfs.layout\n"
        "heavy = {'numpy', 'hashlib', 'click', 'lmdb', 'torch', 'trio', 'pyfuse3', 'json'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"[]\n"
