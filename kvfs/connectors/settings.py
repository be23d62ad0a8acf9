"""What a user says about kvfs in an engine's configuration, checked at the start.

A key that is unknown or of the wrong type is a mistake that would stay unnoticed for as long as the
cache merely does not work, so it is refused. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvfs.errors import InputError

T = TypeVar("T")


def parse(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Makes a dataclass of settings, whose fields are of type str, int, float or bool.

    where: what the engine calls the place of the settings. Raises InputError for what is unknown,
    ill-typed, or absent: `store` must be there.
    """
    kinds = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise InputError(f"unknown setting {', '.join(unknown)}; known are {', '.join(kinds)}")
    if "store" not in given:
        raise InputError(f"{where} needs `store`, the store's directory")
    return kind(**{name: _typed(name, str(kinds[name]), v) for name, v in given.items()})


def _typed(name: str, kind: str, value: Any) -> Any:
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if type(value).__name__ != kind:
        raise InputError(f"setting {name} must be of type {kind}, not {type(value).__name__}")
    return value
