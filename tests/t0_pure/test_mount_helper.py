"""What mount(8) says, turned into what kvctl mount understands; and the options of -o."""

from __future__ import annotations

import pytest

from kvfs.cli.mount import apply_options
from kvfs.cli.mount_helper import translate
from kvfs.errors import InputError
from kvfs.mount.process import MountOptions

S, D = "/srv/kvfs", "/mnt/kvfs"
PLAIN = ["mount", "--store", S]


@pytest.mark.parametrize(
    "given,expected",
    [
        ([S, D], [*PLAIN, "--", D]),
        ([S, D, "-o", "ro,_netdev"], [*PLAIN, "-o", "ro,_netdev", "--", D]),
        ([S, D, "-n", "-v", "-o", "rw"], [*PLAIN, "--", D]),
        ([S, D, "-o", "rw,writable"], [*PLAIN, "-o", "writable", "--", D]),
        ([S, D, "-nv", "-orw,uid=3", "-t", "kvfs", "-N", "/proc/1/ns/mnt"],
         [*PLAIN, "-o", "uid=3", "--", D]),
        (["-o", "ro", S, D], [*PLAIN, "-o", "ro", "--", D]),
        ([S, "-dir"], [*PLAIN, "--", "-dir"]),
        ([S, D, "-f", "-v", "-o", "rw"], None),
        ([S, D, "-s", "-o", "ro,nonsense,a=b,uid=3"], [*PLAIN, "-o", "ro,uid=3", "--", D]),
        (["--version"], ["--version"]),
        ([S], [S]),
        ([S, D, "extra"], [S, D, "extra"]),
    ],
)  # fmt: skip
def test_translation(given: list[str], expected: list[str] | None) -> None:
    assert translate(given) == expected


@pytest.mark.parametrize(
    "text,change",
    [
        ("", {}),
        ("ro,rw", {"writable": True}),
        ("rw,ro", {"writable": False}),
        ("writable", {"writable": True}),
        ("allow_other,uid=7,gid=8,umask=027", {
            "allow_other": True, "uid": 7, "gid": 8, "umask": 0o27}),
        ("uid=4294967294,gid=0,umask=777", {"uid": 2**32 - 2, "gid": 0, "umask": 0o777}),
        ("index=/a=b,log=syslog", {"index": "/a=b", "log": "syslog"}),
        ("_netdev,nofail,auto,noauto,user,dev,suid,exec,relatime,x-systemd.requires=a,comment=b",
         {}),
        ("foreground", {"foreground": True}),
    ],
)  # fmt: skip
def test_options(text: str, change: dict[str, object]) -> None:
    options = apply_options(MountOptions("s", "p"), text)
    for name in MountOptions.__slots__:
        wanted = change.get(name, getattr(MountOptions("s", "p"), name))
        assert getattr(options, name) == wanted, name


@pytest.mark.parametrize(
    "text", ["nonsense", "ro=1", "uid", "uid=x", "umask=9", "max_read=1", "remount", "uid=-1",
             "gid=4294967295", "umask=1000", "writable=1"]
)  # fmt: skip
def test_unknown_options(text: str) -> None:
    with pytest.raises(InputError):
        apply_options(MountOptions("s", "p"), text)
