"""Showing a store as a directory tree, with the tools everybody knows, or `kvctl ls` without FUSE.

The mount is made and ended by `kvctl mount` and `kvctl umount` in processes of their own: nothing
else may live in the process of a mount. Whatever fails here is told in a line and is no exception,
except a mount that hangs.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvfs.demo.screen import Screen
from kvfs.errors import KvfsError
from kvfs.filesystems import at

_COMMAND_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demonstration lives: everything below one temporary directory."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def mount(self) -> Path:
        return self.root / "mnt"

    def environment(self) -> dict[str, str]:
        """For kvctl in a process of its own."""
        here = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "KVFS_STORE": str(self.store),
            "KVFS_INDEX": str(self.index),
        }


def show_tree(screen: Screen, place: Place, name: str) -> str:
    """Shows the store as directories; returns in a few words how."""
    trouble = _mount(place)
    if trouble:
        screen.heading("The tree (not mounted)")
        screen.say(f"FUSE: {trouble}; kvctl ls shows the same")
        for args in (["ls"], ["ls", name]):
            done = _kvctl(place, *args)
            screen.shell(f"kvctl {shlex.join(args)}", done.stdout or done.stderr)
        return "no FUSE here"
    screen.heading(f"The tree: kvctl mount {place.mount}")
    try:
        return _use_tools(screen, place, name)
    finally:
        unmount(place)


def _mount(place: Place) -> str:
    """Mounts the store; returns why that is not possible, or ""."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be used"
    if importlib.util.find_spec("pyfuse3") is None:
        return "the package pyfuse3 is not installed (pip install 'kvfs[fuse]')"
    place.mount.mkdir(exist_ok=True)
    done = _kvctl(place, "mount", str(place.mount))
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    said = said or [f"kvctl mount ended with status {done.returncode}"]
    return said[-1].removeprefix("Error: ").removeprefix("error: ")


def unmount(place: Place) -> None:
    if not at(str(place.mount)):
        return
    _kvctl(place, "umount", str(place.mount))
    if at(str(place.mount)) and (tool := shutil.which("fusermount3")):
        subprocess.run([tool, "-uz", str(place.mount)], capture_output=True, check=False)


def _use_tools(screen: Screen, place: Place, name: str) -> str:
    """The commands of a curious person; returns how many files the tree has."""
    nodes = sorted(entry.name for entry in (place.mount / name).iterdir() if entry.is_dir())
    node = f"{name}/{nodes[0]}"
    block = next(path for path in sorted(os.listdir(place.mount / node)) if path.endswith(".kv"))
    for command in (
        ["ls"],
        ["ls", "-l", name],
        ["ls", "-l", node],
        ["du", "-sh", name],
        ["df", "-h", "."],
        ["getfattr", "-d", f"{node}/{block}"],
    ):
        _show_tool(screen, place, command)
    files = _show_tool(screen, place, ["find", name, "-name", "*.kv"], lines=3).count("\n")
    return f"{files:,} blocks as files"


def _show_tool(screen: Screen, place: Place, command: list[str], *, lines: int = 8) -> str:
    if shutil.which(command[0]) is None:
        screen.shell(shlex.join(command), f"({command[0]} is not installed)")
        return ""
    try:
        done = _run(place, command, cwd=place.mount)
    except subprocess.TimeoutExpired:
        raise KvfsError(f"{shlex.join(command)} on the mount took too long") from None
    screen.shell(shlex.join(command), done.stdout or done.stderr, lines=lines)
    return done.stdout


def _kvctl(place: Place, *args: str) -> subprocess.CompletedProcess[str]:
    try:
        return _run(place, [sys.executable, "-m", "kvfs", *args], cwd=place.root)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(args, 1, "", "kvctl did not answer in time")


def _run(place: Place, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_COMMAND_SECONDS,
        check=False,
    )
