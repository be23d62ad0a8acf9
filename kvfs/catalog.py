"""What a store holds by name: namespaces and TTL classes, as the local index knows them.

Reads the index; `seed` also reads the namespace files of the store, for an index that is new or
whose journals are lost. Publishing a new one is the store's.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvfs import forking
from kvfs.errors import IndexFault, InputError
from kvfs.index import Index
from kvfs.layout import Identity
from kvfs.namespace import Namespace

if TYPE_CHECKING:
    from kvfs.backend import Backend
    from kvfs.config import StoreConfig
    from kvfs.frames import Entry
    from kvfs.index.apply import Applier

_NAMESPACE_LIMIT = 64 << 20
HANDLES = 1024
"""Namespaces that are kept ready though nobody may hold them: there is one for each salt."""
DEFAULT_CLASS = "chatbot"
"""TTL class of puts that name none, where the store has it; else that which keeps longest."""


class TtlClass(NamedTuple):
    """A TTL class and the time it gives."""

    name: str
    seconds: int


def namespace_path(name: str) -> str:
    return f"ns/{name}/namespace.json"


class Catalog:
    """Namespaces and TTL classes of one open store. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = threading.Lock()
        forking.register(self)
        self._recent: dict[bytes, Namespace] = {}
        """By id, the one asked for last behind the others."""
        self._held: weakref.WeakSet[Namespace] = weakref.WeakSet()
        """All that anybody holds."""
        index.on_revival.append(self._renumber)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def seed(self, backend: Backend, config: StoreConfig) -> list[str]:
        """Brings in classes and namespaces as the store's files have them; the journals may know
        more. Returns the namespace files that cannot be read."""
        from kvfs.frames import ClassEntry

        if not self.index.classes():
            _apply(self.index, [ClassEntry(n, s, 0) for n, s in config.classes.items()])
        return learn_namespaces(backend, self.index)

    def _texts(self) -> list[tuple[int, str]]:
        return list(self.index.namespaces().values())

    def known(self, identity: Identity) -> bool:
        """It is there, and not removed."""
        found = self.index.namespace(identity.nsid)
        return found is not None and found.listed

    def get(self, identity: Identity, default_class: str | None = None) -> Namespace:
        """The namespace of an identity that is known. default_class: see Store.create_namespace.

        Raises IndexFault if the index does not know it.
        """
        with self._lock:
            ns = self._recent.pop(identity.nsid, None)
            if ns is None or (default_class and default_class != ns.default_class):
                found = self.index.namespace(identity.nsid)
                if found is None:
                    raise IndexFault(f"{self.index.path}: namespace {identity.name} is not in it")
                ns = Namespace(identity, found.number, default_class or self._default_class())
                self._held.add(ns)
            self._recent[identity.nsid] = ns
            if len(self._recent) > HANDLES:
                del self._recent[next(iter(self._recent))]
            return ns

    def _renumber(self) -> None:
        """Another process may have numbered the namespaces of an index that was made anew."""
        with self._lock:
            for ns in self._held:
                found = self.index.namespace(ns.nsid)
                if found is not None:
                    ns.number = found.number

    def _default_class(self) -> str:
        classes = self.classes()
        if DEFAULT_CLASS in classes:
            return DEFAULT_CLASS
        return max(classes, key=lambda name: classes[name], default="")

    def all(self) -> list[Namespace]:
        """All namespaces, by name; not those that only a newer version can read."""
        found = (self.get(i) for _, text in self._texts() if (i := _identity(text)) is not None)
        return sorted(found, key=lambda ns: ns.name)

    def listed(self) -> list[Namespace]:
        """The same without those that were removed and hold nothing since."""
        hidden = self.index.hidden_namespaces()
        return [ns for ns in self.all() if ns.number not in hidden]

    def find(self, name: str | bytes) -> Namespace:
        """A namespace by name, unique beginning of a name, or 16-byte id. Raises InputError.

        One that was removed has no name any more.
        """
        all_ = self.all() if isinstance(name, bytes) else self.listed()
        if isinstance(name, bytes):
            matching = [ns for ns in all_ if ns.nsid == name]
        else:
            exact = [ns for ns in all_ if ns.name == name]
            matching = exact or [ns for ns in all_ if name and ns.name.startswith(name)]
        if len(matching) == 1:
            return matching[0]
        known = ", ".join(ns.name for ns in all_) or "none"
        what = "no" if not matching else "more than one"
        raise InputError(f"{what} namespace {name!r}; the store has {known}")

    def classes(self) -> dict[str, int]:
        """TTL class -> seconds."""
        return self.index.classes()

    def ttl(self, name: str) -> TtlClass:
        """A TTL class by name. Raises InputError."""
        classes = self.classes()
        if name not in classes:
            known = f"known are {', '.join(classes)}" if classes else "the store has none"
            raise InputError(f"no TTL class {name!r}; {known} (kvctl ttl define)")
        return TtlClass(name, classes[name])

    def seconds_by_number(self) -> dict[int, int]:
        """Class number of the index (as in runs) -> seconds."""
        classes = self.classes()
        return {number: classes[name] for number, name in self.index.class_names().items()}


def _identity(text: str) -> Identity | None:
    try:
        return Identity.from_json(json.loads(text))
    except (ValueError, InputError):
        return None


def learn_namespaces(backend: Backend, index: Index) -> list[str]:
    """Brings in the namespaces that have a file and are not in the index; returns the paths of
    files that cannot be read. Raises OSError if they cannot be listed, IndexFault."""
    from kvfs.frames import NamespaceEntry

    identities = (_identity(text) for _, text in index.namespaces().values())
    known = {identity.name for identity in identities if identity is not None}
    found = list(namespace_files(backend, known))
    _apply(index, [NamespaceEntry(i.nsid, text) for i, text, _ in found if i is not None])
    return [path for identity, _, path in found if identity is None]


def namespace_files(
    backend: Backend, known: Collection[str] = ()
) -> Iterator[tuple[Identity | None, str, str]]:
    """Yields (identity, its JSON, path) of each namespace file, except for those of known names;
    None for one not to be believed: it cannot be read, or has another name than its directory."""
    for name in backend.names("ns"):
        if name in known:
            continue
        path = namespace_path(name)
        try:
            text = backend.load(path, _NAMESPACE_LIMIT).decode()
            identity = Identity.from_json(json.loads(text))
        except (OSError, ValueError, InputError):
            yield None, "", path
        else:
            yield identity if identity.name == name else None, text, path


def _apply(index: Index, entries: Sequence[Entry]) -> None:
    def apply(applier: Applier) -> None:
        for entry in entries:
            applier.apply(entry)

    if entries:
        index.write(apply)
