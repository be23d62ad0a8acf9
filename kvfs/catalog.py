"""What a store holds by name: namespaces and TTL classes, as the local index knows them.

Reads the index; `seed` also reads the namespace files of the store, for an index that is new or
whose journals are lost. Publishing a new one is the store's.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvfs.errors import InputError
from kvfs.index import Index
from kvfs.layout import Identity
from kvfs.namespace import Namespace

if TYPE_CHECKING:
    from kvfs.backend import Backend
    from kvfs.config import StoreConfig
    from kvfs.frames import Entry
    from kvfs.index.apply import Applier

_NAMESPACE_LIMIT = 64 << 20
DEFAULT_CLASS = "chatbot"
"""TTL class of puts that name none, where the store has it."""


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
        self._namespaces: dict[bytes, Namespace] = {}

    def seed(self, backend: Backend, config: StoreConfig) -> list[str]:
        """Brings in classes and namespaces as the store's files have them; the journals may know
        more. Returns the namespace files that cannot be read."""
        from kvfs.frames import ClassEntry, NamespaceEntry

        entries: list[Entry] = []
        unreadable = []
        if not self.index.classes():
            entries += (ClassEntry(n, s) for n, s in config.classes.items())
        known = {Identity.from_json(json.loads(t)).name for _, t in self._texts()}
        for name in backend.names("ns"):
            if name in known:
                continue
            try:
                data = backend.load(namespace_path(name), _NAMESPACE_LIMIT)
                identity = Identity.from_json(json.loads(data))
            except (OSError, ValueError, InputError):
                unreadable.append(namespace_path(name))
                continue
            entries.append(NamespaceEntry(identity.nsid, data.decode()))
        if entries:
            self._apply(entries)
        return unreadable

    def _texts(self) -> list[tuple[int, str]]:
        return list(self.index.namespaces().values())

    def _apply(self, entries: list[Entry]) -> None:
        def apply(applier: Applier) -> None:
            for entry in entries:
                applier.apply(entry)

        self.index.write(apply)

    def known(self, identity: Identity) -> bool:
        return identity.nsid in self.index.namespaces()

    def get(self, identity: Identity, default_class: str | None = None) -> Namespace:
        """The namespace of an identity that is known. default_class: see `Store`."""
        with self._lock:
            ns = self._namespaces.get(identity.nsid)
            if ns is None or default_class not in (None, ns.default_class):
                number = self.index.namespaces()[identity.nsid][0]
                ns = Namespace(identity, number, default_class or self._default_class())
                self._namespaces[identity.nsid] = ns
            return ns

    def _default_class(self) -> str:
        classes = self.classes()
        return DEFAULT_CLASS if DEFAULT_CLASS in classes else next(iter(classes), "")

    def all(self) -> list[Namespace]:
        """All namespaces, by name."""
        found = (self.get(Identity.from_json(json.loads(text))) for _, text in self._texts())
        return sorted(found, key=lambda ns: ns.name)

    def find(self, name: str | bytes) -> Namespace:
        """A namespace by name, unique beginning of a name, or 16-byte id. Raises InputError."""
        all_ = self.all()
        if isinstance(name, bytes):
            matching = [ns for ns in all_ if ns.nsid == name]
        else:
            exact = [ns for ns in all_ if ns.name == name]
            matching = exact or [ns for ns in all_ if ns.name.startswith(name)]
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
            known = ", ".join(classes)
            raise InputError(f"no TTL class {name!r}; known are {known} (kvctl ttl define)")
        return TtlClass(name, classes[name])

    def seconds_by_number(self) -> dict[int, int]:
        """Class number of the index (as in runs) -> seconds."""
        classes = self.classes()
        return {number: classes[name] for number, name in self.index.class_names().items()}
