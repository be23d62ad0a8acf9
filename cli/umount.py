"""`kvctl umount`: ends a mount. See kvfs.mount.mountinfo."""

from __future__ import annotations

import os

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

MANUAL = {
    "JSON output": """
    mount -- what was unmounted
    """,
}


@common.command("""
    kvctl umount /mnt/kvfs
    kvctl umount --lazy /mnt/kvfs
""")
@common.json_option
@click.make_pass_decorator(Settings, ensure=True)
@click.option("-l", "--lazy", is_flag=True,
              help="Detach it at once, even if it is in use; who uses it keeps it until then. "
                   "Takes away a mount whose process has died, too.")  # fmt: skip
@click.argument("directory", metavar="DIR")
def command(settings: Settings, lazy: bool, directory: str) -> None:
    """End a mount and wait until its process has ended.

    If the mount is in use, says by whom and leaves it in place. umount(8) works as well.
    """
    from kvfs.mount.mountinfo import real_point, unmount

    point = real_point(directory)
    os.chdir("/")  # not to be what keeps the mount in use
    unmount(point, lazy=lazy)
    if settings.as_json:
        output.json_line({"mount": directory})
