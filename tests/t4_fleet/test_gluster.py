"""Two hosts on two mounts of a replicated shared file system, one of whose bricks is killed.

`make test-gluster` installs what it needs and runs it. Everything happens in namespaces that end
with the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfs.testing import gluster

PUTS = 100


@pytest.fixture(autouse=True)
def _available() -> None:
    reason = gluster.unavailable()
    if reason is not None:
        pytest.skip(f"GlusterFS cannot run here: {reason}")


def delays(told: dict[str, Any], what: str) -> list[float]:
    """Seconds from a put on one host to what the other saw of it, in order."""
    put = {seed: at for host in told["hosts"] for seed, at in host["put"].items()}
    return sorted(at - put[seed] for host in told["hosts"] for seed, at in host[what].items())


@pytest.mark.gluster
@pytest.mark.timeout(240)
def test_a_brick_is_killed_under_the_rings_of_two_hosts(tmp_path: Path) -> None:
    """A stand-in for 3FS's client daemon on each host, over its mount of the volume."""
    told = gluster.apart(tmp_path / "volume", PUTS, caches=False, seconds=200, rings=True)
    for what in ("seen", "whole"):
        assert len(delays(told, what)) == 2 * PUTS
    put = [at for host in told["hosts"] for at in host["put"].values()]
    assert min(put) < told["killed"] < max(put), "the brick was not killed under load"
    for when in ("short", "healed"):
        assert [found["lost"] for found in told[when]] == [[], []]
        for found in told[when]:
            assert found["findings"].keys() <= {"behind"}, found


@pytest.mark.gluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("caches", [False, True], ids=["as documented", "as installed"])
def test_a_brick_is_killed_under_two_hosts(tmp_path: Path, caches: bool) -> None:
    told = gluster.apart(tmp_path / "volume", PUTS, caches=caches, seconds=200)
    for what in ("seen", "whole"):
        found = delays(told, what)
        assert len(found) == 2 * PUTS
        # With its caches on, a client believes for a second what it has seen of a file.
        assert found[int(len(found) * 0.99)] < (2.5 if caches else 1.0)
    put = [at for host in told["hosts"] for at in host["put"].values()]
    assert min(put) < told["killed"] < max(put), "the brick was not killed under load"
    for host in told["hosts"]:
        assert max(host["slowest"].values()) < 5.0, host["slowest"]
        if not caches:
            assert host["reasons"] == {}
    for when in ("short", "healed"):
        assert [found["lost"] for found in told[when]] == [[], []]
        for found in told[when]:
            assert found["findings"].keys() <= {"behind"}, found
