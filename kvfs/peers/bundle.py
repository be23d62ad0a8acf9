"""A request that goes on elsewhere: tokens, plan, slot and sampling state in one piece of bytes.

For a decode that moves to another host, and for prefill here and decode there. The blocks stay
where they are, in the shared storage: the plan says where. The slot goes along, or was given to the
host before, or is pulled by it: then the bundle names who has it. Little-endian:

  offset  size  field
  0       8     magic "KVFSBNDL"
  8       4     version, 1
  12      4     number of sections
  16            sections: type u32, zeros u32, length u64, then so many bytes
  end-32  32    blake2b-256 of everything before

  1 PLAN      the plan as JSON, and with it the namespace
  2 TOKENS    token ids, 4 bytes each: the prompt and what was generated
  3 SLOT      description (136 bytes, kvfs.state.slot) and data
  4 SAMPLING  opaque bytes of the engine
  5 PROMPT    u64: how many of the tokens are the prompt
  6 HOLDER    a hint as JSON, as in a plan: who has the slot that does not go along

A section comes once. One of another type, or another version, is refused: half a request must not
go on. A bundle is for a host of the same fleet: the checksum finds damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from dataclasses import dataclass
from typing import Any

from kvfs.errors import DamageError, FormatError, InputError
from kvfs.local import LocalStore
from kvfs.namespace import Namespace
from kvfs.peers.client import PeerClient
from kvfs.peers.load import DEADLINE_SECONDS, Loaded, lineage_holds, load_state
from kvfs.plan import Plan, SlotHint
from kvfs.state.decision import decide
from kvfs.state.slot import META_BYTES, SlotMeta
from kvfs.state.slots import Slot, SlotPool

MAGIC = b"KVFSBNDL"
VERSION = 1
MAX_BYTES = 1 << 30
_HEAD = struct.Struct("<8sII")
_SECTION = struct.Struct("<I4xQ")
_SUM_BYTES = 32
_HINT_SECONDS = 600
_PLAN, _TOKENS, _SLOT, _SAMPLING, _PROMPT, _HOLDER = range(1, 7)
_REQUIRED = {_PLAN, _TOKENS, _SAMPLING, _PROMPT}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A request in transit.

    tokens: u32 little-endian, 4 bytes each; prompt_tokens: how many of them are the prompt; slot:
    the one that goes along, or None; holder: who has it if it does not; sampling: the engine's.
    """

    plan: Plan
    tokens: bytes
    prompt_tokens: int
    slot: Slot | None = None
    holder: SlotHint | None = None
    sampling: bytes = b""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    def export(self) -> bytes:
        """The bytes above. Raises InputError for a request that does not fit together."""
        _require_whole(self)
        sections = {
            _PLAN: json.dumps(self.plan.to_json()).encode(), _TOKENS: self.tokens,
            _SAMPLING: self.sampling, _PROMPT: self.prompt_tokens.to_bytes(8, "little"),
        }  # fmt: skip
        if self.slot is not None:
            sections[_SLOT] = self.slot.meta.encode() + bytes(self.slot.data)
        if self.holder is not None:
            sections[_HOLDER] = json.dumps(self.holder.to_json()).encode()
        parts = [_HEAD.pack(MAGIC, VERSION, len(sections))]
        for kind, data in sorted(sections.items()):
            parts += [_SECTION.pack(kind, len(data)), data]
        body = b"".join(parts)
        return body + _digest(body)


def read(data: Any, ns: Namespace) -> Bundle:
    """The inverse of `Bundle.export`, verified. ns: the namespace here that it has to be of.

    Raises FormatError (no bundle, another version), DamageError (not what was exported), InputError
    (another namespace, or a slot of other tokens).
    """
    view = memoryview(data).cast("B")
    sections = _sections(view)
    try:
        plan = Plan.from_json(json.loads(bytes(sections[_PLAN])))
        tokens, prompt = bytes(sections[_TOKENS]), int.from_bytes(sections[_PROMPT], "little")
        slot = _slot(sections.get(_SLOT))
        holder = _holder(sections.get(_HOLDER))
    except (KeyError, ValueError, InputError) as e:
        raise FormatError(f"the bundle is of a shape that this kvfs does not read: {e!r}") from e
    bundle = Bundle(plan, tokens, prompt, slot, holder, bytes(sections[_SAMPLING]))
    _require_whole(bundle)
    if plan.nsid != ns.nsid:
        raise InputError(f"the bundle is of {plan.namespace}, not of {ns.name}")
    if slot is not None and not lineage_holds(ns.hasher(tokens), slot):
        raise InputError("the slot in the bundle is not of its tokens")
    return bundle


def hand_over(
    store: LocalStore, ns: Namespace, tokens: Any, *, pool: SlotPool | None = None,
    prompt_tokens: int | None = None, sampling: bytes = b"", to: str | None = None,
    client: PeerClient | None = None, pulled_from: str | None = None,
    deadline: float = DEADLINE_SECONDS,
) -> Bundle:  # fmt: skip
    """What another host needs to go on with a request whose blocks are stored, as after prefill.

    tokens: all of it so far; prompt_tokens: default all. The slot of the hit goes along; with `to`
    and `client` it is pushed to that host instead, if that can be done within `deadline` seconds;
    with `pulled_from`, the address where this host answers, it is left for the other to pull.
    Without a slot the other host replays. Raises InputError.
    """
    hasher = ns.as_prefix(tokens)
    plan = store.check(ns, hasher)
    found = load_state(store, ns, plan, hasher, deadline, pool=pool, client=client)
    slot = found.slot
    holder: SlotHint | None = None
    if slot is not None and to is not None and client is not None:
        pushed = client.push(to, slot, time.monotonic() + deadline)
        if pushed.meta is not None:
            holder, slot = _hint(to, pushed.meta, store.now_ms()), None
    elif slot is not None and pulled_from is not None and found.source == "local":
        holder, slot = _hint(pulled_from, slot.meta, store.now_ms()), None
    count = hasher.n_tokens if prompt_tokens is None else prompt_tokens
    return Bundle(plan, bytes(hasher.buffer), count, slot, holder, sampling)


def take_over(
    bundle: Bundle, store: LocalStore, ns: Namespace, *, pool: SlotPool | None = None,
    client: PeerClient | None = None, deadline: float = DEADLINE_SECONDS,
) -> Loaded:  # fmt: skip
    """What the engine of this host goes on with: the slot that came along, or is here, or is
    pulled; else a replay. Nothing is raised."""
    slot, plan = bundle.slot, bundle.plan
    if slot is not None:
        decision = decide(plan, ns.identity, {slot.meta.position})
        if decision.slot == slot.meta.position:
            return Loaded(slot, decision, "bundle", ())
    if bundle.holder is not None:
        plan = plan._replace(slots=(bundle.holder, *plan.slots))
    return load_state(store, ns, plan, bundle.tokens, deadline, pool=pool, client=client)


def _require_whole(bundle: Bundle) -> None:
    count, rest = divmod(len(bundle.tokens), 4)
    if rest or not 0 <= bundle.prompt_tokens <= count or bundle.plan.tokens > count:
        raise InputError(
            f"{len(bundle.tokens)} bytes of tokens, of which {bundle.prompt_tokens} are the "
            f"prompt and {bundle.plan.tokens} were checked"
        )


def _sections(view: memoryview) -> dict[int, memoryview]:
    """Type -> bytes of the sections of a bundle that is whole."""
    if len(view) < _HEAD.size or bytes(view[:8]) != MAGIC:
        raise FormatError("not a bundle of kvfs")
    _, version, count = _HEAD.unpack_from(view)
    if version != VERSION:
        raise FormatError(f"bundle of version {version}; this kvfs reads {VERSION}")
    end = len(view) - _SUM_BYTES
    if len(view) > MAX_BYTES or end < _HEAD.size or _digest(view[:end]) != view[end:]:
        raise DamageError("the bundle is damaged (checksum)")
    sections: dict[int, memoryview] = {}
    at = _HEAD.size
    for _ in range(count):
        if at + _SECTION.size > end:
            raise FormatError("the bundle ends early")
        kind, length = _SECTION.unpack_from(view, at)
        at += _SECTION.size
        if length > end - at or kind in sections or not _PLAN <= kind <= _HOLDER:
            raise FormatError(f"section {kind} of the bundle cannot be read by this kvfs")
        sections[kind] = view[at : at + length]
        at += length
    if at != end or not sections.keys() >= _REQUIRED:
        raise FormatError("the bundle has other sections than this kvfs reads")
    return sections


def _slot(section: memoryview | None) -> Slot | None:
    if section is None:
        return None
    meta, data = SlotMeta.decode(section), bytes(section[META_BYTES:])
    if not meta.accepts(data):
        raise FormatError("the slot in the bundle is damaged")
    return Slot(meta, data)


def _hint(address: str, meta: SlotMeta, now_ms: int) -> SlotHint:
    until = now_ms + _HINT_SECONDS * 1000
    return SlotHint(meta.position, "", address, meta.pool, meta.generation, until)


def _holder(section: memoryview | None) -> SlotHint | None:
    return None if section is None else SlotHint.from_json(json.loads(bytes(section)))


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES, person=b"kvfs-bundle").digest()
