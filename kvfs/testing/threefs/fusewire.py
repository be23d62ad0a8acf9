"""The kernel's FUSE protocol without a library: a mount, a few threads, a reply for each request.

A library would have no ioctl, or hide who asked. Handlers get (request, payload), return the
reply's payload and raise OSError or Errno for an error. They run in several threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

IN = struct.Struct("<2I2Q3I")
IN_BYTES = 40
OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
OPENED = struct.Struct("<Q2I")
DIRECT_IO = 1

INIT, FORGET, INTERRUPT, DESTROY, BATCH_FORGET = 26, 2, 36, 38, 42
_INIT_OUT = struct.Struct("<4I2H2I2HI")
_MAX_WRITE = 1 << 20
_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 22  # what a 3FS daemon asks for
_NOTIFY_INODE, _NOTIFY_ENTRY = 2, 3
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


class Errno(Exception):
    """A request fails with this error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Request(NamedTuple):
    node: int
    uid: int
    gid: int
    pid: int
    """Of the thread that asks."""


Handler = Callable[[Request, bytes], bytes]
Forget = Callable[[int, int], None]


def attributes(st: os.stat_result, inode: int, chunk: int) -> bytes:
    """A file's attributes as the kernel wants them."""
    second = 10**9
    return ATTR.pack(
        inode, st.st_size, -(-st.st_size // 512), int(st.st_atime), int(st.st_mtime),
        int(st.st_ctime), st.st_atime_ns % second, st.st_mtime_ns % second,
        st.st_ctime_ns % second, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, 0, chunk, 0,
    )  # fmt: skip


def virtual(inode: int, mode: int, size: int = 0, uid: int = 0) -> bytes:
    """Attributes of what exists only in the daemon."""
    return ATTR.pack(inode, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, uid, 0, 0, 4096, 0)


def entry(inode: int, attr: bytes, seconds: float, attr_seconds: float | None = None) -> bytes:
    """A directory entry with attributes, to be believed for so long, both or each for its own."""
    name, rest = seconds, seconds if attr_seconds is None else attr_seconds
    nanoseconds = (int(t % 1 * 1e9) for t in (name, rest))
    return ENTRY.pack(inode, 0, int(name), int(rest), *nanoseconds) + attr


class Connection:
    """One mount. `run` serves it until it is unmounted or `stop` is called."""

    def __init__(self, source: str, kind: str, point: str) -> None:
        self.point = point
        self.stopping = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = (
            f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other,"
            f"default_permissions,max_read={_MAX_WRITE}"
        )
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
        args = source.encode(), point.encode(), kind.encode(), flags, options.encode()
        if self._libc.mount(*args):
            raise OSError(ctypes.get_errno(), "mount", point)

    def stop(self) -> None:
        self.stopping = True
        self._libc.umount2(self.point.encode(), _MNT_DETACH)

    def run(
        self, handlers: Mapping[int, Handler], forget: Forget, ready: Callable[[], None]
    ) -> None:
        threads = [
            threading.Thread(target=self._serve, args=(handlers, forget), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        ready()
        for thread in threads:
            while thread.is_alive() and not self.stopping:
                thread.join(0.1)

    def _serve(self, handlers: Mapping[int, Handler], forget: Forget) -> None:
        while not self.stopping:
            try:
                data = os.read(self._fd, _MAX_WRITE + 8192)
            except OSError as e:
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            length, opcode, unique, node, uid, gid, pid = IN.unpack_from(data)
            payload = data[IN_BYTES:length]
            if opcode == INIT:
                self._reply(unique, 0, self._init(payload))
            elif opcode == FORGET:
                forget(node, struct.unpack_from("<Q", payload)[0])
            elif opcode == BATCH_FORGET:
                for i in range(struct.unpack_from("<I", payload)[0]):
                    forget(*struct.unpack_from("<2Q", payload, 8 + 16 * i))
            elif opcode not in (INTERRUPT, DESTROY):
                request = Request(node, uid, gid, pid)
                self._reply(unique, *_answer(handlers.get(opcode), request, payload))

    @staticmethod
    def _init(payload: bytes) -> bytes:
        flags = struct.unpack_from("<4I", payload)[3] & _FLAGS
        out = _INIT_OUT.pack(7, 31, 1 << 20, flags, 32, 24, _MAX_WRITE, 1, 256, 0, 0)
        return out.ljust(64, b"\0")

    def _reply(self, unique: int, code: int, payload: bytes) -> None:
        try:
            os.write(self._fd, OUT.pack(OUT.size + len(payload), -code, unique) + payload)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENODEV):  # interrupted, unmounted
                print("reply:", e, file=sys.stderr, flush=True)

    # what the kernel is to forget

    def _notify(self, code: int, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # it did not hold it
            os.write(self._fd, OUT.pack(OUT.size + len(payload), code, 0) + payload)

    def forget_inode(self, inode: int) -> None:
        self._notify(_NOTIFY_INODE, struct.pack("<Qqq", inode, -1, 0))

    def forget_entry(self, parent: int, name: str) -> None:
        """In a thread of its own: the kernel may hold the directory's lock until we reply."""
        raw = name.encode()
        payload = struct.pack("<Q2I", parent, len(raw), 0) + raw + b"\0"
        threading.Thread(target=self._notify, args=(_NOTIFY_ENTRY, payload), daemon=True).start()


def _answer(handler: Handler | None, request: Request, payload: bytes) -> tuple[int, bytes]:
    if handler is None:
        return errno.ENOSYS, b""
    try:
        return 0, handler(request, payload)
    except Errno as e:
        return e.code, b""
    except OSError as e:
        return e.errno or errno.EIO, b""
    except KeyError:
        return errno.ENOENT, b""
    except Exception as e:
        print("request:", repr(e), file=sys.stderr, flush=True)
        return errno.EIO, b""
