"""The exceptions of kvfs and the exit code of each.

KvfsError                    1   anything kvfs itself found wrong
 +-- InputError              2   the caller's arguments: tokens, blocks, a name, a layout
 +-- BusyError               5   somebody else holds what only one may hold
 +-- SpaceError              6   no room on the storage; stores are refused, reads go on
 +-- ConfigError             7   settings, permissions, a directory of the wrong kind
 +-- NoStoreError            8   the directory is not a kvfs store, or its mount is away
 +-- BackendError            9   the storage does not answer or answers with an I/O error
 +-- DeadlineError          10   the time the caller allowed is over
 +-- FormatError            11   a file of a version, or of a shape, that this code does not read
 +-- DamageError            12   a check found damaged data
 +-- IndexFault             13   the local index cannot be used (it can be rebuilt)

A message says what was found, where, and what to do. `check` and `fetch` do not raise for what
they find in storage: a miss is a result with a reason, never an exception.
This module imports nothing, so that every other one may import it.
"""

from __future__ import annotations

import errno as _errno

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_MISS = 3
EXIT_PARTIAL = 4
EXIT_OUTPUT = 14
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# The whole table, in the order the man pages print it.
EXIT_CODES: dict[int, str] = {
    EXIT_OK: "success; for check and fetch: everything that may be hit was hit",
    EXIT_INTERNAL: "internal error (a bug: a traceback is printed)",
    EXIT_USAGE: "bad usage or bad input",
    EXIT_MISS: "miss: nothing of the prompt is stored",
    EXIT_PARTIAL: "partial: a shorter prefix than asked for",
    5: "busy: another process holds the lease or lock",
    6: "no space left for stores; reads go on",
    7: "configuration: a setting, permission or directory does not fit",
    8: "no store here (or its mount is away)",
    9: "storage backend down or failing",
    10: "deadline reached",
    11: "unknown format or version",
    12: "damage found",
    13: "the local index cannot be used; rebuild it",
    EXIT_OUTPUT: "the output could not be written",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "the reader of the output went away",
}


class KvfsError(Exception):
    """Base of all exceptions that kvfs raises on purpose.

    exit_code: what `kvctl` exits with; errno: what the mount answers with.
    """

    exit_code = EXIT_INTERNAL
    errno = _errno.EIO


class InputError(KvfsError):
    """The caller's arguments cannot be used; nothing was changed."""

    exit_code = EXIT_USAGE
    errno = _errno.EINVAL


class BusyError(KvfsError):
    """Somebody else holds a lease or lock that only one may hold."""

    exit_code = 5
    errno = _errno.EBUSY


class SpaceError(KvfsError):
    """The storage has no room; the store goes on answering reads."""

    exit_code = 6
    errno = _errno.ENOSPC


class ConfigError(KvfsError):
    """A setting, a permission or the kind of a directory does not fit."""

    exit_code = 7
    errno = _errno.EPERM


class NoStoreError(KvfsError):
    """There is no store at this path, or the file system that holds it is not mounted."""

    exit_code = 8
    errno = _errno.ENOENT


class BackendError(KvfsError):
    """The storage failed or does not answer."""

    exit_code = 9


class DeadlineError(KvfsError):
    """The time the caller allowed is over."""

    exit_code = 10
    errno = _errno.ETIMEDOUT


class FormatError(KvfsError):
    """A file has a version or a shape that this code does not read. It is left alone."""

    exit_code = 11


class DamageError(KvfsError):
    """A check found damaged data."""

    exit_code = 12


class IndexFault(KvfsError):
    """The local index cannot be used. It is derived data: `kvctl rebuild` makes it anew."""

    exit_code = 13
