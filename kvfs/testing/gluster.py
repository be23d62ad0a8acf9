"""A replicated shared file system on one machine: GlusterFS, three replicas, two mounts.

    python -m kvfs.testing.gluster DIRECTORY PUTS CACHES [3fs]

It runs itself again in network, mount and process namespaces of its own, with private copies of the
directories that its daemons insist on: whatever ends it, no process, mount, address or file outside
DIRECTORY is left. Two hosts (kvfs.testing.hosts), one on each mount, put and read each other's
blocks; half-way one brick is killed, later it comes back. Prints what they saw as one JSON object.
With "3fs" each host has a stand-in for 3FS's client daemon over its mount, and reaches it by rings.
Needs root, /dev/fuse and the Debian packages glusterfs-server and glusterfs-client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvfs.repair.fsck import fsck
from kvfs.store import Store
from kvfs.testing.blocks import small_identity
from kvfs.testing.command import environment
from kvfs.testing.hosts import TOKENS, start
from kvfs.testing.stock import Clock, Stock, tokens
from kvfs.testing.threefs.host import Host

ADDRESS = "10.77.0.1"
VOLUME = "kv"
PRIVATE = ("/var/lib/glusterd", "/var/log/glusterfs", "/run/gluster")
ROW_BYTES = 16_000
CACHES = ("performance.quick-read", "performance.stat-prefetch", "performance.io-cache")
"""With them a client believes lengths, and what is in small files, for a second."""
_GLUSTERD = """volume management
type mgmt/glusterd
option working-directory /var/lib/glusterd
option transport-type socket
option transport.socket.listen-port 24007
end-volume
"""


def unavailable() -> str | None:
    """Why this machine cannot run it, or None."""
    if os.geteuid() != 0:
        return "needs root"
    for name in ("glusterd", "gluster", "glusterfs", "ip", "unshare"):
        if shutil.which(name) is None:
            return f"no command {name} (Debian: glusterfs-server, glusterfs-client)"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    done = subprocess.run(["unshare", "-nmp", "-f", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else f"unshare: {done.stderr.decode().strip()}"


def apart(
    directory: Path, puts: int, *, caches: bool, seconds: float, rings: bool = False
) -> dict[str, Any]:
    """Runs the whole of it in namespaces of its own; returns what it prints.

    puts: of each host; caches: with the caches of GlusterFS's clients; seconds: at most; rings:
    through stand-ins for 3FS's client daemon.
    """
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*words, sys.executable, "-m", "kvfs.testing.gluster", str(directory), str(puts),
         str(int(caches)), *(["3fs"] if rings else [])],
        env=environment(), capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}: {done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def run(*words: str) -> str:
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(words)}: {done.stdout} {done.stderr}")
    return done.stdout


def daemon(log: Path, *words: str) -> None:
    """Starts what puts itself into the background: it must not hold our pipes."""
    with log.open("ab") as out:
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True)


def gluster(*words: str) -> str:
    return run("gluster", "--mode=script", *words)


class Cluster:
    """One volume of three bricks and its two mounts, in the namespaces of this process."""

    def __init__(self, directory: Path, caches: bool) -> None:
        """caches: leaves the caches of the clients on."""
        self.directory = directory
        self.caches = caches
        self.mounts = [directory / "m1", directory / "m2"]
        self.log = directory / "log"

    def start(self) -> None:
        for name in ("b1", "b2", "b3", "m1", "m2", "log"):
            (self.directory / name).mkdir(parents=True)
        for place in PRIVATE:
            os.makedirs(place, exist_ok=True)
            run("mount", "-t", "tmpfs", "none", place)
        for name in ("bricks", "cli"):
            os.makedirs(f"/var/log/glusterfs/{name}", exist_ok=True)
        self._address()
        (self.directory / "gd.vol").write_text(_GLUSTERD)
        daemon(
            self.log / "out", "glusterd", "-f", str(self.directory / "gd.vol"),
            "-p", "/run/gluster/glusterd.pid", "-l", str(self.log / "glusterd.log"),
        )  # fmt: skip
        self._volume()
        for mount in self.mounts:
            daemon(
                self.log / "out", "glusterfs", f"--volfile-server={ADDRESS}",
                f"--volfile-id={VOLUME}", "-l", f"{self.log}/{mount.name}.log",
                str(mount),
            )  # fmt: skip
        self._wait(lambda: all(os.path.ismount(m) for m in self.mounts))

    def _address(self) -> None:
        """Of a link to nowhere: GlusterFS refuses the loopback device."""
        for words in (
            "link set lo up", "link add v0 type veth peer name v1",
            f"addr add {ADDRESS}/24 dev v0", "link set v0 up", "link set v1 up",
        ):  # fmt: skip
            run("ip", *words.split())

    def _volume(self) -> None:
        self._wait(lambda: subprocess.run(
            ["gluster", "--mode=script", "peer", "status"], capture_output=True, check=False,
            stdin=subprocess.DEVNULL,
        ).returncode == 0)  # fmt: skip
        bricks = [f"{ADDRESS}:{self.directory}/b{n}" for n in (1, 2, 3)]
        gluster("volume", "create", VOLUME, "replica", "3", *bricks, "force")
        gluster("volume", "set", VOLUME, "network.ping-timeout", "3")
        for option in () if self.caches else CACHES:
            gluster("volume", "set", VOLUME, option, "off")
        gluster("volume", "start", VOLUME)
        self._wait(lambda: len(self.bricks()) == 3)

    def bricks(self) -> dict[str, int]:
        """Brick -> process that serves it, of those that are up."""
        found = re.findall(
            r"<path>([^<]*/b\d)</path>.*?<status>1</status>.*?<pid>(\d+)</pid>",
            gluster("volume", "status", VOLUME, "--xml"), re.S,
        )  # fmt: skip
        return {path: int(pid) for path, pid in found}

    def kill_brick(self) -> None:
        pid = min(self.bricks().items())[1]
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # this process is the first of its namespace: orphans are its own

    def heal(self) -> None:
        """Brings the brick back and waits until it has what it missed."""
        gluster("volume", "start", VOLUME, "force")
        self._wait(lambda: len(self.bricks()) == 3)
        self._wait(lambda: self._unhealed() == 0, 90)

    def _unhealed(self) -> int:
        told = gluster("volume", "heal", VOLUME, "info")
        return sum(map(int, re.findall(r"Number of entries: (\d+)", told)))

    def _wait(self, true: Any, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise AssertionError("GlusterFS is not ready")
            time.sleep(0.2)


@contextlib.contextmanager
def standins(cluster: Cluster) -> Iterator[list[Path]]:
    """Mounts of two daemons, each over a mount of the volume."""
    hosts = [Host(m / "3fs", cluster.directory / f"h{n}") for n, m in enumerate(cluster.mounts)]
    try:
        for host in hosts:
            host.start()
        yield [host.point for host in hosts]
    finally:
        for host in hosts:
            host.close()


def play(cluster: Cluster, puts: int, places: list[Path]) -> dict[str, Any]:
    """The two hosts put and look; a brick goes and comes back. Returns what came of it.

    places: a directory of the volume, as each host has it.
    """
    stores = [str(place / "store") for place in places]
    indexes = [str(cluster.directory / f"index{n}") for n in (0, 1)]
    with Store.init(stores[0], index=indexes[0], extent=1 << 20) as store:
        store.create_namespace(small_identity(row_bytes=ROW_BYTES))
    hosts = [start(stores[n], indexes[n], n, 2, puts, name=f"host{n}") for n in (0, 1)]
    for host in hosts:
        assert host.stdin is not None and host.stdout is not None
        if host.stdout.readline() != "ready\n":
            raise AssertionError(host.communicate()[1])
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write("\n")
        host.stdin.flush()
    time.sleep(3)
    cluster.kill_brick()
    killed = time.time()
    told = [json.loads(host.stdout.readline() or "{}") for host in hosts if host.stdout]
    errors = [host.communicate("\n")[1] for host in hosts]
    if not all(told):
        raise AssertionError(f"a host ended: {errors}")
    out: dict[str, Any] = {"hosts": told, "killed": killed}
    for when in ("short", "healed"):
        if when == "healed":
            cluster.heal()
        out[when] = [_look(stores[n], indexes[n], puts) for n in (0, 1)]
    return out


def _look(path: str, index: str, puts: int) -> dict[str, Any]:
    """What a host finds of all that was put, and what fsck says."""
    with Store.open(path, index=index) as store:
        stock = Stock(store, store.namespaces()[0], Clock(time.time()))
        seeds = [host * 10_000 + i for host in (0, 1) for i in range(puts)]
        lost = [s for s in seeds if stock.sound(tokens(s, TOKENS)) != TOKENS // 4]
        return {"lost": lost, "findings": dict(fsck(store).counts)}


def main() -> None:
    directory, puts, caches = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
    run("mount", "--make-rprivate", "/")
    cluster = Cluster(directory, caches)
    cluster.start()
    with standins(cluster) if "3fs" in sys.argv[4:] else nullcontext(cluster.mounts) as places:
        print(json.dumps(play(cluster, puts, places)), flush=True)


if __name__ == "__main__":
    main()
