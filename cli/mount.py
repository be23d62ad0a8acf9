"""`kvctl mount`: shows a store as a directory tree. The mount itself is kvfs.mount.process's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.mount.process import MountOptions

# Options for mount(8), systemd and the kernel, which an fstab line may hold; they mean nothing
# here, or are so anyway.
_IGNORED = {
    "_netdev", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group", "defaults",
    "dev", "nodev", "suid", "nosuid", "exec", "noexec", "async", "sync", "atime", "noatime",
    "relatime", "norelatime", "strictatime", "nostrictatime", "diratime", "nodiratime",
    "default_permissions",
}  # fmt: skip
_FLAGS: dict[str, tuple[str, bool]] = {
    "ro": ("writable", False), "rw": ("writable", True), "writable": ("writable", True),
    "allow_other": ("allow_other", True), "foreground": ("foreground", True),
}  # fmt: skip
_TEXTS = frozenset({"index", "log"})
# What each may be at most, and its base; the highest number of a user means "none".
_NUMBERS = {"uid": (2**32 - 2, 10), "gid": (2**32 - 2, 10), "umask": (0o777, 8)}

MANUAL = {
    "Mount options": """
    ro -- Nothing can be changed (the default).
    rw, writable -- rm evicts a block and all that follows it, touch renews a block and what it
    builds on, setfattr -n user.kvfs.ttl_class -v CLASS moves it to another class. Nothing else is
    allowed. mount(8), and so fstab, takes `writable` alone: it says rw of its own accord wherever
    nothing is said.
    allow_other -- As --allow-other.
    uid=N, gid=N -- Whose the files are; default: of who mounts.
    umask=MODE -- Permissions to take away, octal.
    index=DIR, log=FILE -- As --index and --log.

    What mount(8), fstab and systemd use among themselves (_netdev, nofail, x-...) is ignored.
    """,
    "What is shown": """
    A file is a block: the bytes the engine stored, verified when they are first read; what does
    not verify is an I/O error and a line in the log. A folder's `tokens` has the token ids, a line
    a block, ten digits each. What has expired is not shown. mtime is when a block was stored,
    atime when it was last renewed.

    A number of an inode stands for one content for ever. A name that another process evicted may
    be seen by stat(2) for up to 10 seconds; listing and opening tell the truth at once. Blocks
    that other hosts store appear within about 2 seconds.

    `getfattr -d` on a block gives its hash, class and expiry and where it lies in the store; on
    the top directory the mount's process (user.kvfs.pid) and how many requests of each kind it
    has had (user.kvfs.requests).
    """,
    "fstab": """
    A line of /etc/fstab, with `mount.kvfs` in /sbin:

      /srv/kvfs  /mnt/kvfs  kvfs  ro,allow_other,_netdev,nofail  0  0

    With `writable` in place of `ro` it can be changed.
    """,
    "Signals": """
    SIGTERM, SIGINT, SIGHUP -- Unmount and end.
    SIGUSR1 -- Write the stacks of all threads to the log.
    """,
    "JSON output": """
    store -- path of the store
    mount -- where it is mounted
    notes -- what was done on the way, such as replacing a dead mount
    """,
}


@common.command("""
    kvctl mount --store /srv/kvfs /mnt/kvfs
    kvctl mount --foreground -o rw /mnt/kvfs
    mount -t kvfs /srv/kvfs /mnt/kvfs
""")
@common.options
@click.option("-f", "--foreground", is_flag=True, help="Stay, and log to the standard error.")
@click.option("--allow-other", is_flag=True,
              help="Let other users in, too. Who is not root needs user_allow_other in "
                   "/etc/fuse.conf for it.")  # fmt: skip
@click.option("--log", metavar="FILE", help="Log to a file, or to syslog if FILE is `syslog`. "
              "Default in the background: mount.log beside the index.")  # fmt: skip
@click.option("-o", "texts", multiple=True, metavar="OPT[,OPT...]",
              help="Mount options, see below.")  # fmt: skip
@click.argument("directory", metavar="DIR")
def command(
    settings: Settings, foreground: bool, allow_other: bool, log: str | None,
    texts: tuple[str, ...], directory: str,
) -> None:  # fmt: skip
    """Show a store as a directory tree.

    DIR becomes the top of the tree: a directory for each namespace, in it one for each prompt
    beginning, in that a file for each block; forks are directories. All is read-only unless
    -o rw is given (-o writable with mount(8)). A mount whose process has died is replaced. See also
    kvctl-umount(1).
    """
    from kvfs.mount.process import MountOptions, mount

    options = MountOptions(
        store=settings.store, point=directory, index=settings.index, allow_other=allow_other,
        foreground=foreground, log=log,
    )  # fmt: skip
    for text in texts:
        options = apply_options(options, text)
    notes: list[str] = []
    mount(options, output.message if foreground else notes.append)
    for note in notes:
        output.message(note)
    if settings.as_json:
        output.json_line({"store": options.store, "mount": directory, "notes": notes})


def apply_options(options: MountOptions, text: str) -> MountOptions:
    """The options with those of one -o added. Raises InputError for an unknown one."""
    change: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        if not is_known(item):
            raise InputError(f"unknown mount option {item!r}; see kvctl-mount(1)")
        name, _, value = item.partition("=")
        if name in _FLAGS:
            key, setting = _FLAGS[name]
            change[key] = setting
        elif name in _TEXTS:
            change[name] = value
        elif name in _NUMBERS:
            change[name] = _number(name, value)
    return replace(options, **change)


def is_known(item: str) -> bool:
    """One option is known, or one of those that are ignored."""
    name, equals, _ = item.partition("=")
    if name in _IGNORED or name.startswith("x-") or name == "comment":
        return True
    return name in _TEXTS or name in _NUMBERS if equals else name in _FLAGS


def _number(name: str, text: str) -> int:
    most, base = _NUMBERS[name]
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if not 0 <= number <= most:
        limit = f"{most:o}, octal" if base == 8 else str(most)
        raise InputError(f"mount option {name}={text}: not a number from 0 to {limit}")
    return number
