"""`kvctl ns`: namespaces. What an identity is made of is kvfs.layout's and kvfs.presets' to say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.layout import Identity, Partition
    from kvfs.namespace import Namespace
    from kvfs.store import Store

MANUAL = {
    "Identity": """
    Two descriptions that differ in any field are two namespaces, and nothing that is stored in one
    is ever a hit in the other. A description is a JSON object:

    model, weights, tokenizer -- strings: a name for people, the revision or digest of the weights,
    the digest of the tokenizer
    spans -- list of objects with layer, part, offset and length: where each part of each layer
    lies in the row of a block, in bytes
    row_bytes -- bytes of a row, padding included
    record_format -- string: dtype, scales and packing of the bytes
    block_tokens -- tokens of a block; default 128
    partition -- object with tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size; default: whole
    adapter, salt -- strings; default ""
    hash -- xxh3-128 (default), blake3, or external where an engine keys the blocks itself
    state -- object with window, backtrack, layers, token_bytes, or null (default)
    """,
    "JSON output": """
    An object for each namespace:

    namespace -- its name
    nsid, fingerprint -- hex digits
    root -- parent hash of every first block, hex digits
    block_tokens -- tokens of a block
    row_bytes, stride -- bytes of a block as the engine has it, and as it is stored

    and with ns show also

    runs, blocks, bytes -- what is stored and not expired, as this host's index knows it; bytes
    of payload
    expired_blocks -- stored blocks whose time is over
    identity -- the description; the salt is shown as a digest
    """,
}


@click.group(
    context_settings=common.HELP,
    epilog=common.examples("""
    kvctl ns create --preset deepseek-v4.1-flash --weights 5f1c2e7 --tokenizer sha256:9be0
    kvctl ns create --preset llama-3.1-8b --tp 0/8 --weights main@0e9e39f --tokenizer 1bd2
    kvctl ns create --from identity.json
    kvctl ns list
    kvctl ns show llama
"""),
)
def command() -> None:
    """Make and show namespaces, one for each model and KV layout."""


@command.command(context_settings=common.HELP)
@common.options
@click.option("--preset", metavar="NAME",
              help="A model whose layout is known: deepseek-v4.1-flash, llama-3.1-8b, deepseek-v3, "
                   "or tiny and tiny-swa to try things out.")  # fmt: skip
@click.option("--from", "source", metavar="FILE",
              help="A description in JSON, - for the standard input; see kvctl-ns(1).")  # fmt: skip
@click.option("--weights", metavar="REV", help="Revision or digest of the weights.")
@click.option("--tokenizer", metavar="DIGEST", help="Digest of the tokenizer.")
@click.option("--tp", metavar="RANK/SIZE", help="Tensor-parallel share, such as 0/8.")
@click.option("--pp", metavar="RANK/SIZE", help="Pipeline-parallel share.")
@click.option("--adapter", metavar="NAME", default="", help="LoRA or other adapter.")
@click.option("--hash", "hash_", metavar="NAME",
              help="The chain hash; blake3 where tenants share a store. Default: xxh3-128.",
              )  # fmt: skip
@click.option("--salt-file", metavar="FILE",
              help="A file with the tenant's salt, as text: who does not know it never hits.",
              )  # fmt: skip
def create(
    settings: Settings, preset: str | None, source: str | None, salt_file: str | None,
    weights: str | None, tokenizer: str | None, tp: str | None, pp: str | None,
    adapter: str, hash_: str | None,
) -> None:  # fmt: skip
    """Make a namespace from a preset or a description.

    One that exists already is left as it is.
    """
    from kvfs import presets

    if (preset is None) == (source is None):
        raise InputError("give either --preset with --weights and --tokenizer, or --from")
    if source is not None:
        given = (weights, tokenizer, tp, pp, salt_file, adapter or None, hash_)
        if any(value is not None for value in given):
            raise InputError("with --from the description says it all; leave the other options")
        identity = read_identity(source)
    elif weights is None or tokenizer is None:
        raise InputError("a preset is only a layout: give --weights and --tokenizer as well")
    else:
        identity = presets.get(
            preset or "", weights=weights, tokenizer=tokenizer, partition=_partition(tp, pp),
            adapter=adapter, hash=hash_ or "xxh3-128",
            salt="" if salt_file is None else read_salt(salt_file),
        )  # fmt: skip
    with common.open_store(settings) as store:
        ns = store.create_namespace(identity)
        if settings.as_json:
            output.json_line(describe(ns))
        else:
            output.line(ns.name)


def read_salt(path: str) -> str:
    """A tenant's salt, without the end of its line. Raises InputError.

    An empty one is refused: it would be no salt at all, and nobody would notice.
    """
    try:
        salt = tokens.load(path).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InputError(
            f"{path}: a salt is UTF-8 text; of random bytes take the base64 (base64 -w0)"
        ) from None
    if not salt:
        raise InputError(f"{path}: empty; a namespace without a salt needs no --salt-file")
    return salt


def read_identity(path: str) -> Identity:
    """An identity from a JSON file; fields that have a default may be left out."""
    import json

    from kvfs.layout import ENCODING_VERSION, Identity, Partition

    try:
        data = json.loads(tokens.load(path))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not JSON: {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: a description is a JSON object")
    whole = {name: getattr(Partition(), name) for name in Partition.__slots__}
    defaults = {
        "version": ENCODING_VERSION, "block_tokens": 128, "adapter": "", "hash": "xxh3-128",
        "salt": "", "state": None,
    }  # fmt: skip
    partition = data.get("partition", {})
    filled = {**defaults, **data}
    filled["partition"] = {**whole, **partition} if isinstance(partition, dict) else partition
    try:
        return Identity.from_json(filled)
    except InputError as e:
        raise InputError(f"{path}: {e}") from None


def _partition(tp: str | None, pp: str | None) -> Partition:
    from kvfs.layout import Partition

    (tp_rank, tp_size), (pp_rank, pp_size) = _share("--tp", tp), _share("--pp", pp)
    return Partition(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)


def _share(option: str, text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    rank, _, size = text.partition("/")
    try:
        return int(rank), int(size)
    except ValueError:  # Python reads no number of thousands of digits either
        raise InputError(f"{option} {text}: a share is RANK/SIZE, such as 0/8") from None


@command.command("list", context_settings=common.HELP)
@common.options
def list_(settings: Settings) -> None:
    """List the namespaces of a store."""
    with common.open_store(settings) as store:
        found = store.listed_namespaces()
    if settings.as_json:
        for ns in found:
            output.json_line(describe(ns))
        return
    rows = [(ns.name, f"{ns.block_tokens}", f"{ns.row_bytes:,}", ns.identity.hash) for ns in found]
    output.table(("NAMESPACE", "TOKENS", "BYTES", "HASH"), rows, right="lrr")


@command.command(context_settings=common.HELP)
@common.options
@click.argument("name")
def show(settings: Settings, name: str) -> None:
    """Show all there is to know about the namespace NAME.

    NAME may be the beginning of a name.
    """
    with common.open_store(settings) as store:
        ns = store.namespace(name)
        values = {**describe(ns), **count(store, ns), "identity": ns.identity.redacted()}
    if settings.as_json:
        output.json_line(values)
        return
    output.pairs(
        [("namespace", ns.name), ("fingerprint", values["fingerprint"]), ("root", values["root"]),
         ("block", f"{ns.block_tokens} tokens, {ns.row_bytes:,} bytes, stored as {ns.stride:,}"),
         ("stored", f"{values['blocks']:,} blocks in {values['runs']:,} runs, "
                    f"{output.size(values['bytes'])}"),
         ("expired", f"{values['expired_blocks']:,} blocks" if values["expired_blocks"] else ""),
         *_identity_rows(values["identity"])]
    )  # fmt: skip


def describe(ns: Namespace) -> dict[str, Any]:
    """The JSON fields of a namespace."""
    return {
        "namespace": ns.name, "nsid": ns.nsid.hex(), "fingerprint": ns.identity.fingerprint.hex(),
        "root": ns.root.hex(), "block_tokens": ns.block_tokens, "row_bytes": ns.row_bytes,
        "stride": ns.stride,
    }  # fmt: skip


def count(store: Store, ns: Namespace) -> dict[str, int]:
    """What the index has of a namespace: it looks at every run."""
    runs = blocks = expired = 0
    now = store.now_ms()
    for run in store.index.all_runs(ns.number):
        if run.expires_ms <= now:
            expired += run.count
        else:
            runs, blocks = runs + 1, blocks + run.count
    return {
        "runs": runs, "blocks": blocks, "bytes": blocks * ns.row_bytes, "expired_blocks": expired,
    }  # fmt: skip


def _identity_rows(identity: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in identity.items():
        if key == "spans":
            layers = {span["layer"] for span in value}
            parts = dict.fromkeys(span["part"] for span in value)
            rows.append(("layers", f"{len(layers)}, each with {', '.join(parts)}"))
        elif isinstance(value, dict):
            rows.append((key, ", ".join(f"{k} {v}" for k, v in value.items())))
        elif key not in ("version", "row_bytes", "block_tokens") and value not in ("", None):
            rows.append((key, str(value)))
    return rows
