"""`mount.kvfs`: what mount(8) runs for `mount -t kvfs`, fstab and systemd mount units.

  mount.kvfs SOURCE DIR [-fnsv] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]

The operands come first and options after them; -f only pretends; -s asks to overlook unknown
options, which mount(8) hands on for other file systems; the rest means nothing here. The
environment may be empty.

mount(8) says `rw` wherever nothing is said, so that here it does not mean that somebody wants to
change a store: `writable` does.
"""

from __future__ import annotations

import sys

from kvfs.cli.main import main as group

_WITH_VALUE = "-o", "-t", "-N"
_FLAGS = "fnsv"


def main() -> None:
    """Entry point. Runs `kvctl mount` and exits with its code."""
    arguments = translate(sys.argv[1:])
    if arguments is not None:
        group.main(arguments, prog_name="mount.kvfs")


def translate(given: list[str]) -> list[str] | None:
    """The arguments of `kvctl` for those of mount(8); None if there is nothing to do."""
    operands: list[str] = []
    options: list[str] = []
    flags = ""
    rest = iter(given)
    for word in rest:
        if word in _WITH_VALUE:
            value = next(rest, "")
            options += [value] if word == "-o" else []
        elif word.startswith("-o") and not word.startswith("--"):
            options.append(word[2:])
        elif len(word) > 1 and word[0] == "-" and set(word[1:]) <= set(_FLAGS):
            flags += word[1:]
        else:
            operands.append(word)
    if len(operands) != 2 or operands[0].startswith("--"):
        return operands  # --help, --version, or a usage error
    if "f" in flags:
        return None
    source, directory = operands
    out = ["mount", "--store", source]
    for text in options:
        if meant := _meant(text, only_known="s" in flags):
            out += ["-o", meant]
    return [*out, "--", directory]


def _meant(text: str, *, only_known: bool) -> str:
    """The options of a list without mount(8)'s own rw, and without what is not known here."""
    from kvfs.cli.mount import is_known

    items = (item for item in text.split(",") if item != "rw")
    return ",".join(item for item in items if is_known(item) or not only_known)
