"""What a namespace is: the identity of a KV cache and where its parts lie in a block row.

Two caches may exchange blocks only if everything that shapes the bytes is equal: weights,
tokenizer, layer layout, record format, partition, adapter. An `Identity` holds all of it, has one
canonical encoding (documented byte by byte in docs/identity.md) and takes its fingerprint from that
encoding alone, so that it is the same on every host, in every process and under every Python.

This module does no I/O, reads no environment and must stay light: no numpy, and hashlib only when a
fingerprint is asked for. All classes are immutable and may be shared between threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.chain import HASHES
from kvfs.errors import InputError

ENCODING_VERSION = 1
EXTERNAL_HASH = "external"
MAX_INT = (1 << 63) - 1
MAX_STRING_BYTES = 1 << 16
MAX_ROW_BYTES = 1 << 30

_MAGIC = b"kvfs-identity\x00" + ENCODING_VERSION.to_bytes(2, "little")
_PERSON = b"kvfs-namespace"
_SALT_PERSON = b"kvfs-salt"
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_NAME_LIMIT = 80

# Tags of the canonical encoding. A number, once published, never gets another meaning.
_TAGS = {
    "model": 1,
    "weights": 2,
    "tokenizer": 3,
    "spans": 4,
    "row_bytes": 5,
    "record_format": 6,
    "block_tokens": 7,
    "partition": 8,
    "adapter": 9,
    "hash": 10,
    "salt": 11,
    "state": 12,
}
_SPAN_TAG = 32


def _check_int(what: str, value: object, low: int, high: int = MAX_INT) -> None:
    """Refuse what is not a plain int of [low, high]; a bool or a float is a mistake."""
    if type(value) is not int:
        raise InputError(f"{what} must be an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise InputError(f"{what} is {value}, outside {low}..{high}")


def _check_str(what: str, value: object, *, empty: bool = False) -> None:
    """Refuse what has no unambiguous UTF-8 form, or is empty where something must be named."""
    if type(value) is not str:
        raise InputError(f"{what} must be a string, not {type(value).__name__}")
    if not value and not empty:
        raise InputError(f"{what} must not be empty")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InputError(f"{what} holds a lone surrogate and has no UTF-8 form") from None
    if size > MAX_STRING_BYTES:
        raise InputError(f"{what} is {size} bytes long, the limit is {MAX_STRING_BYTES}")


@dataclass(frozen=True, slots=True)
class Span:
    """One part of one layer in the block row: `length` bytes at `offset`.

    `part` names what the bytes are ("kv", "k", "v", "index", ...). `layer` is the number of the
    layer in the whole model, also where a pipeline rank holds only some of them.
    """

    layer: int
    part: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_int("span layer", self.layer, 0)
        _check_str("span part", self.part)
        _check_int("span offset", self.offset, 0)
        _check_int("span length", self.length, 1)

    @property
    def end(self) -> int:
        """First byte of the row behind this span."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Sliding-window state of a sequence: a ring of tokens, for each of `layers` layers.

    `window` tokens are what attention reads, `backtrack` tokens are the room for drafted tokens
    that may be taken back. `token_bytes` is one token of one layer.
    """

    window: int
    backtrack: int
    layers: int
    token_bytes: int

    def __post_init__(self) -> None:
        _check_int("state window", self.window, 1)
        _check_int("state backtrack", self.backtrack, 0)
        _check_int("state layers", self.layers, 1)
        _check_int("state token_bytes", self.token_bytes, 1)

    @property
    def ring(self) -> int:
        """Tokens in the ring: window plus backtrack."""
        return self.window + self.backtrack

    @property
    def slot_bytes(self) -> int:
        """Bytes of one stored state."""
        return self.layers * self.ring * self.token_bytes


@dataclass(frozen=True, slots=True)
class Partition:
    """Which share of the model this KV is: tensor, pipeline and context parallel rank and size."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp"):
            size = getattr(self, f"{axis}_size")
            _check_int(f"{axis}_size", size, 1)
            _check_int(f"{axis}_rank", getattr(self, f"{axis}_rank"), 0, size - 1)


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that decides whether two KV blocks of the same tokens are interchangeable.

    model          a name for people; it is part of the identity but never enough of one
    weights        revision or digest of the weights
    tokenizer      digest of the tokenizer
    spans          where each part of each layer lies in the block row, in the row's order
    row_bytes      bytes of a block row, padding included
    record_format  dtype and packing of the bytes, with what depends on the GPU generation
    block_tokens   tokens of one block
    partition      the rank whose share of the model this is
    adapter        LoRA or other adapter, "" for none
    hash           chain hash, one of kvfs.chain.HASHES, or "external" for an engine's own page keys
    salt           tenant salt, "" for none
    state          sliding-window state, None for a model without one

    Raises InputError for a description that is not consistent in itself.
    """

    model: str
    weights: str
    tokenizer: str
    spans: tuple[Span, ...]
    row_bytes: int
    record_format: str
    block_tokens: int = 128
    partition: Partition = Partition()
    adapter: str = ""
    hash: str = "xxh3-128"
    salt: str = field(default="", repr=False)  # a secret: kept out of logs and tracebacks
    state: StateLayout | None = None
    # Both are functions of the fields above. Two threads may compute one twice, with one result.
    _canonical: bytes = field(init=False, repr=False, compare=False, default=b"")
    _fingerprint: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        for name in ("model", "weights", "tokenizer", "record_format", "hash"):
            _check_str(name, getattr(self, name))
        for name in ("adapter", "salt"):
            _check_str(name, getattr(self, name), empty=True)
        _check_int("row_bytes", self.row_bytes, 1, MAX_ROW_BYTES)
        _check_int("block_tokens", self.block_tokens, 1)
        if type(self.partition) is not Partition:
            raise InputError("partition must be a Partition")
        if self.state is not None and type(self.state) is not StateLayout:
            raise InputError("state must be a StateLayout or None")
        if self.hash not in HASHES and self.hash != EXTERNAL_HASH:
            known = ", ".join((*HASHES, EXTERNAL_HASH))
            raise InputError(f"unknown hash {self.hash!r}; known are {known}")
        _check_spans(self.spans, self.row_bytes)

    def canonical(self) -> bytes:
        """The published encoding of all fields: self-delimiting, and the root of every chain."""
        if not self._canonical:
            object.__setattr__(self, "_canonical", _encode(self))
        return self._canonical

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: blake2b of the canonical encoding."""
        if not self._fingerprint:
            try:  # hashlib has it from there, and itself loads OpenSSL: 2 ms of a `kvctl check`
                from _blake2 import blake2b
            except ImportError:
                from hashlib import blake2b

            digest = blake2b(self.canonical(), digest_size=32, person=_PERSON).digest()
            object.__setattr__(self, "_fingerprint", digest)
        return self._fingerprint

    @property
    def nsid(self) -> bytes:
        """16 bytes: the start of the fingerprint, the namespace's key in the index."""
        return self.fingerprint[:16]

    @property
    def name(self) -> str:
        """A file name: the model in safe characters, and 12 hex digits of the fingerprint."""
        return f"{_safe_name(self.model)}-{self.fingerprint[:6].hex()}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts: the one with most bytes first, the others as listed in `spans`."""
        sizes: dict[str, int] = {}
        for span in self.spans:
            sizes[span.part] = sizes.get(span.part, 0) + span.length
        largest = max(sizes, key=lambda part: sizes[part])
        return (largest, *(part for part in sizes if part != largest))

    def hit_cap(self, tokens: int) -> int:
        """Most tokens of a prompt of `tokens` tokens that a hit may cover, a multiple of the block.

        With a sliding-window state a whole ring must be left to compute, else a single token.
        """
        _check_int("tokens", tokens, 0)
        keep = self.state.ring if self.state is not None else 1
        return max(0, tokens - keep) // self.block_tokens * self.block_tokens

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values, the tenant salt included."""
        out: dict[str, Any] = {"version": ENCODING_VERSION}
        for name in _TAGS:
            out[name] = getattr(self, name)
        out["spans"] = [_as_dict(span) for span in self.spans]
        out["partition"] = _as_dict(self.partition)
        out["state"] = None if self.state is None else _as_dict(self.state)
        return out

    def redacted(self) -> dict[str, Any]:
        """Like `to_json`, for display: `salt_digest` in place of `salt`, "" where there is none.

        `from_json` refuses the result, as it is not the whole identity.
        """
        out = self.to_json()
        out["salt_digest"] = _salt_digest(out.pop("salt"))
        return out

    @classmethod
    def from_json(cls, data: object) -> Identity:
        """The inverse of `to_json`. Raises InputError for unknown, missing or ill-typed fields."""
        values = _take(data, "identity", ("version", *_TAGS))
        version = values.pop("version")
        if type(version) is not int or version != ENCODING_VERSION:
            raise InputError(f"identity version {version!r} is not known, only {ENCODING_VERSION}")
        spans = values["spans"]
        if not isinstance(spans, list):
            raise InputError("identity spans must be a list")
        values["spans"] = tuple(Span(**_take(span, "span", Span.__slots__)) for span in spans)
        values["partition"] = Partition(
            **_take(values["partition"], "partition", Partition.__slots__)
        )
        if values["state"] is not None:
            values["state"] = StateLayout(**_take(values["state"], "state", StateLayout.__slots__))
        return cls(**values)


def _check_spans(spans: object, row_bytes: int) -> None:
    """Refuse spans that leave the row, overlap, or name one part of a layer twice."""
    if type(spans) is not tuple or not all(type(span) is Span for span in spans):
        raise InputError("spans must be a tuple of Span")
    if not spans:
        raise InputError("a block row needs at least one span")
    if len({(span.layer, span.part) for span in spans}) != len(spans):
        raise InputError("a part of a layer is described twice")
    end = 0
    for span in sorted(spans, key=lambda span: span.offset):
        if span.offset < end:
            raise InputError(f"{span} overlaps the span before it")
        end = span.end
    if end > row_bytes:
        raise InputError(f"spans end at byte {end}, behind the row of {row_bytes} bytes")


def _encode(identity: Identity) -> bytes:
    """Magic and version, then every field once, in the order of the tags."""
    out = [_MAGIC]
    for name, tag in _TAGS.items():
        value = getattr(identity, name)
        if name == "spans":
            out.append(_framed(tag, b"".join(_encode_span(span) for span in value)))
        elif name == "partition":
            out.append(_framed(tag, _u64s(_as_dict(value).values())))
        elif name == "state":
            out.append(_framed(tag, b"" if value is None else _u64s(_as_dict(value).values())))
        else:
            out.append(_framed(tag, _u64s((value,)) if type(value) is int else value.encode()))
    return b"".join(out)


def _encode_span(span: Span) -> bytes:
    """Three integers of fixed width, then the part's name up to the end of the frame."""
    numbers = _u64s((span.layer, span.offset, span.length))
    return _framed(_SPAN_TAG, numbers + span.part.encode())


def _framed(tag: int, value: bytes) -> bytes:
    return tag.to_bytes(2, "little") + len(value).to_bytes(4, "little") + value


def _u64s(values: Any) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _as_dict(item: Span | StateLayout | Partition) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__slots__}


def _take(data: object, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    """A copy of the mapping `data`, which must have exactly the keys `names`."""
    if not isinstance(data, Mapping):
        raise InputError(f"{what} must be an object, not {type(data).__name__}")
    unknown = sorted(str(key) for key in data if key not in names)
    missing = [name for name in names if name not in data]
    if unknown:
        raise InputError(f"{what} has unknown fields: {', '.join(unknown)}")
    if missing:
        raise InputError(f"{what} lacks fields: {', '.join(missing)}")
    return dict(data)


def _safe_name(model: str) -> str:
    """The model in characters that need no quoting in a shell, never empty or hidden."""
    text = "".join(char if char in _NAME_CHARS else "-" for char in model)
    return text[:_NAME_LIMIT].strip(".-") or "model"


def _salt_digest(salt: str) -> str:
    if not salt:
        return ""
    from hashlib import blake2b

    return "blake2b:" + blake2b(salt.encode(), digest_size=8, person=_SALT_PERSON).hexdigest()
