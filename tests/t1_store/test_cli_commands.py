"""What the commands do, from end to end, and that their JSON is what their pages say."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvfs.cli.main import MAP
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool
from kvfs.store import Store
from kvfs.testing.command import kvctl, kvctl_json, run

PROMPT = list(range(1024))
OTHER = [*range(512), 7, *range(513, 1024)]


def text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


@pytest.fixture
def stored(cli_store: Path) -> Path:
    for prompt in (PROMPT, OTHER):
        kvctl("put", "--synthetic", "--tokens", text(prompt))
    return cli_store


# put and fetch


def test_bytes_come_back(cli_store: Path, tmp_path: Path) -> None:
    blocks, tokens, got = tmp_path / "kv", tmp_path / "tokens", tmp_path / "got"
    blocks.write_bytes(os.urandom(8 * 64))
    tokens.write_text(text(PROMPT))
    put = kvctl_json("put", tokens, "--blocks", blocks, "--class", "agent")
    assert (put["stored"], put["existing"], put["bytes"]) == (8, 0, 512)
    assert put["durable"] and put["error"] is None
    found = kvctl_json("fetch", tokens, "-o", got)
    assert (found["blocks"], found["wanted_blocks"], found["reason"]) == (7, 7, "hit")
    assert got.read_bytes() == blocks.read_bytes()[: 7 * 64]
    kvctl("fetch", tokens, "--stored", "-o", got)
    assert got.read_bytes() == blocks.read_bytes()
    assert kvctl("fetch", tokens, "-o", "-").stdout_bytes == blocks.read_bytes()[: 7 * 64]
    again = kvctl_json("put", tokens, "--blocks", "-", stdin=blocks.read_bytes())
    assert (again["stored"], again["existing"], again["bytes"]) == (0, 8, 0)


def test_in_pieces(cli_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfs.cli import put as module

    monkeypatch.setattr(module, "_PIECE_BYTES", 3 * 64)
    data = os.urandom(8 * 64)
    (tmp_path / "kv").write_bytes(data)
    put = kvctl_json("put", "--blocks", tmp_path / "kv", "--tokens", text(PROMPT))
    assert (put["stored"], put["existing"], put["bytes"]) == (8, 0, 512)
    again = kvctl_json("put", "--blocks", "-", "--tokens", text(PROMPT), stdin=data)
    assert (again["stored"], again["existing"]) == (0, 8)
    assert kvctl("fetch", "--stored", "--tokens", text(PROMPT), "-o", "-").stdout_bytes == data
    assert (
        "more bytes"
        in kvctl("put", "--blocks", "-", "--tokens", text(OTHER), stdin=data + b"x", code=2).stderr
    )
    assert (
        "only 500"
        in kvctl("put", "--blocks", "-", "--tokens", text(OTHER), stdin=data[:500], code=2).stderr
    )


def test_the_end_of_a_prompt(cli_store: Path, tmp_path: Path) -> None:
    data = os.urandom(8 * 64)
    (tmp_path / "kv").write_bytes(data[6 * 64 :])
    args = ("put", "--blocks", tmp_path / "kv", "--first-block", "6", "--tokens", text(PROMPT))
    refused = kvctl(*args, code=2)
    assert "not stored and were not given" in refused.stderr
    kvctl("put", "--synthetic", "--tokens", text(PROMPT[:768]))
    put = kvctl_json(*args)
    assert (put["stored"], put["existing"]) == (2, 6)
    got = kvctl("fetch", "--stored", "--tokens", text(PROMPT), "-o", "-").stdout_bytes
    assert got[6 * 64 :] == data[6 * 64 :]


def test_put_says_what_does_not_fit(cli_store: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(bytes(100))
    tokens = ("--tokens", text(PROMPT))
    for says, args in (
        ("100 bytes", ["--blocks", tmp_path / "kv", *tokens]),
        ("No such file", ["--blocks", tmp_path / "absent", *tokens]),
        ("either --blocks or", tokens),
        ("either --blocks or", ["--blocks", "-", "--synthetic", *tokens]),
        ("both come from", ["--blocks", "-"]),
        ("has 8 blocks", ["--synthetic", "--first-block", "9", *tokens]),
    ):
        assert says in kvctl("put", *args, code=2).stderr
    assert kvctl_json("stats")["blocks"] == 0


def test_a_plan_is_enough(stored: Path, tmp_path: Path) -> None:
    """A host with no index of the store fetches by a plan that another one made."""
    plan = tmp_path / "plan"
    plan.write_text(json.dumps(kvctl_json("check", "--tokens", text(PROMPT))))
    args = ("--plan", plan, "--index", tmp_path / "other", "--tokens", text(PROMPT))
    got = kvctl("fetch", *args, "-o", "-").stdout_bytes
    assert got == kvctl("fetch", "--tokens", text(PROMPT), "-o", "-").stdout_bytes
    assert "longer prompt" in kvctl("fetch", *args[:-1], "1,2", code=2).stderr
    other = kvctl_json("fetch", *args[:-1], text(OTHER), code=4)
    assert (other["blocks"], other["reason"]) == (4, "identity mismatch: tokens")
    plan.write_text("{}")
    assert "not a plan" in kvctl("fetch", *args, code=2).stderr


def test_fetch_ends_at_a_damaged_block(stored: Path, tmp_path: Path) -> None:
    where = kvctl_json("show", "--json", hash_of(PROMPT, 5))
    with open(stored / where["segment"], "r+b") as f:
        f.seek(where["offset"])
        f.write(b"\xff" * 8)
    found = kvctl_json("fetch", "--tokens", text(PROMPT), "-o", tmp_path / "kv", code=4)
    assert (found["blocks"], found["wanted_blocks"]) == (5, 7)
    assert "checksum" in found["reason"]
    assert (tmp_path / "kv").stat().st_size == 5 * 64
    assert kvctl_json("check", "--tokens", text(PROMPT), code=4)["stored_tokens"] == 5 * 128


def hash_of(ids: list[int], block: int) -> str:
    """The chain hash of a block, as --explain tells it of a prompt that is cut there."""
    from kvfs.store import Store

    with Store.open(os.environ["KVFS_STORE"]) as store:
        return store.namespaces()[0].hasher(ids).digest(block + 1).hex()


# namespaces


def test_namespaces(cli_store: Path, tmp_path: Path) -> None:
    spans = [{"layer": 0, "part": "kv", "offset": 0, "length": 100}]
    small = {"model": "m/n", "weights": "w", "tokenizer": "t", "spans": spans, "row_bytes": 128,
             "record_format": "raw"}  # fmt: skip
    file = tmp_path / "identity.json"
    file.write_text(json.dumps(small))
    made = kvctl_json("ns", "create", "--from", file)
    assert made["namespace"].startswith("m-n-") and made["row_bytes"] == 128
    assert (
        kvctl("ns", "create", "--from", "-", stdin=file.read_bytes()).stdout.strip()
        == made["namespace"]
    )
    assert len(kvctl_json("ns", "list")) == 2
    shown = kvctl_json("ns", "show", made["namespace"][:6])
    assert shown["identity"]["record_format"] == "raw" and shown["blocks"] == 0
    for says, change in (
        ("unknown fields: color", {"color": 1}),
        ("behind the row", {"row_bytes": 64}),
        ("unknown hash", {"hash": "md5"}),
    ):
        file.write_text(json.dumps({**small, **change}))
        said = kvctl("ns", "create", "--from", file, code=2).stderr
        assert says in said and str(file) in said
    file.write_text(json.dumps(small))
    for more in (["--hash", "blake3"], ["--hash", "xxh3-128"], ["--adapter", "a"], ["--tp", "0/2"]):
        assert "says it all" in kvctl("ns", "create", "--from", file, *more, code=2).stderr
    del small["weights"]
    file.write_text(json.dumps(small))
    assert "lacks fields: weights" in kvctl("ns", "create", "--from", file, code=2).stderr


def test_presets_and_ranks(cli_store: Path, tmp_path: Path) -> None:
    preset = ("ns", "create", "--preset", "llama-3.1-8b", "--weights", "w", "--tokenizer", "t")
    whole, half = kvctl_json(*preset), kvctl_json(*preset, "--tp", "1/2")
    assert half["row_bytes"] * 2 == whole["row_bytes"]
    (tmp_path / "salt").write_text("secret\n")
    salted = kvctl_json(*preset, "--salt-file", tmp_path / "salt")
    assert len({n["nsid"] for n in (whole, half, salted)}) == 3
    identity = kvctl_json("ns", "show", salted["namespace"])["identity"]
    assert "secret" not in json.dumps(identity) and identity["salt_digest"]
    for bytes_, says in ((b"\xff\x00\x80", "UTF-8"), (b"", "empty"), (b"\r\n\n", "empty")):
        (tmp_path / "salt").write_bytes(bytes_)
        assert says in kvctl(*preset, "--salt-file", tmp_path / "salt", code=2).stderr
    for args in (["--tp", "2"], ["--tp", "2/2"], ["--from", "x"]):
        kvctl(*preset, *args, code=2)
    assert (
        kvctl_json(*preset, "--hash", "xxh3-128")
        == whole
        != kvctl_json(*preset, "--hash", "blake3")
    )
    kvctl("ns", "create", "--preset", "tiny", code=2)
    kvctl("ns", "create", code=2)


# classes


def test_classes(stored: Path) -> None:
    assert kvctl_json("ttl")["classes"] == {"agent": 259200, "chatbot": 604800}
    assert kvctl_json("ttl", "define", "session", "12h")["classes"]["session"] == 43200
    assert kvctl_json("ttl", "set", "session", "--tokens", text(PROMPT))["runs"] == 1
    assert kvctl_json("show", hash_of(PROMPT, 0))["class"] == "session"
    assert kvctl_json("show", hash_of(OTHER, 4))["class"] == "chatbot"
    assert kvctl_json("ttl", "set", "agent", "--all")["runs"] == 2
    expires = kvctl_json("show", hash_of(OTHER, 4))["expires_ms"] / 1000
    assert abs(expires - time.time() - 3 * 86400) < 60
    assert kvctl_json("ttl", "set", "chatbot", "--node", hash_of(PROMPT, 0)[:8])["runs"] == 2
    for args in (
        ["define", "x/y", "1h"], ["define", "x", "soon"], ["define", "x", "0s"],
        ["set", "absent", "--all"], ["set", "agent", "--all", "--tokens", "1"],
    ):  # fmt: skip
        kvctl("ttl", *args, code=2)


def test_init_takes_settings(tmp_path: Path) -> None:
    made = kvctl_json(
        "init", tmp_path / "s", "--extent", "1MiB", "--segment", "8M", "--durability", "none",
        "--grace", "5min", "--class", "session=2h", "--class", "agent=1d",
    )  # fmt: skip
    assert (made["extent"], made["segment_bytes"]) == (1 << 20, 8 << 20)
    assert (made["durability"], made["grace_seconds"]) == ("none", 300)
    assert made["classes"] == {"agent": 86400, "chatbot": 604800, "session": 7200}
    for args in (["--extent", "5000"], ["--class", "x"], ["--class", "x=never"], ["--grace", "-1"]):
        kvctl("init", tmp_path / "t", *args, code=2)
    assert not (tmp_path / "t" / "kvfs.json").exists()


def test_the_defaults_of_init_are_the_library_s(tmp_path: Path) -> None:
    from kvfs.cli.init import command
    from kvfs.cli.values import BYTES, DURATION
    from kvfs.config import StoreConfig

    config = StoreConfig(bytes(16))
    told = {p.name: (p.help or "").rpartition("Default: ")[2].rstrip(".") for p in command.params
            if hasattr(p, "help")}  # fmt: skip
    assert BYTES.convert(told["extent"], None, None) == config.extent
    assert BYTES.convert(told["segment_bytes"], None, None) == config.segment_bytes
    assert DURATION.convert(told["grace_seconds"], None, None) == config.grace_seconds
    assert told["durability"] == config.durability


# the tree, and removing


def test_the_tree_without_a_mount(stored: Path, cli_namespace: str) -> None:
    assert kvctl("ls").stdout.split() == ["README", cli_namespace]
    name, node = kvctl("ls", cli_namespace).stdout.split()
    assert name == "namespace.json" and node.startswith("000000-")
    below = kvctl("ls", f"{cli_namespace}/{node}").stdout.split()
    (fork,) = (name for name in below if "-" in name)
    assert set(below) == {f"{i:06d}.kv" for i in range(8)} | {fork, "tokens"}
    assert kvctl("ls", node).stdout.split() == below
    assert kvctl("ls", f"/{cli_namespace}/{node}/{fork}/").stdout.split() == [
        *(f"{i:06d}.kv" for i in range(4, 8)), "tokens",
    ]  # fmt: skip
    assert kvctl("ls", f"{node}/000003.kv").stdout.strip() == "000003.kv"
    entries = {e["path"]: e for e in kvctl_json("ls", "-R")}
    assert len(entries) == 2 + 2 + 10 + 5
    block = entries[f"{cli_namespace}/{node}/{fork}/000004.kv"]
    assert (block["type"], block["size"]) == ("file", 64)
    assert f"{node}/{fork}" in kvctl("ls", "-lR", cli_namespace).stdout
    for path in ("absent", f"{node}/000009.kv", f"{node}/tokens/x", f"{node}/000000-0000"):
        kvctl("ls", path, code=2)


def test_show_by_any_name(stored: Path, cli_namespace: str) -> None:
    node = kvctl("ls", cli_namespace).stdout.split()[1]
    hash_ = hash_of(PROMPT, 3)
    shown = kvctl_json("show", hash_, "--ids")
    assert (shown["block"], shown["first_token"], shown["hash"]) == (3, 384, hash_)
    assert shown["token_ids"] == PROMPT[384:512] and shown["damage"] is None
    assert shown["children"] == 1
    for name in (hash_[:6], f"{node}/000003.kv", f"{cli_namespace}/{node}/000003.kv"):
        assert kvctl_json("show", name)["hash"] == hash_
    assert kvctl_json("show", node)["block"] == 0
    assert kvctl_json("show", hash_of(OTHER, 5))["block"] == 5
    plain = kvctl("show", "--ids", hash_).stdout
    assert hash_ in plain and "verified     yes" in plain and text(PROMPT[384:388]).split(",")
    with open(stored / shown["segment"], "r+b") as f:
        f.seek(shown["offset"])
        f.write(b"\xff")
    damaged = kvctl_json("show", hash_, code=12)
    assert "checksum" in damaged["damage"] and damaged["checksum"] is None


def test_rm(stored: Path, cli_namespace: str) -> None:
    node = kvctl("ls", cli_namespace).stdout.split()[1]
    assert kvctl_json("rm", "--from-block", "6", "--tokens", text(PROMPT))["blocks"] == 2
    assert kvctl_json("check", "--tokens", text(PROMPT), code=4)["stored_tokens"] == 768
    assert kvctl_json("rm", "--node", f"{node}/000002.kv")["blocks"] == 4 + 4
    assert kvctl_json("check", "--tokens", text(OTHER), code=4)["stored_tokens"] == 256
    assert kvctl_json("rm", "--all")["blocks"] == 2
    assert kvctl_json("rm", "--all", code=3)["blocks"] == 0
    assert kvctl_json("rm", "--tokens", text(PROMPT), code=3)["blocks"] == 0
    for args in (["--all", "--node", node], ["--node", "zz"], ["--node", "abcd1234"]):
        kvctl("rm", *args, code=2)
    assert kvctl_json("stats")["blocks"] == 0
    kvctl("put", "--synthetic", "--tokens", text(PROMPT))
    kvctl("check", "--tokens", text(PROMPT))


# slots


def test_pull_without_a_secret(
    cli_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of this host needs none; else it says that nobody else was asked."""
    monkeypatch.delenv("KVFS_PEER_SECRET", raising=False)
    create = ("ns", "create", "--preset", "tiny-swa", "--weights", "w", "--tokenizer", "t")
    name = kvctl_json(*create)["namespace"]
    line = ("--ns", name, "--tokens", text(PROMPT))
    kvctl("put", "--synthetic", *line)
    pull = ("state", "pull", "--slots", tmp_path, *line)
    with Store.open(cli_store) as store:
        ns = store.namespace(name)
    with SlotPool.open(ns.identity, 100_000, directory=str(tmp_path)) as pool:
        missed = kvctl_json(*pull, code=3)
        assert missed["source"] == "" and "other hosts were not asked" in missed["reasons"][-1]
        pool.write(Anchor.of(ns.hasher(PROMPT), 768), bytes(pool.slot_bytes))
        found = kvctl_json(*pull)
        assert (found["source"], found["reasons"]) == ("local", [])
    # To ask another host takes one.
    kvctl("state", "slots", "--ns", name, "--at", "127.0.0.1:1", code=7)


# fsck and gc


def test_fsck_finds_and_drops(stored: Path) -> None:
    assert kvctl_json("fsck")["records"] == 12
    assert "all sound" in kvctl("fsck").stdout
    where = kvctl_json("show", hash_of(PROMPT, 5))
    with open(stored / where["segment"], "r+b") as f:
        f.seek(where["offset"])
        f.write(b"\xff")
    report = kvctl_json("fsck", code=12)
    assert report["damage"] == 1 and not report["repaired"]
    (finding,) = (f for f in report["findings"] if f["level"] == "damage")
    assert (finding["path"], finding["slot"]) == (where["segment"], where["slot"])
    said = kvctl("fsck", "--repair", code=12).stdout
    assert "took 3 blocks out of sight" in said and where["segment"] in said
    assert kvctl_json("fsck")["records"] == 9
    assert kvctl_json("check", "--tokens", text(PROMPT), code=4)["stored_tokens"] == 5 * 128


def test_gc_gives_room_back(stored: Path) -> None:
    assert kvctl_json("gc", "--dry-run")["live"] == 2
    kvctl("rm", "--all")
    result = kvctl_json("gc", "--force")
    assert result["dropped"] or result["being_written"]
    assert not list(stored.glob("lease*")), "the lease is given back"


# replay


def test_replay_in_a_store_of_its_own(tmp_path: Path) -> None:
    args = ("replay", "--temporary", "--dir", tmp_path, "--limit", "40", "weka_claude_code_small")
    alone, two = kvctl_json(*args), kvctl_json(*args, "--processes", "2")
    for key in ("requests", "input_tokens", "stored_tokens", "hit_tokens", "bytes_put",
                "bytes_fetched"):  # fmt: skip
        assert alone[key] == two[key]
    assert alone["requests"] == 40 and 0 < alone["hit_tokens"] <= alone["stored_tokens"]
    assert alone["bytes_put"] and alone["bytes_fetched"] and not alone["failures"]
    assert os.listdir(tmp_path) == []
    plain = kvctl(*args).stdout
    assert f"{alone['stored_tokens']:,}" in plain


def test_replay_in_a_given_store(cli_store: Path, cli_namespace: str) -> None:
    args = ("replay", "--limit", "20", "weka_claude_code_small")
    first, again = kvctl_json(*args), kvctl_json(*args)
    assert first["namespace"] == cli_namespace
    assert again["bytes_put"] == 0 and again["hit_tokens"] >= first["hit_tokens"]
    other = kvctl_json(*args, "--preset", "tiny-swa", "--trace-time")
    assert other["namespace"] != cli_namespace and other["bytes_put"]
    stopped = kvctl_json(*args, "--preset", "llama-3.1-8b", "--max-bytes", "1M", "--no-fetch")
    assert stopped["stopped"] == "max_bytes" and stopped["bytes_put"] == 0
    assert {t["trace"] for t in kvctl_json("replay", "--list")} >= {"weka_claude_code_small"}
    kvctl("replay", code=2)


# the documentation of the JSON output


def documented(name: str) -> set[str]:
    """All words in the terms of the lists of a command's manual."""
    manual = getattr(importlib.import_module(f"kvfs.cli.{name}"), "MANUAL", {})
    return set(re.findall(r"[\w.]+", " ".join(manual.values())))


def test_every_json_field_is_in_the_manual(stored: Path, cli_namespace: str) -> None:
    ids = ("--tokens", text(PROMPT))
    outputs: dict[str, list[Any]] = {
        "init": [kvctl_json("init", stored.with_name("other"))],
        "ns": [kvctl_json("ns", "list"), kvctl_json("ns", "show", cli_namespace)],
        "ttl": [kvctl_json("ttl"), kvctl_json("ttl", "set", "agent", "--all")],
        "check": [kvctl_json("check", *ids),
                  kvctl_json("check", "--explain", "--tokens", text([7, *PROMPT]), code=3)],
        "fetch": [kvctl_json("fetch", *ids)],
        "put": [kvctl_json("put", "--synthetic", *ids)],
        "ls": [kvctl_json("ls", "-R")[0]],
        "show": [kvctl_json("show", "--ids", hash_of(PROMPT, 0))],
        "rm": [kvctl_json("rm", *ids)],
        "gc": [kvctl_json("gc")],
        "limits": [kvctl_json("limits", "--namespace", f"{cli_namespace}=1G")],
        "fsck": [kvctl_json("fsck")],
        "rebuild": [kvctl_json("rebuild")],
        "replay": [kvctl_json("replay", "--limit", "3", "weka_claude_code_small")],
        "doctor": [kvctl_json("doctor")[0]],
        "plan": [kvctl_json("plan")],
        "version": [kvctl_json("version")],
        "stats": [kvctl_json("stats")],
        "status": [kvctl_json("status")],
    }  # fmt: skip
    names = {name for commands in MAP.values() for name in commands}
    assert names - set(outputs) == {
        "mount",
        "umount",
        "bench",
        "state",
        "serve",
        "drain",
        "fetcher",
    }
    quotas = {"namespaces", "used_namespaces", "tenants"}
    free = {"ns": {"identity"}, "version": {"packages"}, "limits": quotas} | dict.fromkeys(
        ("init", "ttl", "stats"), {"classes"}
    )
    for name, printed in outputs.items():
        used = set().union(*(keys(o, free.get(name, set())) for o in printed))
        missing = used - documented(name)
        assert not missing, f"kvctl-{name}(1) does not explain {sorted(missing)}"


def keys(value: Any, free: set[str]) -> set[str]:
    """All keys at any depth; the keys within those of `free` are not names of fields."""
    if isinstance(value, list):
        return set().union(*(keys(v, free) for v in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    inner = (keys(v, free) for k, v in value.items() if k not in free)
    return {str(k).split(".")[0] if "." in str(k) else k for k in value} | set().union(*inner)


def test_the_rest_prints_something(stored: Path) -> None:
    for args in (["version"], ["doctor"], ["stats"], ["gc", "--dry-run"], ["rebuild"], ["ttl"],
                 ["ns", "list"], ["replay", "--list"]):  # fmt: skip
        assert kvctl(*args).stdout
    assert run("version").stdout.startswith(b"kvfs ")
