"""What `kvctl rm` takes away, for this host and for one that is a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvfs.testing.command import kvctl, kvctl_json, run

PROMPT, OTHER = list(range(1024)), [*range(512), *range(9000, 9512)]


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def stored(cli_store: Path) -> Path:
    """Eight blocks of one prompt, four more of a fork; the grace is over at once."""
    marker = cli_store / "kvfs.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "grace_seconds": 0.0}))
    for prompt in (PROMPT, OTHER):
        kvctl("put", "--synthetic", "--tokens", text(prompt))
    return cli_store


def elsewhere(tmp_path: Path, *args: object) -> Any:
    """What kvctl says on another host: a process with an index of its own."""
    done = run(*args, "--json", "--index", str(tmp_path / "elsewhere"))
    assert done.returncode in (0, 3, 4), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def blocks_there(tmp_path: Path, prompt: list[int]) -> int:
    elsewhere(tmp_path, "ls")  # reads the journals, which a check does not
    (plan,) = elsewhere(tmp_path, "check", "--tokens", text(prompt))
    tokens: int = plan["stored_tokens"]
    return tokens // 128


def tenant(name: str, salt: str, tmp_path: Path) -> tuple[str, str]:
    """A namespace of a tenant: its name, and the digest of the salt."""
    file = tmp_path / f"salt-{salt}"
    file.write_text(salt)
    made = kvctl_json("ns", "create", "--preset", "tiny", "--weights", name, "--tokenizer", "t",
                      "--salt-file", str(file))  # fmt: skip
    shown = kvctl_json("ns", "show", made["namespace"])
    return made["namespace"], shown["identity"]["salt_digest"]


def test_a_prompt_goes_for_another_host_also_its_own_copy(stored: Path, tmp_path: Path) -> None:
    other = ("--index", str(tmp_path / "elsewhere"))
    ids = text([*range(5000, 5512)])
    kvctl("ls", *other)
    kvctl("put", "--synthetic", "--tokens", ids)
    with pytest.MonkeyPatch.context() as patch:  # it has not heard of the first copy
        patch.setattr("kvfs.store.Store.catch_up", lambda *_, **__: None)
        assert kvctl_json("put", "--synthetic", "--tokens", ids, *other)["stored"] == 4
    assert kvctl_json("rm", "--from-block", "1", "--tokens", ids)["blocks"] == 3
    assert blocks_there(tmp_path, [*range(5000, 5512)]) == 1
    receipt = kvctl_json("rm", "--tokens", ids, "--purge")
    assert receipt["complete"] and receipt["blocks"] == 1
    assert {f["removed_ms"] is not None for f in receipt["files"]} == {True}
    assert len(receipt["files"]) == 2
    assert blocks_there(tmp_path, [*range(5000, 5512)]) == 0
    assert blocks_there(tmp_path, PROMPT) == 8


def test_a_prefix_by_hash_or_path(stored: Path, cli_namespace: str, tmp_path: Path) -> None:
    node = kvctl("ls", cli_namespace).stdout.split()[1]
    fork = next(p for p in kvctl("ls", f"{cli_namespace}/{node}").stdout.split() if "-" in p)
    assert kvctl_json("rm", "--prefix", f"{node}/{fork}", "-n")["blocks"] == 4
    assert blocks_there(tmp_path, OTHER) == 8
    assert kvctl_json("rm", "--prefix", f"{node}/{fork}")["blocks"] == 4
    assert (blocks_there(tmp_path, OTHER), blocks_there(tmp_path, PROMPT)) == (4, 8)
    digits = kvctl_json("show", f"{node}/000006.kv")["hash"][:8]
    assert kvctl_json("rm", "--prefix", digits)["blocks"] == 2
    assert (blocks_there(tmp_path, OTHER), blocks_there(tmp_path, PROMPT)) == (4, 6)


def test_a_dry_run_changes_nothing(stored: Path, cli_namespace: str) -> None:
    before = kvctl_json("stats")["blocks"]
    for args, blocks in (
        (("--tokens", text(PROMPT)), 12), (("--from-block", "6", "--tokens", text(PROMPT)), 2),
        (("--all",), 12), (("--namespace", cli_namespace), 12),
    ):  # fmt: skip
        assert kvctl_json("rm", "--dry-run", *args)["blocks"] == blocks == kvctl_json(
            "rm", "--dry-run", "--purge", *args
        )["blocks"]  # fmt: skip
    assert kvctl_json("stats")["blocks"] == before == 12
    assert "would evict 12 blocks" in kvctl("rm", "-n", "--all").stdout


def test_a_namespace_goes_from_every_list_and_comes_back(
    stored: Path, cli_namespace: str, tmp_path: Path
) -> None:
    assert [e["path"] for e in elsewhere(tmp_path, "ls")][1:] == [cli_namespace]
    assert kvctl_json("rm", "--namespace", cli_namespace)["blocks"] == 12
    assert kvctl_json("ns", "list") == [] and elsewhere(tmp_path, "ns", "list") == []
    assert [e["path"] for e in elsewhere(tmp_path, "ls")] == ["README"]
    kvctl("rm", "--namespace", cli_namespace, code=2)
    kvctl("check", "--ns", cli_namespace, "--tokens", text(PROMPT), code=2)
    receipt = kvctl_json("rm", "--namespace", cli_namespace, "--purge")
    assert receipt["complete"] and receipt["removed_bytes"] > 12 * 4096
    assert list(stored.rglob("*.seg")) == [] and not (stored / "ns" / cli_namespace).exists()
    kvctl("ns", "create", "--preset", "tiny", "--weights", "w", "--tokenizer", "t")
    assert kvctl_json("ns", "list")["namespace"] == cli_namespace
    assert [n["namespace"] for n in elsewhere(tmp_path, "ns", "list")] == [cli_namespace]
    kvctl("put", "--synthetic", "--tokens", text(PROMPT))
    assert blocks_there(tmp_path, PROMPT) == 8
    assert [n["namespace"] for n in elsewhere(tmp_path, "ns", "list")] == [cli_namespace]


def test_a_tenant_goes_with_all_its_namespaces(
    stored: Path, cli_namespace: str, tmp_path: Path
) -> None:
    names, digests = zip(
        *(tenant(model, salt, tmp_path) for model, salt in (("a", "x"), ("b", "x"), ("a", "y"))),
        strict=True,
    )  # fmt: skip
    assert digests[0] == digests[1] != digests[2]
    for name in names:
        kvctl("put", "--synthetic", "--ns", name, "--tokens", text(PROMPT))
    kvctl("rm", "--tenant", "blake2b:0", code=2)
    receipts = kvctl_json("rm", "--tenant", digests[0], "--purge")
    assert sorted(r["namespace"] for r in receipts) == sorted(names[:2])
    assert all(r["complete"] and r["blocks"] == 8 for r in receipts)
    left = {n["namespace"] for n in elsewhere(tmp_path, "ns", "list")}
    assert left == {cli_namespace, names[2]}
    assert {p.parts[-2] for p in stored.rglob("*.seg")} == left
    receipt = kvctl_json("rm", "--tenant", digests[2])
    assert (receipt["namespace"], receipt["blocks"]) == (names[2], 8)


def test_on_a_terminal_it_asks_first(
    stored: Path, cli_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        asked.append(question)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfs.cli.rm._on_terminal", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    kvctl("rm", "--namespace", cli_namespace, code=130)
    assert len(asked) == 1 and cli_namespace in asked[0]
    assert kvctl_json("rm", "--namespace", cli_namespace, "--dry-run")["blocks"] == 12
    assert kvctl_json("rm", "--namespace", cli_namespace, "--yes")["blocks"] == 12
    assert len(asked) == 1


def test_one_of_them(stored: Path, cli_namespace: str) -> None:
    for args in (
        ("--all", "--namespace", cli_namespace),
        ("--tenant", "x", "--namespace", cli_namespace),
        ("--tenant", "x", "--tokens", "1"),
        ("--namespace", "nobody"),
        ("--namespace", ""),  # what a script's variable that is not set makes of a line
        ("--all", "--ns", ""),
        ("--all", "--store", ""),
        ("--namespace", cli_namespace, "--ns", cli_namespace),
        *((*what, *of_tokens) for what in (
            ("--all",), ("--node", "000000"), ("--namespace", cli_namespace), ("--tenant", "x"),
        ) for of_tokens in (("--from-block", "0"), ("--tokens-format", "u32"))),
    ):  # fmt: skip
        kvctl("rm", *args, code=2)
    assert kvctl_json("stats")["blocks"] == 12


def test_a_file_that_is_still_written_is_pending_and_can_be_finished(
    stored: Path, cli_namespace: str
) -> None:
    path = next(stored.rglob("*.seg"))
    alien = path.with_name(path.name.replace("-000000.seg", "-000999.seg"))
    alien.write_bytes(b"")
    receipt = kvctl_json("rm", "--namespace", cli_namespace, "--purge", code=5)
    (pending,) = (f for f in receipt["files"] if f["removed_ms"] is None)
    assert pending["path"].endswith("-000999.seg") and "being written" in pending["pending"]
    assert (stored / "ns" / cli_namespace).exists() and not receipt["complete"]
    os.unlink(alien)
    again = kvctl_json("rm", "--namespace", cli_namespace, "--purge", code=3)
    assert again["complete"] and not (stored / "ns" / cli_namespace).exists()
