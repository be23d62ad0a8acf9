"""What stands between the kernel's requests and the handlers: counts, and a guard around each.

pyfuse3 ends the whole mount when a handler raises anything but FUSEError or returns the wrong
type. Here an OSError becomes its errno and a KvfsError the one of its class, with a line in the
log; everything else is a bug, logged with its traceback, and EIO for that one caller.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3

from kvfs.errors import InputError, KvfsError

log = logging.getLogger(__name__)

# What pyfuse3 insists on; a handler that is not named here returns nothing it looks at.
_RETURNS: dict[str, Any] = {
    "lookup": pyfuse3.EntryAttributes, "getattr": pyfuse3.EntryAttributes,
    "setattr": pyfuse3.EntryAttributes, "open": pyfuse3.FileInfo, "opendir": int,
    "read": (bytes, bytearray, memoryview), "statfs": pyfuse3.StatvfsData,
    "getxattr": bytes, "listxattr": list,
}  # fmt: skip


class GuardedOperations(pyfuse3.Operations):  # type: ignore[misc]
    """A base whose subclasses' public coroutines are all guarded and counted in `requests`."""

    requests: Counter[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, function in list(vars(cls).items()):
            if not name.startswith("_") and inspect.iscoroutinefunction(function):
                setattr(cls, name, _guarded(name, function))


def _guarded(
    name: str, handler: Callable[..., Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:  # fmt: skip
    wanted = _RETURNS.get(name, object)

    @functools.wraps(handler)
    async def guarded(self: GuardedOperations, *args: Any) -> Any:
        self.requests[name] += 1
        try:
            result = await handler(self, *args)
        except pyfuse3.FUSEError:
            raise
        except OSError as e:
            raise pyfuse3.FUSEError(e.errno or errno.EIO) from None
        except KvfsError as e:
            level = logging.INFO if isinstance(e, InputError) else logging.WARNING
            log.log(level, "%s: %s", name, e)
            raise pyfuse3.FUSEError(e.errno) from None
        except Exception:
            log.exception("%s failed; this is a bug of kvfs", name)
            raise pyfuse3.FUSEError(errno.EIO) from None
        if not isinstance(result, wanted):
            log.error("%s returned a %s; this is a bug of kvfs", name, type(result).__name__)
            raise pyfuse3.FUSEError(errno.EIO)
        return result

    return guarded
