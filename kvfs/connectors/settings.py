"""What a user says about kvfs in an engine's configuration, checked at the start.

A key that is unknown or of the wrong type is a mistake that would stay unnoticed for as long as the
cache merely does not work, so it is refused. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, slots=True)
class KeyedSettings:
    """Options of every connector whose engine keys its pages (or chunks) itself.

    store          directory of the store (made with `kvctl init`)
    index          directory of this host's indexes, "" for the usual place
    ttl_class      TTL class of what is stored; "": chatbot where the store has it, else the longest
    weights        revision of the weights, "" to find it: a digest over the files of a local
                   directory, or what the engine knows of a model hub's commit
    salt           tenant salt of all requests, besides a request's own
    fetch          "process": the fetch process reads; "inline": this process does, for tests and
                   small machines
    fetch_seconds  a fetch that takes longer is given up, and what has come is used
    arena_bytes    shared memory of a fetch process that has to be started
    save_bytes     memory for pages on their way to the store; what does not fit is not stored
    save_seconds   the engine is told that pages are not stored if it takes longer
    """

    store: str
    index: str = ""
    ttl_class: str = ""
    weights: str = ""
    salt: str = ""
    fetch: str = "process"
    fetch_seconds: float = 2.0
    arena_bytes: int = 2 << 30
    save_bytes: int = 256 << 20
    save_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.store:
            raise InputError("the connector needs `store`, the store's directory")
        if self.fetch not in ("process", "inline"):
            raise InputError(f"fetch is {self.fetch!r}; it can be process or inline")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise InputError(f"{field.name} must be positive, not {value}")
