"""A store's own settings: `kvfs.json` at its top, the sign that this directory is a store.

Also the sign that its file system is mounted: a writer that does not find it writes nothing, so
that data never lands on the disk below an absent mount. Written once by `init`; read at every full
open, never by `check`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import BackendError, FormatError, InputError, NoStoreError
from kvfs.record import PAGE

MARKER = "kvfs.json"
DURABILITY = ("none", "batch", "always")
FORMAT = 1
_LIMIT = 1 << 20
EXTENT = 64 << 20
MIN_EXTENT, MAX_EXTENT = PAGE, 1 << 30
DEFAULT_CLASSES = {"agent": 3 * 86400, "chatbot": 7 * 86400}
_CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}\Z")
MAX_TTL_SECONDS = 100 * 365 * 86400
RENEW_CAP_SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The content of `kvfs.json`.

    extent: bytes no record crosses: the chunk of the file system where it has one (3FS), else
    large, since the gap at its end stops the kernel's readahead (cold, 116 MB: 87 ms with gaps
    every 4 MiB, 46 ms without); segment_bytes: size at which a segment is sealed; durability:
    "none", "batch" or "always"; classes: TTL class -> seconds, as the store began (later
    definitions are in the journals).
    """

    uuid: bytes
    extent: int = EXTENT
    segment_bytes: int = 256 << 20
    durability: str = "batch"
    classes: dict[str, int] = field(default_factory=lambda: dict(DEFAULT_CLASSES))
    grace_seconds: float = 60.0
    """How long a removed segment's file stays for those who still read it: above any fetch."""
    renew_cap_seconds: float = RENEW_CAP_SECONDS
    """Hits alone never let a block live longer than this after it was written."""
    own_extents: bool = False
    """Each run begins an extent of its own, as do header and footer: for storage (3FS) whose
    readers wait where something is being written into the same chunk."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that cannot work."""
        if self.extent % PAGE or not MIN_EXTENT <= self.extent <= MAX_EXTENT:
            raise InputError(f"extent is {self.extent}; it must be a multiple of 4096 up to 1 GiB")
        if self.segment_bytes < self.extent:
            raise InputError(
                f"segment_bytes is {self.segment_bytes}, less than an extent of {self.extent}"
            )
        if self.durability not in DURABILITY:
            raise InputError(f"durability is {self.durability!r}; known are {DURABILITY}")
        if self.grace_seconds < 0:
            raise InputError("grace_seconds must not be negative")
        if self.renew_cap_seconds < 0:
            raise InputError("renew_cap_seconds must not be negative")
        for name, seconds in self.classes.items():
            check_class(name, seconds)

    def encode(self) -> bytes:
        data = {
            "kvfs": FORMAT, "uuid": self.uuid.hex(), "extent": self.extent,
            "segment_bytes": self.segment_bytes, "durability": self.durability,
            "classes": self.classes, "grace_seconds": self.grace_seconds,
            "renew_cap_seconds": self.renew_cap_seconds, "own_extents": self.own_extents,
        }  # fmt: skip
        return (json.dumps(data, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> StoreConfig:
        """Raises FormatError for a file of another version or shape."""
        try:
            fields: dict[str, Any] = json.loads(data)
            version = fields.pop("kvfs")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise FormatError(f"{where}: not a kvfs store marker ({e!r})") from e
        if version != FORMAT:
            raise FormatError(f"{where}: store format {version}; this kvfs reads {FORMAT}")
        unknown = fields.keys() - set(cls.__dataclass_fields__)
        if unknown:
            raise FormatError(f"{where}: settings of a newer kvfs: {', '.join(sorted(unknown))}")
        try:
            return cls(bytes.fromhex(fields.pop("uuid")), **fields)
        except (TypeError, ValueError, KeyError, InputError) as e:
            raise FormatError(f"{where}: damaged store marker: {e}") from e


def check_class(name: str, seconds: int) -> None:
    """Raises InputError if this cannot be a TTL class."""
    if not _CLASS_NAME.match(name):
        raise InputError(f"TTL class {name!r}: letters, digits, '.', '_', '-', at most 32")
    if type(seconds) is not int or not 1 <= seconds <= MAX_TTL_SECONDS:
        raise InputError(f"TTL class {name}: {seconds} seconds is outside 1 to {MAX_TTL_SECONDS}")


def load_config(backend: Backend) -> StoreConfig:
    """Reads the marker. Raises NoStoreError, FormatError, BackendError."""
    try:
        data = backend.load(MARKER, _LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise NoStoreError(
            f"{backend.root}: no store here: {MARKER} is missing. Is the file system mounted? "
            "`kvctl init` makes a new store"
        ) from None
    except OSError as e:
        raise BackendError(f"{backend.root}/{MARKER}: {e.strerror}") from e
    return StoreConfig.decode(data, f"{backend.root}/{MARKER}")


def check_alive(backend: Backend, uuid: bytes) -> None:
    """Raises NoStoreError or BackendError unless the store's marker is still in its place."""
    found = load_config(backend).uuid
    if found != uuid:
        raise NoStoreError(
            f"{backend.root}: another store is here now: {found.hex()} instead of {uuid.hex()}"
        )
