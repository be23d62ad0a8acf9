"""Man pages, written from the click commands themselves, so that they cannot drift from them.

A command's page is its help text (DESCRIPTION), its parameters (OPTIONS), its epilog (EXAMPLES)
and, where the command's module has a dictionary MANUAL, a section for each of its entries. Texts
are paragraphs separated by blank lines; a paragraph is printed as it stands if it begins with a
line `\\b` or if all its lines are indented; lines `term -- meaning` make a list of definitions.

`python -m kvfs.cli.manpage DIRECTORY` writes the pages (`make man`); without a directory it prints
the names. Used at development time only: no command imports this module.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from kvfs import __version__
from kvfs.errors import EXIT_CODES

PROGRAM = "kvctl"

ENVIRONMENT = {
    "KVFS_STORE": "The store to use where the command line does not name one.",
    "KVFS_INDEX": (
        "The directory of this host's indexes; it must be on a local disk. Default: /var/cache/kvfs"
        " for root, $XDG_CACHE_HOME/kvfs or ~/.cache/kvfs for others."
    ),
    "KVFS_NAMESPACE": "The namespace to use where the command line does not name one.",
    "KVFS_CONFIG": "A configuration file to read in place of the two below.",
    "KVFS_INDEX_FORCE": (
        "Set to 1 to keep indexes on a file system that is refused because it may be shared"
        " between hosts or cannot be mapped, such as an overlay whose upper directory is local."
    ),
    "KVFS_RUNTIME": (
        "The directory for the sockets of this host's processes. Default: $XDG_RUNTIME_DIR, else"
        " /run for root and /tmp for others."
    ),
    "KVFS_HF3FS_LIB": (
        "The path of 3FS's own client library, libhf3fs_api_shared.so, to make the rings of stores"
        " on 3FS. Default: kvfs makes them."
    ),
}

FILES = {
    "STORE/kvfs.json": "Says that the directory is a store, its format version and its uuid.",
    "STORE/ns, STORE/seg, STORE/log": "Namespaces, segments and journals; see kvfs(5).",
    "~/.config/kvfs/config.toml, /etc/kvfs/config.toml": (
        "Settings that neither the command line nor the environment gives; the first file goes"
        ' first. TOML, any of: store = "DIR", index = "DIR", namespace = "NAME".'
    ),
    "/var/cache/kvfs, ~/.cache/kvfs": "Indexes; kvctl rebuild makes a lost one anew.",
}

# Pages under a second name: the page they lead to.
ALIASES = {"kvfs.1": "kvctl.1", "mount.kvfs.8": "kvctl-mount.1"}


def pages(root: click.Group) -> dict[str, str]:
    """File name -> text of all pages of a command line."""
    context = _context(root, PROGRAM)
    commands = {name: _get(root, context, name) for name in root.list_commands(context)}
    made = {f"{PROGRAM}.1": _map_page(root, context, commands)}
    for name, command in commands.items():
        if not command.hidden:
            inner = _context(command, name, context)
            made[f"{PROGRAM}-{name}.1"] = _command_page(command, inner)
    aliases = {name: f".so man1/{target}\n" for name, target in ALIASES.items() if target in made}
    return made | aliases


def _context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    return click.Context(command, parent, name, **command.context_settings)


def _get(group: click.Group, context: click.Context, name: str) -> click.Command:
    command = group.get_command(context, name)
    if command is None:
        raise LookupError(f"{group.name} lists a command {name} that it does not have")
    return command


def _map_page(
    root: click.Group, context: click.Context, commands: Mapping[str, click.Command]
) -> str:
    """The page of the program: what there is and where it is described."""
    visible = {name: command for name, command in commands.items() if not command.hidden}
    table = []
    for heading, names in getattr(root, "headings", {"": visible}).items():
        table += [f".SS {_escaped(heading)}"] if heading else []
        table += [
            _item(f"\\fB{_literal(f'{PROGRAM}-{name}')}\\fR(1)", summary(visible[name]))
            for name in names
            if name in visible
        ]
    body = [
        _head(PROGRAM, summary(root)),
        _synopsis(root, context),
        _section("DESCRIPTION", _text(root.help)),
        _section("OPTIONS", _options(root, context)),
        _section("COMMANDS", "\n".join(table)),
        *_manual(root),
        _section("EXAMPLES", _examples(root)),
        *_common(root),
        _see_also([f"{PROGRAM}-{name}" for name in visible]),
    ]
    return _page(body)


def _command_page(command: click.Command, context: click.Context) -> str:
    name = context.command_path.replace(" ", "-")
    body = [
        _head(name, summary(command)),
        _synopsis(command, context),
        _section("DESCRIPTION", _text(command.help)),
        _section("OPTIONS", _options(command, context)),
        _section("COMMANDS", "\n".join(_nested(command, context))),
        *_manual(command),
        _section("EXAMPLES", _examples(command)),
        *_common(command),
        _see_also([PROGRAM]),
    ]
    return _page(body)


def _nested(command: click.Command, context: click.Context) -> Iterator[str]:
    """The commands of a group inside the group: usage, text and options of each, on one page."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = _get(command, context, name)
        below = _context(inner, name, context)
        yield f".SS {_usage(inner, below)}"
        yield _text(inner.help).removeprefix(".PP\n")
        yield _options(inner, below)
        yield from _nested(inner, below)


# sections


def _page(sections: list[str]) -> str:
    return "\n".join(section for section in sections if section) + "\n"


def _section(title: str, body: str) -> str:
    text = body.removeprefix(".PP\n")  # a section begins a paragraph by itself
    return f".SH {title}\n{text}" if text.strip() else ""


def _head(name: str, summary: str) -> str:
    title = f'.TH {_literal(name.upper())} 1 "" "kvfs {__version__}" "kvfs manual"'
    if not summary[:2].isupper():
        summary = summary[:1].lower() + summary[1:]
    return f"{title}\n.SH NAME\n{_literal(name)} \\- {_escaped(summary)}"


def _synopsis(command: click.Command, context: click.Context) -> str:
    return _section("SYNOPSIS", _usage(command, context))


def _usage(command: click.Command, context: click.Context) -> str:
    pieces = " ".join(command.collect_usage_pieces(context))
    return f"\\fB{_literal(context.command_path)}\\fR {_literal(pieces)}"


def _options(command: click.Command, context: click.Context) -> str:
    return "\n".join(_parameters(command, context))


def _parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option):
            record = parameter.get_help_record(context)
            if record:
                yield _item(_highlight(record[0]), record[1])
        elif getattr(parameter, "help", None):  # arguments have texts since click 8.3
            yield _item(_highlight(parameter.make_metavar(context)), str(parameter.help))


def _examples(command: click.Command) -> str:
    text = inspect.cleandoc(command.epilog or "")
    return _text(re.sub(r"(?m)^(\x08\n)?Examples?:\n?", r"\1", text))


def _manual(command: click.Command) -> Iterator[str]:
    module = sys.modules.get(getattr(command.callback, "__module__", ""))
    for title, text in getattr(module, "MANUAL", {}).items():
        yield _section(_escaped(title.upper()), _text(text))


def _common(command: click.Command) -> Iterator[str]:
    """EXIT STATUS, ENVIRONMENT and FILES: the same in every page, so that each stands alone."""
    codes = (_item(f"\\fB{code}\\fR", text) for code, text in EXIT_CODES.items())
    yield _section("EXIT STATUS", "\n".join(codes))
    variables = {v: f"The value of {p}." for p, v in _variables(command)} | ENVIRONMENT
    yield _section("ENVIRONMENT", "\n".join(_item(f"\\fB{v}\\fR", t) for v, t in variables.items()))
    yield _section("FILES", "\n".join(_item(f"\\fI{_literal(f)}\\fR", t) for f, t in FILES.items()))


def _variables(command: click.Command) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        names = parameter.envvar or ()
        for name in [names] if isinstance(names, str) else names:
            yield parameter.opts[0], name


def _see_also(names: list[str]) -> str:
    pages = [f"\\fB{_literal(name)}\\fR(1)" for name in names] + ["\\fBkvfs\\fR(5)"]
    return _section("SEE ALSO", ",\n".join(pages))


# text


def summary(command: click.Command) -> str:
    """The first sentence of the help text, without its full stop."""
    first = inspect.cleandoc(command.help or "").split("\n\n")[0]
    return re.split(r"\.(?:\s|$)", " ".join(first.split()), maxsplit=1)[0]


def _text(text: str | None) -> str:
    """Roff of a help text; what follows a form feed is not for readers (a click convention)."""
    clean = inspect.cleandoc((text or "").split("\f")[0])
    return "\n".join(_paragraph(p) for p in re.split(r"\n\s*\n", clean) if p.strip())


def _paragraph(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if lines[0].strip() == "\b":
        return _verbatim(lines[1:])
    if all(line.startswith(" ") for line in lines):
        return _verbatim(lines)
    if " -- " in lines[0]:
        return "\n".join(_definitions(lines))
    return f".PP\n{_prose(' '.join(paragraph.split()))}"


def _verbatim(lines: list[str]) -> str:
    indent = min((len(n) - len(n.lstrip()) for n in lines if n.strip()), default=0)
    body = "\n".join(_guard(_literal(line[indent:])) for line in lines)
    return f".PP\n.RS 4\n.nf\n{body}\n.fi\n.RE"


def _definitions(lines: list[str]) -> Iterator[str]:
    """`term -- meaning`; lines without the dashes continue the meaning above them."""
    items: list[tuple[str, str]] = []
    for line in lines:
        term, dashes, meaning = line.partition(" -- ")
        if dashes:
            items.append((term.strip(), meaning.strip()))
        else:
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
    return (_item(f"\\fB{_literal(term)}\\fR", meaning) for term, meaning in items)


def _item(term: str, meaning: str) -> str:
    return f".TP\n{_guard(term)}\n{_prose(' '.join(meaning.split()))}"


def _highlight(usage: str) -> str:
    """Options bold, their values in italics."""
    literal = _literal(usage)
    bold = re.sub(r"(?<![\w\\])((?:\\-){1,2}[\w?](?:\w|\\-)*)", r"\\fB\1\\fR", literal)
    return re.sub(r"(?<=[ =])([A-Z][A-Z_.]*|\[[^]]*\]|<[^>]*>)", r"\\fI\1\\fR", bold)


def _literal(text: str) -> str:
    """For what a reader may copy: every hyphen is an ASCII minus."""
    return text.replace("\\", "\\e").replace("-", "\\-")


def _escaped(text: str) -> str:
    """For sentences: only options and the like keep an ASCII minus."""
    escaped = text.replace("\\", "\\e")
    return re.sub(r"(?<!\w)--?(?=\w)", lambda m: m.group().replace("-", "\\-"), escaped)


def _prose(text: str) -> str:
    """Escaped sentences in lines that a diff can show."""
    lines = textwrap.wrap(_escaped(text), 78, break_on_hyphens=False, break_long_words=False)
    return "\n".join(map(_guard, lines))


def _guard(line: str) -> str:
    """A line of text that begins with a dot or an apostrophe would be read as a request."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


def main(arguments: list[str]) -> None:
    """Write all pages into a directory and remove those of commands that are gone."""
    from kvfs.cli.main import main as root

    made = pages(root)
    if not arguments:
        print(*made, sep="\n")
        return
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for stale in {p.name for p in directory.glob(f"{PROGRAM}*.1")} - made.keys():
        (directory / stale).unlink()
    for name, text in made.items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
