"""Token ids as commands take them: a file, the standard input, or the command line itself.

Three forms are told apart by what is in them: a zero byte means 4-byte little-endian ids (every id
below 16,777,216 has one), a `[` or `{` at the start JSON, all else numbers with blanks or commas
between. kvfs.chain.as_u32 alone makes bytes of them, for this and every other entry point.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvfs import chain
from kvfs.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("auto", "json", "text", "u32")
_TEXT = b"0123456789,+- \t\r\n\v\f"

MANUAL = """
Token ids are read from TOKENS, from the standard input if that is "-" or left out, or from the
value of --tokens. They are

u32 -- 4 bytes each, unsigned, little-endian: what numpy writes with
tofile() of an array of dtype "<u4";
json -- a JSON list of integers, or an object whose "tokens" is one;
text -- decimal numbers with blanks, commas or line ends between them.

Without --tokens-format, data that holds a zero byte is u32, data that begins with "[" or "{" is
JSON, all else is text. Anything but a flat list of integers of 0 to 4,294,967,295 is refused.
"""


def options(function: F) -> F:
    """The argument TOKENS and its two options: arguments `path`, `inline` and `form`."""
    function = click.option(
        "--tokens", "inline", metavar="IDS", help="Token ids right here, in place of TOKENS."
    )(function)
    function = click.option(
        "--tokens-format", "form", type=click.Choice(FORMATS), default="auto", show_default=True,
        help="What TOKENS holds.",
    )(function)  # fmt: skip
    return click.argument("path", metavar="[TOKENS]", required=False)(function)


def read(path: str | None, inline: str | None, form: str) -> memoryview:
    """The token ids as u32 little-endian bytes. Raises InputError.

    path: a file, "-" or None for the standard input; inline: ids given on the command line.
    """
    if inline is not None:
        if path is not None:
            raise InputError("token ids are given twice: as TOKENS and as --tokens")
        return parse(os.fsencode(inline), form, "--tokens")
    if path is None and sys.stdin is not None and sys.stdin.isatty():
        raise InputError("no token ids: give a file, --tokens, or - to type them here")
    return parse(load(path or "-"), form, "standard input" if path in (None, "-") else str(path))


def load(path: str) -> bytes:
    """All of a file, or of the standard input for "-". Raises InputError."""
    try:
        if path == "-":
            return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else b""
        with open(os.fspath(path), "rb") as f:
            return f.read()
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from None


def parse(data: bytes, form: str, where: str) -> memoryview:
    """Token ids from any of the forms; where: the name of the source, for messages."""
    if form == "auto":
        form = _recognise(data)
    try:
        if form == "json":
            return chain.as_u32(_from_json(data))
        return chain.as_u32(_from_text(data) if form == "text" else data)
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


def _recognise(data: bytes) -> str:
    if b"\0" in data:
        return "u32"
    return "json" if data.lstrip()[:1] in (b"[", b"{") else "text"


def _from_json(data: bytes) -> Any:
    import json

    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"not JSON: {e}") from None
    if isinstance(value, dict):
        value = value.get("tokens")
    if not isinstance(value, list):
        raise InputError("JSON must be a list of token ids, or an object with a list `tokens`")
    # To Python a bool is an int, so the library would take it for 0 or 1.
    if any(type(token) is bool for token in value):
        raise InputError("token ids are integers; got a bool")
    return value


def _from_text(data: bytes) -> list[int]:
    strange = data.translate(None, _TEXT)
    if strange:
        raise InputError(f"token ids are decimal numbers; found {strange[:20].decode('latin-1')!r}")
    try:
        return [int(word) for word in data.replace(b",", b" ").split()]
    except ValueError as e:
        raise InputError(f"token ids are decimal numbers: {e}") from None
