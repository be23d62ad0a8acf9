"""Numbers as people write them on a command line: sizes and times with a unit, plain ones that end.

Whatever comes out can be reckoned with: it is finite, and no larger than what it is of can be.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _Parameter = click.ParamType[int]
else:
    _Parameter = click.ParamType  # not generic before click 8.4

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MILLISECONDS = {"": 1000, "ms": 1, "s": 1000, "m": 60000, "min": 60000}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_MOST_BYTES = (1 << 63) - 1  # the largest offset in a file
_MOST_SECONDS = 100 * 366 * 86400  # what a wait may last is less than 300 years


class FiniteRange(click.FloatRange):
    """A number with a decimal point. click's own types take NaN for one that is in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class _Quantity(_Parameter):
    """A number and a unit, as a whole number of the smallest unit."""

    def __init__(self, name: str, units: dict[str, int], most: int, example: str) -> None:
        self.name = name
        self._units = units
        self._most = most
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
        number = float(match.group(1)) * scale
        if number > self._most:
            self.fail(f"that is larger than any {self.name} can be", param, ctx)
        return round(number)

    def _unit(self, text: str) -> str:
        return text.lower()


class _Bytes(_Quantity):
    def _unit(self, text: str) -> str:
        # "kB" is 1024 here too: nobody sets an extent in powers of ten.
        return text.lower().removesuffix("b").removesuffix("i")


BYTES = _Bytes("size", _BYTES, _MOST_BYTES, "4M or 256MiB")
MILLISECONDS = _Quantity("time", _MILLISECONDS, 1000 * _MOST_SECONDS, "2s or 500ms")
DURATION = _Quantity("time", _SECONDS, _MOST_SECONDS, "90s, 12h or 3d")
