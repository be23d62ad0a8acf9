"""What a check of a store found: plain data, for people and for programs.

Levels: "damage" means that stored blocks cannot be had, or that the index would answer wrongly;
"warning" that something is wrong which no read needs; "note" is normal and worth knowing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import EXIT_OK, DamageError

DAMAGE, WARNING, NOTE = "damage", "warning", "note"

KINDS = {
    "record": DAMAGE,  # a visible record does not check out, or cannot be read
    "short": DAMAGE,  # the segment ends in front of a visible record
    "missing": DAMAGE,  # the file of visible records is gone
    "unreadable": DAMAGE,  # a segment with visible records cannot be opened
    "index": DAMAGE,  # rows of the index contradict each other
    "padding": WARNING,  # bytes of a record that belong to nothing are not zero
    "gap": WARNING,  # the same for bytes between extents
    "header": WARNING,  # a segment's header is damaged: only a rebuild reads it
    "footer": WARNING,  # a segment's footer is damaged: only a rebuild reads it
    "journal": WARNING,  # a journal cannot be read, or not to its end
    "checkpoint": WARNING,  # a checkpoint of the index is damaged: an older one is used
    "untold": WARNING,  # runs are in index or footer that no journal tells of
    "orphan": NOTE,  # a segment that neither index nor journals know
    "unsealed": NOTE,  # a segment whose writer died before it wrote a footer
    "dropped": NOTE,  # the file of a dropped segment, which gc will remove
    "hole": NOTE,  # runs that no check reaches: the block before them is not there
    "copy": NOTE,  # blocks that are stored in another segment as well, and shown from there
    "duplicate": NOTE,  # a second file of the same segment
    "newer": NOTE,  # a file of a version this code does not read yet
    "strange": NOTE,  # a file that is no segment of this store
    "behind": NOTE,  # journal entries that the index has not applied yet
}
"""Kind of finding -> its level."""

# Enough to see what is going on; the counts are complete in any case.
MAX_FINDINGS = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One place, and what is wrong there.

    path: in the store; slot, offset: record and byte of the file; block: number in its chain.
    """

    kind: str
    path: str
    detail: str
    slot: int | None = None
    offset: int | None = None
    block: int | None = None
    blocks: int = 0
    """Visible blocks it costs."""
    namespace: str | None = None

    @property
    def level(self) -> str:
        return KINDS[self.kind]

    def to_json(self) -> dict[str, Any]:
        fields = {
            "level": self.level, "kind": self.kind, "path": self.path, "detail": self.detail,
            "slot": self.slot, "offset": self.offset, "block": self.block, "blocks": self.blocks,
            "namespace": self.namespace,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        where = self.path if self.slot is None else f"{self.path} slot {self.slot}"
        if self.offset is not None:
            where += f" offset {self.offset}"
        return f"{self.level}: {self.kind}: {where}: {self.detail}"


@dataclass(slots=True)
class Report:
    """The result of a check."""

    segments: int = 0
    """Segments in use."""
    runs: int = 0
    records: int = 0
    """Visible records that were verified."""
    bytes: int = 0
    """Bytes of records read."""
    expired_runs: int = 0
    """Not verified: no check finds them, gc will take them."""
    waiting_runs: int = 0
    """Out of sight until the block before them is stored."""
    journals: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Findings by kind, those beyond MAX_FINDINGS included."""
    repaired: bool = False
    """What could be repaired was."""
    cut_blocks: int = 0
    """Blocks that the repair took out of sight, what follows a bad one included."""
    dropped_segments: int = 0
    rebuilt: bool = False
    """The repair made the index anew."""
    unrepaired: list[str] = field(default_factory=list)
    """Why damage was left as it is."""

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def level_count(self, level: str) -> int:
        return sum(n for kind, n in self.counts.items() if KINDS[kind] == level)

    @property
    def damaged(self) -> bool:
        return self.level_count(DAMAGE) > 0

    @property
    def exit_code(self) -> int:
        """12 if damage was found, repaired or not."""
        return DamageError.exit_code if self.damaged else EXIT_OK

    def to_json(self) -> dict[str, Any]:
        return {
            "segments": self.segments, "runs": self.runs, "records": self.records,
            "bytes": self.bytes, "expired_runs": self.expired_runs,
            "waiting_runs": self.waiting_runs, "journals": self.journals,
            "damage": self.level_count(DAMAGE), "warnings": self.level_count(WARNING),
            "notes": self.level_count(NOTE), "counts": dict(self.counts),
            "findings": [f.to_json() for f in self.findings],
            "left_out": sum(self.counts.values()) - len(self.findings),
            "repaired": self.repaired, "cut_blocks": self.cut_blocks,
            "dropped_segments": self.dropped_segments, "rebuilt": self.rebuilt,
            "unrepaired": self.unrepaired,
        }  # fmt: skip
