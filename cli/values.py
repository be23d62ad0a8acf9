"""Sizes and times as people write them on a command line: 4M, 256MiB, 90s, 3d."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    _Parameter = click.ParamType[int]
else:
    _Parameter = click.ParamType  # not generic before click 8.4

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MILLISECONDS = {"": 1000, "ms": 1, "s": 1000, "m": 60000, "min": 60000}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


class _Quantity(_Parameter):
    """A number and a unit, as a whole number of the smallest unit."""

    def __init__(self, name: str, units: dict[str, int], example: str) -> None:
        self.name = name
        self._units = units
        self._example = example

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = _NUMBER.match(value.strip())
        unit = match.group(2) if match else ""
        scale = self._units.get(self._unit(unit))
        if match is None or scale is None:
            self.fail(f"{value!r} is not a {self.name}, such as {self._example}", param, ctx)
        return round(float(match.group(1)) * scale)

    def _unit(self, text: str) -> str:
        return text.lower()


class _Bytes(_Quantity):
    def _unit(self, text: str) -> str:
        # "kB" is 1024 here too: nobody sets an extent in powers of ten.
        return text.lower().removesuffix("b").removesuffix("i")


BYTES = _Bytes("size", _BYTES, "4M or 256MiB")
MILLISECONDS = _Quantity("time", _MILLISECONDS, "2s or 500ms")
DURATION = _Quantity("time", _SECONDS, "90s, 12h or 3d")
