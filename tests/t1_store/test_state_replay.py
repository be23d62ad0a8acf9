"""State policies in a replay: sums against a model of its own, and how the rules compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import presets
from kvfs.errors import InputError
from kvfs.sim import trace
from kvfs.sim.lockstep import replay_processes
from kvfs.sim.model import PrefixModel
from kvfs.sim.replay import Options, replay
from kvfs.sim.synth import TokenSynth
from kvfs.sim.windows import ENDS, Sums
from kvfs.store import Store
from kvfs.testing.command import kvctl, kvctl_json

WEKA = "weka_claude_code_small"
POLICIES = ("full", "periodic:512", "last", "last:1", "zero")
LIMIT = 250


def reckoned(limit: int) -> dict[str, tuple[int, int, int]]:
    """policy -> (hit, replayed, slots), from real tokens and the rules as they are written."""
    opened = trace.find(WEKA)
    synth, model = TokenSynth(128, WEKA), PrefixModel()
    slots: dict[str, set[int]] = {name: set() for name in (*POLICIES, ENDS)}
    nodes: dict[tuple[int, bytes], int] = {}  # a block behind the node before it -> node
    sums = {name: [0, 0] for name in slots}
    for i, request in enumerate(opened.requests()):
        if i == limit:
            break
        text = synth.tokens(request).tobytes()
        tokens = len(text) // 4
        stored = model.step(synth.tokens(request))

        path = [0]
        for block in range(0, len(text) // 512 * 512, 512):
            path.append(nodes.setdefault((path[-1], text[block : block + 512]), len(nodes) + 1))

        def at(position: int, path: list[int] = path) -> int:
            return path[position // 128]

        l1 = min(stored, max(0, tokens - 134) // 128 * 128)
        for name in POLICIES:
            if l1 and at(l1) in slots[name]:
                sums[name][0] += l1
            elif l1 > 128:
                sums[name][0] += l1 - 128
                sums[name][1] += 0 if at(l1 - 128) in slots[name] else 128
        ends = [p for p in range(l1, 0, -128) if at(p) in slots[ENDS]]
        sums[ENDS][0] += ends[0] if ends else 0
        last, retry = (tokens - 1) // 128 * 128, max(0, tokens - 134) // 128 * 128
        taken = {
            "full": range(128, tokens + 1, 128), "periodic:512": range(512, tokens + 1, 512),
            "last": (last, retry), "last:1": (last,), "zero": (), ENDS: (last,),
        }  # fmt: skip
        for name, positions in taken.items():
            slots[name] |= {at(p) for p in positions if p}
    return {name: (sums[name][0], sums[name][1], len(slots[name])) for name in slots}


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sums]:
    root = tmp_path_factory.mktemp("replay")
    with Store.init(root / "store", durability="none", index=str(root / "index")) as store:
        ns = store.create_namespace(presets.get("tiny-swa", weights="w", tokenizer="t"))
        options = Options(limit=LIMIT, fetch=False, state_policy=POLICIES)
        result = replay(store, ns, trace.find(WEKA), options)
    assert result.requests == LIMIT
    return {sums.policy: sums for sums in result.windows}


def test_every_sum_equals_the_model(windows: dict[str, Sums]) -> None:
    found = {n: (s.hit_tokens, s.replay_tokens, s.slots) for n, s in windows.items()}
    assert found == reckoned(LIMIT)
    assert all(s.bytes == s.slots * 134 * 16 for s in windows.values())


def test_how_the_rules_compare(windows: dict[str, Sums]) -> None:
    """More slots hit more and replay less; request ends alone hit least of all."""
    hits = [windows[name].hit_tokens for name in (ENDS, "zero", "last:1", "last", "full")]
    assert hits == sorted(hits) and hits[0] < hits[1]
    replays = [windows[name].replay_tokens for name in ("zero", "last:1", "last", "full")]
    assert replays == sorted(replays, reverse=True) and replays[-1] == 0


def test_what_cannot_be_reckoned(tmp_path: Path) -> None:
    with Store.init(tmp_path / "store", durability="none") as store:
        dense = store.create_namespace(presets.get("tiny", weights="w", tokenizer="t"))
        with pytest.raises(InputError, match="no sliding window"):
            replay(store, dense, trace.find(WEKA), Options(limit=1, state_policy=("last",)))
        with pytest.raises(InputError, match="one process"):
            replay_processes(
                store.path, dense.name, trace.find(WEKA), 2, Options(state_policy=("last",))
            )


def test_kvctl_prints_hit_tokens_for_each_policy() -> None:
    line = ("replay", "--temporary", "--no-fetch", "--limit", "20", WEKA)
    found = kvctl_json(*line, "--preset", "tiny-swa", "--state-policy", "all")
    names = [row["policy"] for row in found["state_policies"]]
    assert names == ["full", "periodic:4096", "last", "last:1", "zero", ENDS]
    assert all(row["hit_tokens"] <= found["hit_tokens"] for row in found["state_policies"])
    text = kvctl(*line, "--preset", "tiny-swa", "--state-policy", "last").stdout
    assert "STATE POLICY" in text and ENDS in text
    kvctl(*line, "--preset", "tiny-swa", "--state-policy", "none", code=2)
    kvctl(*line, "--preset", "tiny-swa", "--state-policy", "periodic:100", code=2)
    kvctl(*line, "--preset", "tiny", "--state-policy", "last", code=2)
    assert "state_policies" not in kvctl_json(*line, "--preset", "tiny-swa")
