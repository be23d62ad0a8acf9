"""What a user says about kvfs in an engine's configuration, checked at the start.

A key that is unknown or of the wrong type is a mistake that would stay unnoticed for as long as the
cache merely does not work, so it is refused. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, ClassVar, TypeVar

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
class Common:
    """Options of every connector. A subclass adds its own and says so in its docstring.

    store          directory of the store (made with `kvctl init`)
    index          directory of this host's indexes, "" for the usual place
    ttl_class      TTL class of what is stored; "": chatbot where the store has it, else the longest
    weights        revision of the weights, "" to find it: the commit of a model hub, as far as the
                   engine knows it, or a digest over the files of a local directory
    salt           tenant salt of all requests, besides a request's own
    fetch_seconds  a fetch that takes longer is given up, and what has come is used
    arena_bytes    shared memory of a fetch process that has to be started
    save_bytes     memory for what is on its way to the store; what does not fit is not stored

    Raises InputError for values that cannot be right: every number is finite and positive, but for
    those that may be 0 to switch something off.
    """

    NEEDED: ClassVar[tuple[str, ...]] = ("store",)
    """Settings that must not be empty."""
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()

    store: str
    index: str = ""
    ttl_class: str = ""
    weights: str = ""
    salt: str = ""
    fetch_seconds: float = 2.0
    arena_bytes: int = 2 << 30
    save_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in self.NEEDED:
            if not getattr(self, name):
                raise InputError(f"the connector needs `{name}`")
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if type(value) not in (int, float) or (value == 0 and name in self.MAY_BE_ZERO):
                continue
            if not 0 < value < inf:
                wanted = "not be negative" if name in self.MAY_BE_ZERO else "be positive"
                raise InputError(f"{name} must {wanted} and finite, not {value}")


@dataclass(frozen=True, slots=True)
class Fetching(Common):
    """Options of the connectors that can do without the fetch process.

    fetch          "process": the fetch process reads; "inline": this process does, for tests and
                   small machines
    """

    fetch: str = "process"

    def __post_init__(self) -> None:
        Common.__post_init__(self)
        if self.fetch not in ("process", "inline"):
            raise InputError(f"fetch is {self.fetch!r}; it can be process or inline")


@dataclass(frozen=True, slots=True)
class KeyedSettings(Fetching):
    """Options of every connector whose engine keys its pages (or chunks) itself.

    save_seconds   the engine is told that pages are not stored if it takes longer
    """

    save_seconds: float = 10.0
