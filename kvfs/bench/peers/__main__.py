"""The command line of the comparison: see kvfs.bench.peers."""

from __future__ import annotations

import argparse
import json
import sys

from kvfs.bench.peers import PEERS
from kvfs.bench.peers.install import install
from kvfs.bench.peers.report import lines, to_json
from kvfs.bench.peers.runner import (
    BLOCKS,
    QUICK_BLOCKS,
    QUICK_RUNS,
    RUNS,
    Asked,
    Outcome,
    measure_all,
)
from kvfs.errors import EXIT_INTERRUPTED, KvfsError


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvfs.bench.peers",
        description="Match, put and fetch of kvfs beside what people use in its place.",
        epilog="Needs 15 GB of disk, 4 GB of memory and ten minutes on a machine that is idle.",
    )
    parser.add_argument(
        "--peer", nargs="+", metavar="NAME", choices=PEERS, default=list(PEERS),
        help=f"these alone: {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"{QUICK_RUNS} samples, not {RUNS}, indexes of {QUICK_BLOCKS:,} blocks, no removal",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, help="samples of each figure")
    parser.add_argument("--store", metavar="DIR", help="measure the file system of DIR")
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    asked = arguments(words)
    if asked.install:
        for name in sorted({e for p in asked.peer if (e := PEERS[p].environment)}):
            _say(f"environment {name}")
            install(name)
    wanted = Asked(
        asked.runs or (QUICK_RUNS if asked.quick else RUNS),
        QUICK_BLOCKS if asked.quick else BLOCKS, not asked.quick, asked.store,
    )  # fmt: skip
    outcomes, code = _outcomes(asked.peer, wanted)
    if asked.json:
        print(json.dumps(to_json(outcomes, wanted), indent=1))
    else:
        print("\n".join(lines(outcomes)))
    return code


def _outcomes(names: list[str], wanted: Asked) -> tuple[list[Outcome], int]:
    """What was measured, also when it was interrupted, and the exit status."""
    outcomes: list[Outcome] = []
    try:
        for outcome in measure_all(names, wanted, _say):
            outcomes.append(outcome)
    except KvfsError as e:
        _say(str(e))
        return outcomes, e.exit_code
    except KeyboardInterrupt:
        return outcomes, EXIT_INTERRUPTED
    return outcomes, 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
