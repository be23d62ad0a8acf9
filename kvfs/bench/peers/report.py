"""Outcomes as tables and JSON.

A cell holds a median, how many times the limit that is, and how many times what kvfs took in the
same turns; for fetch, what kvfs took with and without payload checksums. Tables are Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvfs.bench.peers.runner import Asked, Outcome
from kvfs.bench.report import duration, machine
from kvfs.bench.timing import Options

MATCH = {
    "match.1m": "1 M, list", "match.1m.array": "1 M, array", "match.1m.lookup": "1 M, keys",
    "match.128k": "128 K, list", "match.128k.array": "128 K, array", "match.miss": "miss, list",
}  # fmt: skip
MOVE = {
    "put": "put", "put.durable": "put, durable", "fetch.warm": "fetch, warm",
    "fetch.cold": "fetch, cold", "remove": "remove, a block",
}  # fmt: skip
NONE = "–"
LIMITS = {
    "copy": "copy in memory", "fetch.warm": "plain read, warm", "fetch.cold": "plain read, cold",
    "put": "plain write", "put.durable": "overwrite and fdatasync",
}  # fmt: skip
AHEAD = 0.95
"""A peer that takes less than this share of kvfs's time is ahead of it."""
LEVEL = 1.1
"""Up to so many times the limit is level with it."""

Rows = Mapping[str, Mapping[str, Any]]


def to_json(outcomes: Sequence[Outcome], asked: Asked) -> dict[str, Any]:
    options = Options(directory=asked.directory)
    return {
        "peers": list(outcomes), "machine": machine(options), "runs": asked.runs,
        "index_blocks": asked.blocks,
    }  # fmt: skip


def lines(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """The whole report."""
    measured = [o for o in outcomes if o["status"] == "measured"]
    yield from _limits(measured)
    yield "match: from token ids to the number of stored blocks"
    yield "each cell: median · times one xxh3 of the same bytes · times kvfs"
    yield ""
    yield from table(measured, MATCH, metadata=True)
    yield ""
    yield "put, fetch, remove: 1,022 blocks"
    yield "each cell: median · times the limit · times kvfs (verifying / not verifying)"
    yield ""
    yield from table(measured, MOVE, metadata=False)
    yield ""
    yield from _about(measured)
    yield from behind(measured)
    for outcome in outcomes:
        if outcome["status"] != "measured":
            yield f"NOT MEASURED {outcome['peer']} ({outcome['title']}): {outcome['reason']}"


def rows_of(outcome: Outcome) -> Rows:
    return {row["name"]: row for row in outcome["rows"]}


def _limits(measured: Sequence[Outcome]) -> Iterable[str]:
    """The hardware, as it was while kvfs itself was measured."""
    own = next((rows_of(o) for o in measured if o["peer"] == "kvfs"), None)
    if own is None:
        return
    found = {name: own[name] for name in LIMITS if name in own}
    texts = [
        f"{LIMITS[name]} {duration(row['reference_seconds'] or row['seconds'])}"
        for name, row in found.items()
    ]
    yield f"limits, beside kvfs itself: {'; '.join(texts)}"
    yield ""


def table(
    measured: Sequence[Outcome], columns: Mapping[str, str], *, metadata: bool
) -> Iterable[str]:
    """One line a peer."""
    last = ("bytes a block beside it",) if metadata else ()
    body = [("", *columns.values(), *last)]
    for outcome in measured:
        rows = rows_of(outcome)
        more = (_metadata(rows),) if metadata else ()
        body.append((outcome["title"], *(cell(rows.get(name)) for name in columns), *more))
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    for number, line in enumerate(body):
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return NONE
    figures = row["figures"]
    parts = [duration(row["seconds"])]
    if row["ratio"] is not None:
        own = None if "peer_per_kvfs" in figures else figures.get("kvfs_unverified_ratio")
        parts.append(_times(row["ratio"]) + (f"/{_times(own)}" if own else ""))
    if "peer_per_kvfs" in figures:
        other = figures.get("peer_per_kvfs_unverified")
        per = _times(figures["peer_per_kvfs"])
        parts.append(per if other is None else f"{per}/{_times(other)}")
    return " · ".join(parts)


def _times(value: float) -> str:
    return f"{value:.{0 if value >= 20 else 1 if value >= 3 else 2}f}"


def _metadata(rows: Rows) -> str:
    found = rows["match.1m"]["figures"].get("metadata_bytes")
    return NONE if found is None else f"{found:.0f}"


def _about(measured: Sequence[Outcome]) -> Iterable[str]:
    """What each row is done by."""
    for outcome in measured:
        if outcome["peer"] == "kvfs":
            continue
        versions = ", ".join(f"{name} {text}" for name, text in outcome["packages"].items())
        yield f"{outcome['title']}: {versions or 'Python alone'}; verifies {outcome['verifies']}"
        for figure, text in outcome["api"].items():
            yield f"    {figure}: {text}"
        if outcome["note"]:
            yield f"    {outcome['note']}"
    yield ""


def behind(measured: Sequence[Outcome]) -> Iterable[str]:
    """Where a peer took clearly less time than kvfs; level with it if kvfs is at the limit too."""
    for outcome in measured:
        for row in rows_of(outcome).values():
            figures = row["figures"]
            if figures.get("peer_per_kvfs", AHEAD) < AHEAD:
                word = "LEVEL WITH" if figures.get("kvfs_ratio", LEVEL + 1) <= LEVEL else "BEHIND"
                yield f"{word} {outcome['title']}, {row['name']}: {_compared(row)}"


def _compared(row: Mapping[str, Any]) -> str:
    figures = row["figures"]
    text = f"{_times(figures['peer_per_kvfs'])} of kvfs's time"
    if "kvfs_ratio" in figures and row["ratio"] is not None:
        own, theirs = _times(figures["kvfs_ratio"]), _times(row["ratio"])
        text += f"; it takes {theirs} times {row['reference']}, kvfs {own} times"
    if "peer_per_kvfs_unverified" in figures:
        text += f"; {_times(figures['peer_per_kvfs_unverified'])} of kvfs's without checksums"
    return text
