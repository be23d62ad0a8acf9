"""What of an index outlives its files: namespaces and classes, and the numbers that callers hold.

For an index whose files were deleted under a process that goes on (kvfs.index.index). Functions
over one transaction; nothing is kept between calls.
"""

from __future__ import annotations

from kvfs.frames import ClassEntry, NamespaceEntry
from kvfs.index.apply import Applier
from kvfs.index.env import Env
from kvfs.index.schema import CLASS, CLASSES, KEYED, META, NS, U32, scan


def what_others_hold(env: Env) -> list[tuple[bytes, bytes]]:
    """Copies of the rows of namespaces and classes, and of what numbers them."""
    with env.read() as txn:
        rows = [(bytes(k), bytes(v)) for table in (NS, CLASSES) for k, v in scan(txn, table)]
        for name in (b"last_", KEYED.encode()):
            rows += ((bytes(k), bytes(v)) for k, v in scan(txn, META + name))
    return rows


def take_along(applier: Applier, rows: list[tuple[bytes, bytes]]) -> None:
    """As it was; where another process has been faster, what it does not know yet."""
    if not any(True for _ in scan(applier.txn, NS)):
        for key, value in rows:
            applier.txn.put(key, value)
        return
    for key, value in rows:
        if key[:1] == NS:
            applier.apply(NamespaceEntry(key[1:], value[U32.size :].decode()))
        elif key[:1] == CLASSES:
            applier.apply(ClassEntry(key[1:].decode(), *CLASS.unpack(value)[1:]))
