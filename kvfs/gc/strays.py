"""Small files on the way to their final name whose writer was killed: they go once they are old.

A backend tells no file's age, so the index remembers when each was first seen: rows in `meta`,
"stray:" and the path, u64 milliseconds. Looked for at the top of the store, where leases and
records are replaced again and again, and in directories of namespaces that have no identity.
Blocking; no state of its own.
"""

from __future__ import annotations

from kvfs.gc.expiry import DAY_MS
from kvfs.index.apply import Applier
from kvfs.index.schema import META, U64, scan
from kvfs.scan.segments import names
from kvfs.store import Store

_STRAY = META + b"stray:"
_SUFFIX = ".new"


def old_strays(store: Store, now_ms: int) -> list[str]:
    """Paths of those that were there a day ago; notes the others. Raises OSError, IndexFault."""
    there = set(_strays(store))
    since = store.index.query(_noted)

    def work(applier: Applier) -> None:
        for path in since.keys() - there:
            applier.txn.delete(_STRAY + path.encode())
        for path in there - since.keys():
            applier.txn.put(_STRAY + path.encode(), U64.pack(now_ms))

    if there != since.keys():
        store.index.write(work)
    return sorted(path for path in there if since.get(path, now_ms) + DAY_MS <= now_ms)


def _noted(applier: Applier) -> dict[str, int]:
    rows = scan(applier.txn, _STRAY)
    return {bytes(k[len(_STRAY) :]).decode(): U64.unpack(v)[0] for k, v in rows}


def _strays(store: Store) -> list[str]:
    backend = store.backend
    found = [name for name in backend.names("") if name.endswith(_SUFFIX)]
    nameless = set(backend.names("ns")) - {ns.name for ns in store.namespaces()}
    for name in nameless:
        found += (f"ns/{name}/{n}" for n in names(backend, f"ns/{name}") if n.endswith(_SUFFIX))
    return found
