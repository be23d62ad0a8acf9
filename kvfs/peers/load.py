"""This prompt's slot, wherever it is: in this host's pool, at another host, or not: replay.

The anchors that help are tried from the best on, each here first and then at the holders that the
plan names, the one to ask first in front. Whatever goes wrong, and whenever the time is over, the
answer is the decision without that slot: a replay, with the reason. A slot that is handed out was
verified: its lineage is that of the prompt, its data match their checksum.

Nothing is raised. Threads: as the pool and the client, from any.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.errors import KvfsError
from kvfs.local import LocalStore
from kvfs.namespace import Namespace
from kvfs.peers.client import PeerClient
from kvfs.peers.wire import Holder
from kvfs.plan import Plan, SlotHint, slot_anchors
from kvfs.state.decision import Decision, decide
from kvfs.state.slot import Anchor
from kvfs.state.slots import Slot, SlotPool

DEADLINE_SECONDS = 0.05
"""About what a replay of one window costs: later, the slot is worth nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine goes on with.

    slot: verified, None for a replay; decision: what is hit, loaded and replayed; source: "local",
    the address of the host it came from, or "" for none; reasons: why no better slot was had.
    """

    slot: Slot | None
    decision: Decision
    source: str
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source, "reasons": list(self.reasons),
            "generation": None if self.slot is None else self.slot.meta.generation,
            "decision": self.decision.to_json(),
        }  # fmt: skip


def load_state(
    store: LocalStore, ns: Namespace, plan: Plan, tokens: Any, deadline: float = DEADLINE_SECONDS,
    *, pool: SlotPool | None = None, client: PeerClient | None = None, into: Any = None,
    exact: bool = False,
) -> Loaded:  # fmt: skip
    """The slot of a checked prompt, within `deadline` seconds from now.

    tokens: as for `check`; pool: of this namespace on this host; client: without one no other host
    is asked; into: a writable buffer of slot_bytes for the data, whose content is of use only with
    a slot; exact: see kvfs.state.decision.decide.
    """
    until = time.monotonic() + deadline
    reasons: list[str] = []
    if ns.identity.state is not None:
        try:
            hasher = ns.as_prefix(tokens)
            for position in slot_anchors(plan.hit_tokens, ns.block_tokens):
                anchor = Anchor.of(hasher, position)
                hints = _hints(store, plan, anchor)
                slot, source = find_slot(
                    ns, anchor, hints, until, reasons, pool=pool, client=client, into=into
                )
                if slot is not None:
                    found = decide(plan, ns.identity, {position}, exact=exact)
                    return Loaded(slot, found, source, tuple(reasons))
        except KvfsError as e:
            reasons.append(str(e))
    return Loaded(None, decide(plan, ns.identity, (), exact=exact), "", tuple(reasons))


def find_slot(
    ns: Namespace, anchor: Anchor, hints: Iterable[SlotHint], until: float, reasons: list[str], *,
    pool: SlotPool | None = None, client: PeerClient | None = None, into: Any = None,
) -> tuple[Slot | None, str]:  # fmt: skip
    """The slot of one anchor and where it was, "local" or an address; (None, "") if it is not had.

    anchor: with its lineage; hints: who is said to have it, the one to ask first in front; until:
    of time.monotonic; reasons: gets why not; the rest as for `load_state`. Nothing is raised for
    what other hosts do.
    """
    slot = None if pool is None else pool.read(anchor, into)
    if slot is not None:
        return slot, "local"
    state = ns.identity.state
    assert state is not None
    own = b"" if pool is None else pool.pool_id
    asked = 0
    for hint in hints:
        if client is None or not hint.address or hint.pool == own:
            continue
        asked += 1
        holder = Holder(hint.address, hint.pool, hint.generation)
        slot, why = client.pull(holder, ns.nsid, anchor, state, until, into)
        if slot is not None:
            return slot, hint.address
        reasons.append(f"{anchor.position} from {hint.address}: {why}")
        if time.monotonic() >= until:
            break
    if not asked:
        reasons.append(f"{anchor.position}: no host is known to have it")
    return None, ""


def _hints(store: LocalStore, plan: Plan, anchor: Anchor) -> Iterable[SlotHint]:
    """Who may have it, by the plan; a plan that is older than the next news is good enough."""
    now = store.now_ms()
    return [h for h in plan.slots if h.position == anchor.position and h.expires_ms > now]


def lineage_holds(hasher: PrefixHasher, slot: Slot) -> bool:
    """Whether a slot is of the prefix of these tokens, by the cryptographic digest of it."""
    try:
        return slot.meta.is_for(Anchor.of(hasher, slot.meta.position))
    except KvfsError:
        return False
