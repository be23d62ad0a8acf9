"""Rows as tables and as JSON, and what machine they hold for."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from kvfs import __version__
from kvfs.bench import BENCHES, ELSEWHERE, LONG
from kvfs.bench.advice import FROM, advise
from kvfs.bench.timing import Options, Row
from kvfs.errors import ConfigError
from kvfs.filesystems import filesystem_type

HEADER = ("figure", "median", "limit", "ratio", "limit", "beside", "")
RIGHT = "lrrrrrl"


def measure(names: Iterable[str], options: Options) -> list[Row]:
    """Runs benchmarks by name, in their own order.

    Raises what they raise, and ConfigError where one needs a package that is not installed.
    """
    wanted = set(names)
    rows: list[Row] = []
    for name in (*BENCHES, *LONG):
        if name in wanted:
            rows += _module(name).run(options)
    return rows


def _module(name: str) -> Any:
    try:
        return import_module(ELSEWHERE.get(name, f"kvfs.bench.{name}"))
    except ModuleNotFoundError as e:
        raise ConfigError(f"{name} needs the package {e.name}, which is not installed") from e


def machine(options: Options) -> dict[str, Any]:
    """What a reader has to know to compare."""
    import tempfile

    place = options.directory or tempfile.gettempdir()
    return {
        "kvfs": __version__, "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)), "processor": _processor(),
        "filesystem": filesystem_type(place),
    }  # fmt: skip


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        for line in f:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def to_json(rows: Iterable[Row], options: Options) -> dict[str, Any]:
    rows = list(rows)
    out = {"rows": [row.to_json() for row in rows], "machine": machine(options)}
    if options.prefill is not None:
        out["advice"] = advise(rows, options.prefill)
    return out


def advice(rows: Iterable[Row], options: Options) -> Iterator[str]:
    """From which length on loading beats recomputing, in words; nothing if nobody asked."""
    if options.prefill is None:
        return
    for how, found in advise(rows, options.prefill).items():
        tokens, speed = found["from_tokens"], found["tokens_per_second"]
        costs = f"{duration(found['fixed_seconds'])} and a token each "
        costs += duration(1 / speed) if speed else "nothing to speak of"
        verdict = f"from {tokens:,} tokens on" if tokens else "never"
        yield (
            f"loading beats recomputing at {options.prefill:,.0f} tokens/s {verdict}, {FROM[how]}: "
            f"it costs {costs}; {found['tokens']:,} tokens: {duration(found['load_seconds'])} "
            f"instead of {duration(found['compute_seconds'])}"
        )


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table under HEADER."""
    return (
        row.name, duration(row.seconds), duration(row.limit_seconds), _ratio(row.ratio),
        _ratio(row.ratio_limit), duration(row.reference_seconds), "" if row.within else "over",
    )  # fmt: skip


def notes(rows: Iterable[Row]) -> list[str]:
    """What the lines of the table stand for, and further figures."""
    out = []
    for row in rows:
        beside = f"; beside: {row.reference}" if row.reference else ""
        out.append(f"{row.name}: {row.what}{beside}; median of {row.samples}")
        for name, value in row.figures.items():
            limit = f", at most {row.limits[name]:,.0f}" if name in row.limits else ""
            out.append(f"{row.name}: {_figure(name, value)}{limit}")
    return out


def _figure(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{name.removesuffix('_seconds').replace('_', ' ')} {duration(value)}"
    return f"{name.replace('_', ' ')} {value:,.{1 if value >= 10 else 2}f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def duration(seconds: float | None) -> str:
    """Three digits and a unit."""
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale or unit == "ns":
            value = seconds / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError
