"""The cases of one peer, beside kvfs and the limit, as rows.

match.1m, match.128k, match.miss    from a Python list of token ids to the number of stored blocks
match.1m.array, match.128k.array    the same from an array, where the peer takes one
match.1m.lookup                     the keys are there already
put, put.durable                    1,022 new blocks; durable: they are on their device
fetch.warm, fetch.cold              the same blocks into memory that is there
remove                              what the puts stored, seconds a block; once

Rows are those of kvfs.bench.timing. Their figures: kvfs_seconds, kvfs_ratio and peer_per_kvfs are
of kvfs in the same turns, with `unverified` in the name where it left out the payload checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import xxhash

from kvfs import presets
from kvfs.bench import payload
from kvfs.bench.peers.contract import Peer
from kvfs.bench.peers.ours import Limits, Matching, Storing, removal
from kvfs.bench.peers.work import Size, Work, prompts, sizes
from kvfs.bench.place import PRESET, scratch
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed

HASHED = "one plain xxh3 of the same bytes"
COPIED = "one copy in memory"
WRITTEN = "one plain write"
OVERWRITTEN = "one overwrite of allocated space and fdatasync"
READ = "one plain read"
_BATCH = 10_000
_COPIES = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. removal: also removal, which takes a while."""

    options: Options
    runs: int
    removal: bool = True


def figures(peer_class: type[Peer] | None, wanted: Wanted) -> Iterator[Row]:
    """All rows of a peer; of kvfs itself with None. Raises what the peer raises."""
    identity = presets.get(PRESET, weights="bench", tokenizer="bench")
    blocks = identity.hit_cap(payload.TOKENS) // identity.block_tokens
    align = 1 if peer_class is None else peer_class.align
    work = Work(blocks, identity.row_bytes, align)
    with scratch(wanted.options.directory) as place:
        yield from _matching(peer_class, work, place, wanted)
    with scratch(wanted.options.directory) as place:
        yield from _moving(peer_class, work, place, wanted)


def _row(
    name: str, what: str, reference: str | None, found: Mapping[str, list[float]]
) -> Row:  # fmt: skip
    """found: seconds of "peer" (unless it is kvfs itself), "kvfs", "unverified" and "limit"."""
    own = found.get("peer", found["kvfs"])
    limit = found.get("limit", own)
    seconds, base, ratio = compared(own, limit)
    others: dict[str, float] = {}
    for key in ("kvfs", "unverified"):
        if key not in found or (key == "kvfs" and "peer" not in found):
            continue
        stem = "kvfs" if key == "kvfs" else "kvfs_unverified"
        theirs, _, others[f"{stem}_ratio"] = compared(found[key], limit)
        others[f"{stem}_seconds"] = theirs
        if "peer" in found:
            others[f"peer_per_{stem}"] = compared(own, found[key])[2]
    plain = (None, None) if reference is None else (ratio, base)
    return Row(
        name, seconds, len(own), what, ratio=plain[0], reference=reference,
        reference_seconds=plain[1], figures=others,
    )  # fmt: skip


# match


def _matching(
    peer_class: type[Peer] | None, work: Work, place: Path, wanted: Wanted
) -> Iterator[Row]:
    options = wanted.options
    with ExitStack() as stack:
        ours = stack.enter_context(Matching.open(str(place), options.blocks, options.progress))
        peer = _opened(stack, peer_class, work, place)
        metadata = {"metadata_bytes": ours.metadata_bytes()}
        if peer is not None:
            _plant(peer, options)
            own = peer.metadata_bytes()
            metadata = {"kvfs_metadata_bytes": metadata["metadata_bytes"]}
            metadata |= {} if own is None else {"metadata_bytes": own}
        asking = _Asking(ours, peer, wanted)
        long, short = sizes()
        row = asking.whole(long)
        yield replace(row, figures={**row.figures, **metadata})
        yield from asking.array(long)
        yield asking.lookup(long)
        yield asking.whole(short)
        yield from asking.array(short)
        yield asking.miss(short)


def _opened(
    stack: ExitStack, peer_class: type[Peer] | None, work: Work, place: Path
) -> Peer | None:
    if peer_class is None:
        return None
    own = place / "peer"
    own.mkdir()
    return stack.enter_context(closing(peer_class(work, own)))


def _plant(peer: Peer, options: Options) -> None:
    for size in sizes():
        for prompt in prompts(size):
            peer.plant(peer.keys(prompt.tolist()))
    if peer.background:
        peer.plant_background(options.blocks, _BATCH)


class _Asking:
    """The cases of match."""

    def __init__(self, ours: Matching, peer: Peer | None, wanted: Wanted) -> None:
        self.ours = ours
        self.peer = peer
        self.wanted = wanted

    def whole(self, size: Size) -> Row:
        lists = [p.tolist() for p in prompts(size)]
        what = f"{size.tokens:,} tokens, a list"
        return self._row(f"match.{size.name}", what, size, lists, lists, size.blocks)

    def array(self, size: Size) -> Iterator[Row]:
        """Nothing where the peer takes lists alone."""
        stored = prompts(size)
        theirs = stored if self.peer is None else [self.peer.as_array(p) for p in stored]
        what = f"{size.tokens:,} tokens, an array"
        if theirs[0] is not None:
            yield self._row(f"match.{size.name}.array", what, size, stored, theirs, size.blocks)

    def miss(self, size: Size) -> Row:
        lists = [p.tolist() for p in prompts(size, stored=False)]
        what = f"{size.tokens:,} tokens, a list, the first block not stored"
        return self._row("match.miss", what, size, lists, lists, 0)

    def lookup(self, size: Size) -> Row:
        ours = [self.ours.keys(p) for p in prompts(size)]
        cases = {"kvfs": _each(ours, _checked(self.ours.match, size.blocks))}
        if self.peer is not None:
            theirs = [self.peer.keys(p.tolist()) for p in prompts(size)]
            cases["peer"] = _each(theirs, _checked(self.peer.found, size.blocks))
        name, what = f"match.{size.name}.lookup", f"{size.tokens:,} tokens, the keys are there"
        return self._measured(name, what, None, cases)

    def _row(
        self, name: str, what: str, size: Size, ours: Sequence[Any], theirs: Sequence[Any],
        expected: int,
    ) -> Row:  # fmt: skip
        cases = {
            "limit": _each(prompts(size), xxhash.xxh3_128_digest, _COPIES),
            "kvfs": _each(ours, _checked(self.ours.match, expected)),
        }
        if self.peer is not None:
            cases["peer"] = _each(theirs, _checked(self.peer.match, expected))
        return self._measured(name, what, HASHED, cases)

    def _measured(
        self, name: str, what: str, reference: str | None, cases: Mapping[str, Case]
    ) -> Row:  # fmt: skip
        self.wanted.options.progress(name)
        return _row(name, what, reference, in_turns(cases, self.wanted.runs))


def _each(inputs: Sequence[Any], work: Callable[[Any], Any], copies: int = 1) -> Case:
    """Does the work on one input after the other; copies: of each, for what is small."""
    made = [item.copy() if copies > 1 else item for item in inputs for _ in range(copies)]
    turn = cycle(made)

    def case() -> float:
        item = next(turn)
        return timed(lambda: work(item))

    return case


def _checked(match: Callable[[Any], int], expected: int) -> Callable[[Any], None]:
    def work(tokens: Any) -> None:
        if (found := match(tokens)) != expected:
            raise AssertionError(f"{found} blocks are said to be stored; {expected} are")

    return work


# put, fetch, remove


class _Moving:
    """The cases of put and fetch, and the keys that the peer has put."""

    def __init__(self, peer: Peer | None, work: Work) -> None:
        self.peer = peer
        self.work = work
        self.put_keys: list[Sequence[Any]] = []

    def put(self, durable: bool) -> float:
        assert self.peer is not None
        keys = self.peer.keys(self.work.next_prompt().tolist())
        seconds = timed(lambda: self.peer.put(keys, durable=durable))  # type: ignore[union-attr]
        self.peer.settle()
        self.put_keys.append(keys)
        return seconds

    def fetch(self, cold: bool) -> float:
        peer, keys = self.peer, self.put_keys[0]
        assert peer is not None
        if cold:
            peer.drop()
        else:
            peer.fetch(keys)
        return timed(lambda: peer.fetch(keys))

    def check(self, fetch: Callable[[], float], whose: str) -> None:
        self.work.into[:] = bytes(len(self.work.into))
        fetch()
        if not self.work.landed(self.work.row_total if whose == "kvfs" else self.work.total):
            raise AssertionError(f"{whose}: fetched bytes differ from those put")


def _moving(
    peer_class: type[Peer] | None, work: Work, place: Path, wanted: Wanted
) -> Iterator[Row]:
    with ExitStack() as stack:
        none = stack.enter_context(Storing.open(str(place), work, "none"))
        batch = stack.enter_context(Storing.open(str(place), work, "batch"))
        limits = Limits(place, work)
        moving = _Moving(_opened(stack, peer_class, work, place), work)
        yield from _puts(moving, none, batch, limits, wanted)
        yield from _fetches(moving, none, limits, wanted)
        if wanted.removal and (moving.peer is None or moving.peer.removes):
            wanted.options.progress("remove")
            yield _remove(moving, str(place), wanted)


def _puts(
    moving: _Moving, none: Storing, batch: Storing, limits: Limits, wanted: Wanted
) -> Iterator[Row]:
    peer, work = moving.peer, moving.work
    what = f"{work.blocks:,} new blocks, {work.total:,} bytes"
    copied = peer is not None and peer.in_memory
    limit = limits.copy if copied else limits.write
    for durable, reference in ((False, COPIED if copied else WRITTEN), (True, OVERWRITTEN)):
        name = "put.durable" if durable else "put"
        if durable and peer is not None and not peer.durable:
            continue
        cases: dict[str, Case] = {
            "limit": limits.overwrite if durable else limit,
            "kvfs": batch.put if durable else none.put,
        }
        if peer is not None:
            cases["peer"] = lambda d=durable: moving.put(d)  # type: ignore[misc]
            moving.put(durable)  # the first one makes files and maps memory
        wanted.options.progress(name)
        yield _row(name, what, reference, in_turns(cases, wanted.runs))


def _fetches(moving: _Moving, ours: Storing, limits: Limits, wanted: Wanted) -> Iterator[Row]:
    peer, work = moving.peer, moving.work
    moving.check(lambda: ours.fetch(verified=True), "kvfs")
    if peer is not None:
        moving.check(lambda: moving.fetch(False), "peer")
    what = f"{work.blocks:,} blocks, {work.total:,} bytes"
    copied = peer is not None and peer.in_memory
    for cold in (False, True):
        if cold and copied:
            continue
        name = "fetch.cold" if cold else "fetch.warm"
        cases: dict[str, Case] = {
            "limit": limits.copy if copied else lambda c=cold: limits.read(cold=c),  # type: ignore[misc]
            "kvfs": _kvfs(ours, cold, True), "unverified": _kvfs(ours, cold, False),
        }  # fmt: skip
        if peer is not None:
            cases["peer"] = lambda c=cold: moving.fetch(c)  # type: ignore[misc]
        wanted.options.progress(name)
        yield _row(name, what, COPIED if copied else READ, in_turns(cases, wanted.runs))
    if peer is None:
        yield _row("copy", what, None, in_turns({"kvfs": limits.copy}, wanted.runs))


def _kvfs(ours: Storing, cold: bool, verified: bool) -> Case:
    def case() -> float:
        if cold:
            ours.drop()
        else:
            ours.fetch(verified=verified)
        return ours.fetch(verified=verified)

    return case


def _remove(moving: _Moving, directory: str, wanted: Wanted) -> Row:
    """Everything that was put goes, in one go; kvfs gives back as many blocks that expired."""
    peer, batches = moving.peer, moving.put_keys
    blocks, seconds = removal(directory, moving.work, len(batches) or wanted.runs)
    ours = seconds / blocks
    if peer is None:
        return Row("remove", ours, 1, f"{blocks:,} blocks that expired, seconds a block")
    taken = sum(timed(lambda k=keys: peer.remove(k)) for keys in batches)  # type: ignore[misc]
    if peer.found(batches[0]):
        raise AssertionError("removed blocks are said to be stored")
    own = taken / sum(map(len, batches))
    return Row(
        "remove", own, 1, f"{blocks:,} blocks, seconds a block",
        figures={"kvfs_seconds": ours, "peer_per_kvfs": own / ours},
    )  # fmt: skip
