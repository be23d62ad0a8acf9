"""`kvctl check --explain`: where a prompt leaves what is stored, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfs.testing.command import kvctl, kvctl_json

BLOCK = 128
PROMPT = [100 + i for i in range(10 * BLOCK)]


def text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def explained(ids: list[int], code: int) -> Any:
    return kvctl_json("check", "--explain", "-", stdin=text(ids).encode(), code=code)


@pytest.fixture
def stored(cli_store: Path) -> Path:
    kvctl("put", "--synthetic", "--tokens", text(PROMPT))
    return cli_store


def changed(at: int) -> list[int]:
    return [*PROMPT[:at], 7, *PROMPT[at + 1 :]]


def test_a_changed_token_in_block_0(stored: Path) -> None:
    plan = explained(changed(17), code=3)
    why = plan["explain"]
    assert plan["reason"] == "root unknown"
    assert (why["block"], why["first_token"], why["sibling_count"]) == (0, 0, 1)
    (sibling,) = why["siblings"]
    assert (sibling["common_tokens"], sibling["ours"], sibling["theirs"]) == (17, 7, 117)
    assert sibling["shift"] == 0


def test_a_changed_token_in_block_5(stored: Path) -> None:
    plan = explained(changed(5 * BLOCK + 3), code=4)
    why = plan["explain"]
    assert plan["reason"] == "diverged at block 5"
    assert (why["block"], why["first_token"]) == (5, 5 * BLOCK)
    assert why["siblings"][0]["common_tokens"] == 3
    said = kvctl("check", "--explain", "--tokens", text(changed(5 * BLOCK + 3)), code=4).stdout
    assert "block 5 (tokens 640 to 767)" in said
    assert "token 643 is 7 here and 743 there" in said


def test_a_token_in_front(stored: Path) -> None:
    for ids, shift in (([1, *PROMPT], 1), (PROMPT[2:], -2)):
        plan = explained(ids, code=3)
        assert plan["reason"] == "root unknown"
        assert plan["explain"]["siblings"][0]["shift"] == shift
    said = kvctl("check", "--explain", "--tokens", text([1, *PROMPT]), code=3).stdout
    assert "1 more in front here" in said


def test_no_tokens_and_too_few(stored: Path) -> None:
    assert explained([], code=3)["reason"] == "no tokens"
    assert explained(PROMPT[:100], code=3)["reason"] == "short"


def test_the_nearest_sibling_comes_first(stored: Path) -> None:
    for at in (2 * BLOCK + 5, 2 * BLOCK + 60, 2 * BLOCK + 20):
        kvctl("put", "--synthetic", "--tokens", text(changed(at)))
    ids = changed(2 * BLOCK + 60)
    ids[2 * BLOCK + 100] = 9
    why = explained(ids, code=4)["explain"]
    assert why["sibling_count"] == 4
    assert [s["common_tokens"] for s in why["siblings"]] == [100, 60, 20]


def test_another_namespace_has_it(stored: Path, cli_namespace: str) -> None:
    kvctl("ns", "create", "--preset", "tiny", "--weights", "other", "--tokenizer", "t")
    names = [ns["namespace"] for ns in kvctl_json("ns", "list")]
    (other,) = set(names) - {cli_namespace}
    plan = kvctl_json("check", "--explain", "--ns", other, "--tokens", text(PROMPT), code=3)
    assert plan["explain"]["elsewhere"] == [
        {"namespace": cli_namespace, "stored_tokens": len(PROMPT)}
    ]


def test_a_full_hit_needs_no_explanation(stored: Path) -> None:
    assert "explain" not in explained(PROMPT, code=0)


def test_an_expired_block(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from kvfs.store import Store

    late = time.time() + 30 * 86400
    opened = Store.open
    monkeypatch.setattr(Store, "open", lambda *a, **k: opened(*a, clock=lambda: late, **k))
    plan = explained(PROMPT, code=3)
    assert plan["reason"] == "expired at block 0"
    assert 0 < plan["explain"]["expired_ms"] <= late * 1000
    assert plan["explain"]["siblings"] == []


def test_an_unreadable_sibling_is_counted(stored: Path) -> None:
    for segment in stored.glob("seg/**/*.seg"):
        segment.unlink()
    (sibling,) = explained(changed(17), code=3)["explain"]["siblings"]
    assert sibling["common_tokens"] is None


def test_stats_tell_the_reasons_apart(stored: Path) -> None:
    for i in range(20):
        kvctl("check", "-q", "--tokens", text([i, *PROMPT[1:]]), code=3)
    kvctl("check", "-q", "--tokens", text(changed(5 * BLOCK)), code=4)
    kvctl("check", "-q", "-", code=3)
    stats = kvctl_json("stats")
    assert stats["check.root_unknown"] == 20
    assert stats["check.diverged"] == 1
    assert stats["check.no_tokens"] == 1
