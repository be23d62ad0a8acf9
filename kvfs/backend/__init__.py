"""How kvfs talks to the shared storage: one small interface, a module per kind of storage.

Nothing above this package calls `os` on a path of the store.
"""

from kvfs.backend.base import Backend, OpenFile, ReadCut, WriteCut, read_into, write_all
from kvfs.backend.posix import PosixBackend

__all__ = ["Backend", "OpenFile", "PosixBackend", "ReadCut", "WriteCut", "read_into", "write_all"]
