"""The process that measures one peer: run by the interpreter of the peer's environment.

    python -m kvfs.bench.peers.measure NAME --output FILE

Writes one JSON object: title, packages, api and rows, or `error`. Ends without waiting for the
threads that some peers leave behind.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

from kvfs.bench.peers import PEERS
from kvfs.bench.peers.contract import Peer
from kvfs.bench.peers.figures import Wanted, figures
from kvfs.bench.timing import Options


def measure(name: str, wanted: Wanted) -> dict[str, Any]:
    """What a peer is, and its rows. Raises what the peer raises."""
    peer = peer_class(name)
    about: dict[str, Any] = {"packages": {}, "api": {}, "verifies": "", "note": ""}
    if peer is not None:
        about = {
            "packages": peer.versions(), "api": dict(peer.api), "verifies": peer.verifies,
            "note": peer.note,
        }  # fmt: skip
    rows = [row.to_json() for row in figures(peer, wanted)]
    return {"python": platform.python_version(), **about, "rows": rows}


def peer_class(name: str) -> type[Peer] | None:
    """The class of a peer, None for kvfs itself. Raises ImportError."""
    spec = PEERS[name]
    if spec.module is None:
        return None
    module = importlib.import_module(f"kvfs.bench.peers.{spec.module}")
    found: type[Peer] = getattr(module, spec.name)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure one peer.")
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--store", metavar="DIR")
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--removal", action="store_true")
    return parser.parse_args()


def main() -> int:
    asked = _arguments()
    options = Options(
        asked.blocks, asked.runs, asked.store, asked.store,
        lambda text: print(f"{asked.name}: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    try:
        result = measure(asked.name, Wanted(options, asked.runs, asked.removal))
    except Exception as e:
        traceback.print_exc()
        result = {"error": f"{type(e).__name__}: {e}"}
    asked.output.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
