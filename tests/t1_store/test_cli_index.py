"""Where an index may lie, and what becomes of one that is lost or spoilt."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfs.index import Index, place
from kvfs.testing.command import command, environment, kvctl, kvctl_json

PROMPT = ",".join(map(str, range(1024)))


@pytest.mark.parametrize("kind", ["overlay", "fuse.sshfs", "fuse", "nfs4", "lustre", "virtiofs"])
def test_an_index_on_a_shared_file_system_is_refused(
    cli_store: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("KVFS_INDEX_FORCE")
    monkeypatch.setattr(place, "filesystem_type", lambda path: kind)
    for args in (["check", "--tokens", "1"], ["stats"], ["put", "--synthetic", "--tokens", "1"]):
        said = kvctl(*args, code=7).stderr
        assert kind in said and "KVFS_INDEX" in said and said.count("\n") == 1
    facts = {fact["name"]: fact for fact in kvctl_json("doctor", code=7)}
    assert facts["index"]["state"] == "fault"
    monkeypatch.setenv("KVFS_INDEX_FORCE", "1")
    kvctl("stats")


def test_a_real_overlay_is_refused(cli_store: Path, tmp_path: Path) -> None:
    """Mounted in a mount namespace of its own, which goes with the command."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    places = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = f"mount -t overlay -o {places} none {tmp_path}/merged"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no overlay can be mounted here")
    words = " ".join(map(str, command("check", "--tokens", "1", "--index", tmp_path / "merged")))
    env = environment()
    del env["KVFS_INDEX_FORCE"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {words}"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert "overlay file system" in done.stderr
    assert os.listdir(tmp_path / "upper") == []


def index_files(index_dir: Path) -> Path:
    (found,) = (path.parent for path in index_dir.glob("*/data.mdb"))
    return found


def garble(file: Path) -> None:
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.write(os.urandom(size))


@pytest.mark.parametrize("damage", ["gone", "data", "lock", "data and lock", "data gone"])
def test_a_spoilt_index_is_made_anew(cli_store: Path, index_dir: Path, damage: str) -> None:
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    before = kvctl_json("check", "--tokens", PROMPT)
    place_ = index_files(index_dir)
    if damage == "gone":
        shutil.rmtree(index_dir)
    elif damage == "data gone":
        (place_ / "data.mdb").unlink()
    else:
        for name in ("data", "lock"):
            if name in damage:
                garble(place_ / f"{name}.mdb")
    assert kvctl_json("check", "--tokens", PROMPT) == before
    assert kvctl_json("stats")["blocks"] == 8


def test_rebuild_from_either_source(cli_store: Path) -> None:
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    before = kvctl_json("check", "--tokens", PROMPT)
    kvctl("rm", "--from-block", "6", "--tokens", PROMPT)
    assert kvctl_json("rebuild", "--from", "journals")["blocks"] == 6
    assert kvctl_json("rebuild", "--from", "segments")["blocks"] == 8
    assert kvctl_json("check", "--tokens", PROMPT) == before
    assert kvctl_json("rebuild")["source"] == "journals"


def test_an_index_of_another_format(cli_store: Path, index_dir: Path) -> None:
    """As an older or a newer kvfs left it: refused everywhere but in rebuild."""
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    path = index_files(index_dir)
    index = Index(str(path), bytes.fromhex(path.name))
    index.write(lambda a: a.txn.put(b"mformat", b"0"))
    index.close()
    for args in (["check", "--tokens", PROMPT], ["stats"]):
        assert "kvctl rebuild" in kvctl(*args, code=13).stderr
    with open(path / "users.lock") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert "has this index open" in kvctl("rebuild", code=5).stderr
    assert kvctl_json("rebuild")["blocks"] == 8
    kvctl("check", "--tokens", PROMPT)


def test_check_needs_no_storage(cli_store: Path) -> None:
    """The store may be away: the index of this host answers. All else says so."""
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    cli_store.rename(cli_store.with_name("away"))
    assert kvctl_json("check", "--tokens", PROMPT)["stored_tokens"] == 1024
    assert kvctl_json("stats", "--local")["blocks"] == 8
    for args in (
        ["check", "--catch-up"],
        ["check", "--explain"],
        ["fetch"],
        ["put", "--synthetic"],
    ):
        said = kvctl(*args, "--tokens", PROMPT, code=8).stderr
        assert "Is the file system mounted?" in said
    assert not cli_store.exists()


def test_another_host_sees_what_was_put(cli_store: Path, tmp_path: Path) -> None:
    """An index of its own stands for a host of its own."""
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    other = ("--index", tmp_path / "other")
    assert kvctl_json("check", *other, "--tokens", PROMPT)["stored_tokens"] == 1024
    longer = PROMPT + "," + PROMPT
    kvctl("put", "--synthetic", "--tokens", longer)
    assert kvctl_json("check", *other, "--tokens", longer, code=4)["stored_tokens"] == 1024
    assert kvctl_json("check", *other, "--catch-up", "--tokens", longer)["stored_tokens"] == 2048
    # A namespace that the index does not know is looked for in the store.
    kvctl("ns", "create", "--preset", "tiny", "--weights", "new", "--tokenizer", "t")
    name = next(
        n["namespace"] for n in kvctl_json("ns", "list") if n["namespace"] != _only(cli_store)
    )
    assert kvctl_json("check", *other, "--ns", name, "--tokens", PROMPT, code=3)


def _only(store: Path) -> str:
    """The oldest namespace of a store."""
    return min((store / "ns").iterdir(), key=lambda path: path.stat().st_mtime_ns).name
