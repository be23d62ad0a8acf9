"""From mounting to the end: signals, dead mounts, busy ones, and who may not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.filesystems import at, mount_of, mounts
from kvfs.mount import mountinfo
from kvfs.testing.mounts import SECONDS, Mounted, mounted, until, wait_ended

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def one_line(text: str) -> str:
    """A message to a person is one line, without a traceback."""
    assert text.count("\n") == 1 and "Traceback" not in text, text
    return text


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *command],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def require_mount_namespaces() -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of its own here")


@pytest.fixture
def public() -> Iterator[Mounted]:
    """A store in a place that other users get to, which pytest's directories are not."""
    root = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir="/tmp"))
    root.chmod(0o755)
    try:
        with mounted(root / "kvfs") as made:
            yield made
    finally:
        shutil.rmtree(root)


# the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts(place: Mounted, number: signal.Signals) -> None:
    place.put(1)
    process = place.mount_foreground()
    assert os.listdir(place.point) != []
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(5) == 0
    assert time.monotonic() - began < 2
    assert not place.is_mounted() and os.listdir(place.point) == []
    assert "unmounted" in place.log()


def test_a_signal_unmounts_what_is_in_use(place: Mounted) -> None:
    place.put(1)
    process = place.mount_foreground()
    file = os.open(next(place.space.glob("*/000000.kv")), os.O_RDONLY)
    os.read(file, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert not place.is_mounted()
    with pytest.raises(OSError, match="Transport endpoint"):
        os.close(file)


def test_a_dead_mount_is_replaced(place: Mounted) -> None:
    place.put(1)
    place.mount()
    pid = place.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_ended(pid, 5)
    with pytest.raises(OSError, match="Transport endpoint"):
        os.listdir(place.point)
    done = place.try_mount()
    assert done.returncode == 0, done.stderr
    assert "whose process had died" in one_line(done.stderr)
    assert len(at(str(place.point))) == 1
    assert len(list(place.space.glob("*/*.kv"))) == 1 and place.pid != pid


def test_a_dead_mount_is_unmounted(place: Mounted) -> None:
    process = place.mount_foreground()
    process.kill()
    process.wait(5)
    done = place.umount()
    assert done.returncode == 0, done.stderr
    assert not place.is_mounted() and os.listdir(place.point) == []


def test_doctor_tells_of_a_dead_mount(place: Mounted) -> None:
    process = place.mount_foreground()

    def said() -> tuple[str, str]:
        facts = map(json.loads, place.kvctl("doctor", "--json").stdout.splitlines())
        (fact,) = (f for f in facts if f["text"].startswith(f"{place.point} shows kvfs:"))
        return fact["state"], fact["text"]

    assert said()[0] == "ok"
    process.kill()
    process.wait(5)
    state, text = said()
    assert state == "fault" and "has died; kvctl mount replaces it" in text


def test_a_link_to_the_directory_is_the_directory(place: Mounted) -> None:
    """So that nothing is mounted over the store, and what is mounted is found."""
    links = [place.root / name for name in ("to-store", "to-point", "to-link", "loop")]
    for link, target in zip(links, (place.store.path, "mnt/", "./to-point", "loop"), strict=True):
        link.symlink_to(target)
    over, _, link, loop = map(str, links)
    done = place.kvctl(*place.arguments()[:-1], over)
    assert done.returncode == 7 and "would hide" in one_line(done.stderr)
    done = place.kvctl(*place.arguments()[:-1], loop)
    assert done.returncode == 7 and "not a directory" in one_line(done.stderr)
    process = place.mount_foreground()
    done = place.kvctl(*place.arguments()[:-1], link)
    assert done.returncode == 5 and "mounted there already" in one_line(done.stderr)
    process.send_signal(signal.SIGSTOP)
    assert mountinfo.real_point(link) == str(place.point), "without asking the mount"
    process.kill()
    process.wait(5)
    assert mountinfo.real_point(link) == str(place.point)
    done = place.kvctl("umount", link)
    assert done.returncode == 0, done.stderr
    assert not place.is_mounted()


def test_a_living_mount_is_left_alone(place: Mounted) -> None:
    place.mount()
    pid = place.pid
    done = place.try_mount()
    assert done.returncode == 5
    assert f"is mounted there already (process {pid})" in one_line(done.stderr)
    assert place.pid == pid


def test_umount_waits_for_the_process(place: Mounted) -> None:
    place.mount()
    pid = place.pid
    done = place.umount("--json")
    assert done.returncode == 0, done.stderr
    assert wait_ended(pid, 0), "umount returned before its process had ended"
    assert not place.is_mounted()
    done = place.umount()
    assert done.returncode == 7 and "nothing is mounted" in one_line(done.stderr)


def test_a_mount_whose_storage_hangs_is_alive_and_is_unmounted(place: Mounted) -> None:
    place.mount_slowly(0).touch()
    assert place.process is not None
    pid = place.process.pid
    done = place.try_mount()
    assert done.returncode == 5 and f"(process {pid})" in one_line(done.stderr)
    done = place.umount()
    assert done.returncode == 0, done.stderr
    assert place.process.wait(SECONDS) == 0


@needs_root
def test_the_systems_umount_ends_the_process(place: Mounted) -> None:
    place.mount()
    pid = place.pid
    subprocess.run(["umount", place.point], check=True, timeout=SECONDS)
    assert wait_ended(pid, 5)


def test_a_busy_mount_names_who_is_in_it(place: Mounted) -> None:
    place.mount()
    pid = place.pid
    user = subprocess.Popen(["sleep", "600"], cwd=place.point)
    try:
        done = place.umount()
        assert done.returncode == 5
        said = one_line(done.stderr)
        assert f"sleep (process {user.pid}, its working directory)" in said and "--lazy" in said
        assert place.is_mounted() and place.pid == pid
        done = place.umount("--lazy")
        assert done.returncode == 0, done.stderr
        assert not place.is_mounted() and not wait_ended(pid, 0)
    finally:
        user.kill()
        user.wait()
    assert wait_ended(pid, 5), "the process outlived the last user of a detached mount"


@needs_root
def test_what_others_mounted_is_left_alone(place: Mounted) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "mine", place.point], check=True)
    try:
        for done in (place.try_mount(), place.umount()):
            assert done.returncode == 7 and "tmpfs" in one_line(done.stderr)
        assert len(at(str(place.point))) == 1
    finally:
        subprocess.run(["umount", place.point], check=True)


# the beginning


def test_what_cannot_be_mounted_says_so_in_a_line(place: Mounted) -> None:
    file = place.root / "file"
    file.touch()
    for point, code, text in (
        (file, 7, "not a directory"),
        (place.root / "absent", 7, "not a directory"),
    ):
        done = place.kvctl(*place.arguments()[:-1], str(point))
        assert done.returncode == code and text in one_line(done.stderr)
    done = place.kvctl("mount", "--store", str(place.root), str(place.point))
    assert done.returncode == 8 and "no store here" in one_line(done.stderr)
    for option, text in (("-onope", "unknown mount option"), ("-ouid=x", "not a number")):
        done = place.try_mount(option)
        assert done.returncode == 2 and text in one_line(done.stderr)
    done = place.try_mount("--log", str(place.root / "absent" / "log"))
    assert done.returncode == 7 and "cannot log" in one_line(done.stderr)
    assert not place.is_mounted()


def test_a_mount_over_what_it_needs_is_refused(place: Mounted) -> None:
    """Its process would wait for itself."""
    for point in (place.root, Path(place.store.path), place.index):
        done = place.kvctl(*place.arguments()[:-1], str(point))
        assert done.returncode == 7 and "would hide" in one_line(done.stderr)
    log = place.point / "log"
    done = place.try_mount("--log", str(log))
    assert done.returncode == 7 and "would hide" in one_line(done.stderr)


def test_relative_paths(place: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(1)
    monkeypatch.chdir(place.root)
    done = place.kvctl("mount", "--store=store", "--index=index", "--log=mount.log", "mnt")
    assert done.returncode == 0, done.stderr
    assert len(list(place.space.glob("*/*.kv"))) == 1 and "mounted at" in place.log()
    os.chdir(place.point)
    done = place.kvctl("umount", ".")
    assert done.returncode == 5 and f"process {os.getpid()}" in one_line(done.stderr)
    os.chdir("/")
    assert place.umount().returncode == 0


def test_without_the_packages(place: Mounted) -> None:
    for package in ("pyfuse3", "trio"):
        code = (
            f"import sys; sys.modules[{package!r}] = None; sys.argv[0] = 'kvctl'\n"
            "from kvfs.cli.main import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *place.arguments()],
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 7 and "kvfs[fuse]" in one_line(done.stderr)


@needs_root
@pytest.mark.parametrize(
    "prepare,text",
    [
        ("mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3", "there is no /dev/fuse"),
        ("mount --bind /dev/null /dev/fuse", "cannot mount"),
    ],
)
def test_without_the_device(place: Mounted, prepare: str, text: str) -> None:
    """As in a container: everything else works there, `kvctl ls` shows the same."""
    place.put(1)
    inside = ["unshare", "-m", "sh", "-c", f'{prepare} && exec "$@"', "sh"]
    require_mount_namespaces()
    done = subprocess.run(
        [*inside, *place.command(*place.arguments())],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 7 and text in one_line(done.stderr)
    done = place.kvctl("ls", "-R", "--store", place.store.path, "--index", str(place.index))
    listed = done.stdout.split()
    place.mount()
    found = [str(p.relative_to(place.point)) for p in place.point.rglob("*")]
    assert sorted(listed) == sorted(found)


# who may see it


@needs_root
def test_others_see_it_only_if_they_may(public: Mounted) -> None:
    public.put(1)
    block = "000000.kv"
    public.mount()
    assert "Permission denied" in as_nobody("ls", str(public.point)).stderr
    assert public.umount().returncode == 0
    public.mount("--allow-other")
    assert public.ns.name in as_nobody("ls", str(public.point)).stdout
    file = next(public.space.glob(f"*/{block}"))
    assert as_nobody("wc", "-c", str(file)).stdout.split()[0] == "300000"
    assert public.umount().returncode == 0
    public.mount("-oallow_other,umask=077")
    assert "Permission denied" in as_nobody("ls", str(public.point)).stderr
    assert public.umount().returncode == 0
    public.mount(f"-oallow_other,umask=077,uid={NOBODY},gid={NOBODY}")
    assert as_nobody("ls", str(public.point)).returncode == 0


@needs_root
def test_allow_other_of_who_may_not_names_the_file(public: Mounted) -> None:
    if as_nobody(sys.executable, "-c", "import kvfs, pyfuse3").returncode:
        pytest.skip("this checkout cannot be read by others")
    if "\nuser_allow_other" in Path("/etc/fuse.conf").read_text():
        pytest.skip("others are allowed here")
    done = as_nobody(*public.command(*public.arguments("--allow-other")))
    assert done.returncode == 7 and "/etc/fuse.conf" in one_line(done.stderr)


# The device lets everybody in, as on most systems; read access is for the interpreter's files.
_ORDINARY = """
mknod -m 666 {root}/fuse c 10 229 && mount --bind {root}/fuse /dev/fuse && chown -R 65534 {root} &&
exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search \\
    --ambient-caps=+dac_read_search -- sh -ec '
kvctl() {{ {python} -m kvfs "$@"; }}
kvctl {mount}
test -e {space}/namespace.json
(cd {point} && sleep 60) & sleeper=$!
until [ "$(readlink /proc/$sleeper/cwd)" = {point} ]; do :; done
kvctl umount {point} && exit 91 || test $? = 5
kill $sleeper
until kvctl umount {point}; do :; done
kvctl {mount}
kill -9 $({python} -c "import os; print(os.getxattr(\\"{point}\\", \\"user.kvfs.pid\\").decode())")
until ! ls {point} 2>/dev/null; do :; done
kvctl {mount}
test $(grep -c " {point} fuse.kvfs " /proc/mounts) = 1
kvctl umount --lazy {point}
'
"""


@needs_root
def test_an_ordinary_user_mounts(public: Mounted) -> None:
    """Through fusermount3: mount, in use, umount, dead and replaced."""
    require_mount_namespaces()
    public.put(1)
    public.store.close()
    script = _ORDINARY.format(
        root=public.root, python=sys.executable, mount=" ".join(public.arguments()),
        point=public.point, space=public.space,
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True, text=True, timeout=2 * SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is in use by sleep" in done.stderr and "had died" in done.stderr


# the process


def test_usr1_writes_the_stacks(place: Mounted) -> None:
    place.mount()
    os.kill(place.pid, signal.SIGUSR1)
    until(lambda: "most recent call first" in place.log())
    assert os.listdir(place.point)


def test_it_wakes_up_often_enough_not_to_freeze(place: Mounted) -> None:
    """The timer that bounds pyfuse3's blocking reads is on."""
    place.mount()
    status = Path(f"/proc/{place.pid}/status")

    def switches() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary"))
        return int(line.split()[1])

    before, began = switches(), time.monotonic()
    until(lambda: switches() - before >= 12)
    assert time.monotonic() - began < 5, "12 ticks of 50 ms"


def test_the_background_process_holds_no_terminal(place: Mounted) -> None:
    place.mount()
    for fd in ("0", "1", "2"):
        assert os.readlink(f"/proc/{place.pid}/fd/{fd}") == "/dev/null"
    assert os.readlink(f"/proc/{place.pid}/cwd") == "/"
    assert os.getsid(place.pid) == place.pid


def test_systemd_is_told(place: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.settimeout(SECONDS)
        s.bind(f"\0kvfs-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@kvfs-test-{os.getpid()}")
        process = place.mount_foreground()
        assert s.recv(100) == b"READY=1"
        process.terminate()
        assert s.recv(100) == b"STOPPING=1"
        assert process.wait(5) == 0


@pytest.mark.parametrize("name", [b"a,b c\\d \xc3\xa9", b"no \xff UTF-8"])
def test_names_of_stores_that_others_could_stumble_over(tmp_path: Path, name: bytes) -> None:
    """In mount options, in what is shown, and in the log."""
    with mounted(tmp_path, name=os.fsdecode(name)) as place:
        place.mount()
        (found,) = at(str(place.point))
        assert found.source == f"kvfs:{place.store.path}" and found.fstype == "fuse.kvfs"
        assert place.ns.name in os.listdir(place.point)
        assert os.fsencode(place.store.path) in (place.point / "README").read_bytes()
        path = os.getxattr(place.point, "user.kvfs.store")
        assert path == os.fsencode(place.store.path)
        assert place.umount().returncode == 0
        assert "mounted at" in place.log() and "unmounted" in place.log()


def test_the_table_of_mounts_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"36 35 98:0 /mnt1 /a\\040b\\134\xc3\xa9 rw,noatime master:1 - fuse.kvfs kvfs:/s\\054 rw\n"
        b"37 35 98:0 / / rw - ext4 /dev/root rw,errors=continue\n"
    )
    first, second = mounts(str(table))
    assert (first.point, first.source, first.ours) == ("/a b\\é", "kvfs:/s,", True)
    assert (second.point, second.fstype, second.ours) == ("/", "ext4", False)
    assert mount_of("/a b\\é/x", str(table)) == ("/a b\\é", "fuse.kvfs")
    assert mount_of("/a b\\éx", str(table)) == ("/", "ext4")


# mount(8)


@needs_root
def test_mount_t_kvfs(place: Mounted) -> None:
    helper = Path("/sbin/mount.kvfs")
    if helper.exists() or helper.is_symlink():
        pytest.skip("/sbin/mount.kvfs is there already")
    place.put(1)
    options = f"_netdev,nofail,x-systemd.requires=a,index={place.index},log={place.log_file}"
    try:
        code = "from kvfs.cli.mount_helper import main; main()"
        helper.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        helper.chmod(0o755)
        command = ["mount", "-t", "kvfs", place.store.path, str(place.point), "-o", options]
        kept = {k: v for k, v in os.environ.items() if k.startswith("KVFS")}
        done = subprocess.run(
            command, env=kept, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        (block,) = place.space.glob("*/*.kv")
        assert shutil.disk_usage(place.point).total > 0
        with pytest.raises(OSError, match="Read-only"):
            block.unlink()
        unmount = ["umount", "-t", "fuse.kvfs", str(place.point)]
        subprocess.run(unmount, check=True)
        subprocess.run([*command, "-o", "writable"], env=kept, timeout=SECONDS, check=True)
        block.unlink()
        done = subprocess.run(
            [*command[:-1], "ro,nonsense"], env=kept, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 and "nonsense" in done.stderr
    finally:
        helper.unlink()
    subprocess.run(unmount, check=True)
