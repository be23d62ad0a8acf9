"""The environments of the peers: `.venv-peers/NAME` in the checkout, from `.ci/peers/NAME.txt`.

An environment is as its file says while its stamp holds the file's text. Why one could not be made
is kept beside, for the report. Nothing is installed into kvfs's own environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvfs
from kvfs.bench.peers import PEERS

ROOT = Path(kvfs.__file__).resolve().parents[1]
REQUIREMENTS = ROOT / ".ci" / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"
_READY, _FAILED = ".ready", ".failed"
_REASON_CHARACTERS = 300


def interpreter(name: str) -> tuple[Path | None, str]:
    """(the interpreter that measures a peer, "") or (None, why there is none)."""
    environment = PEERS[name].environment
    if environment is None:
        return Path(sys.executable), ""
    place = ENVIRONMENTS / environment
    if _stamp(place) == _requirements(environment):
        return place / "bin" / "python", ""
    failed = place / _FAILED
    if failed.exists():
        return None, f"not installed: {failed.read_text()}"
    return None, "not installed: `make bench-peers` does it"


def install(environment: str) -> bool:
    """Makes an environment, or leaves it as it is; says whether it is there."""
    place, wanted = ENVIRONMENTS / environment, _requirements(environment)
    if _stamp(place) == wanted:
        return True
    place.mkdir(parents=True, exist_ok=True)
    (place / _READY).unlink(missing_ok=True)
    reason = _run(sys.executable, "-m", "venv", str(place)) or _run(
        str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install",
        "--quiet", "--no-deps", "-r", str(REQUIREMENTS / f"{environment}.txt"),
    )  # fmt: skip
    if reason:
        (place / _FAILED).write_text(reason)
        return False
    (place / _FAILED).unlink(missing_ok=True)
    (place / _READY).write_text(wanted)
    return True


def _requirements(environment: str) -> str:
    return (REQUIREMENTS / f"{environment}.txt").read_text()


def _stamp(place: Path) -> str | None:
    ready = place / _READY
    return ready.read_text() if ready.exists() else None


def _run(*command: str) -> str:
    """Runs a command; the last thing it said if it failed, else ""."""
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line] or lines or [f"exit {done.returncode}"]
    return errors[-1].strip()[:_REASON_CHARACTERS]
