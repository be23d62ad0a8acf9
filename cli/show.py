"""`kvctl show`: everything that is known of a block, read from its record and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, places
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_OK, DamageError

if TYPE_CHECKING:
    from kvfs.index.schema import Run
    from kvfs.namespace import Namespace
    from kvfs.store import Store
    from kvfs.vfs.file import Place

MANUAL = {
    "JSON output": """
    An object:

    store, namespace -- where
    block -- number of the block in its chain
    first_token -- number of its first token
    hash, parent -- chain hashes of the block and of the one before it
    run -- object: head (hash of its first block), block, blocks: what was written together
    children -- number of runs that follow the block
    class -- its TTL class
    written_ms, expires_ms -- milliseconds since 1970
    segment, slot, offset -- where the record is: path in the store, number, byte
    payload_bytes, record_bytes -- bytes of the payload and of the whole record
    damage -- null if the record verifies, else what is wrong with it
    checksum -- xxh3-64 of the payload, 16 hex digits; null if damaged
    token_ids -- with --ids: the block's token ids; null if damaged
    """,
}


@common.command("""
    kvctl show 5a1f0c22
    kvctl show llama-3.1-8b-30c1a20f43cc/000000-5a1f0c2277ab03d1/000007.kv
    kvctl show --ids --json 5a1f0c22 | jq .token_ids
""")
@common.options
@common.namespace_option
@click.option("--ids", is_flag=True, help="Show its token ids, too.")
@click.argument("name")
def command(settings: Settings, ids: bool, name: str) -> int:
    """Show all there is to know about a block, and verify it.

    NAME is the beginning of the block's hash or its path in the tree; of a node, its first block
    is shown. Exits with 12 if the block is damaged.
    """
    with common.open_store(settings) as store:
        ns = common.pick_namespace(store, settings)
        run, at = places.find(store, ns, name)
        result, damage = _describe(store, ns, run, at, ids)
    if settings.as_json:
        output.json_line(result)
    else:
        _print(result)
    return EXIT_OK if damage is None else damage.exit_code


def _describe(
    store: Store, ns: Namespace, run: Run, at: int, ids: bool
) -> tuple[dict[str, Any], DamageError | None]:
    from kvfs.vfs.file import Place

    hash_ = run.hash(at)
    parent = run.hash(at - 1) if at else run.parent
    segment = store.index.segment(run.seg)
    number = run.block + at
    place = Place(
        number, hash_, parent, segment, run.slot + at, run.written_ms, run.expires_ms,
        run.class_id, run.head, at,
    )  # fmt: skip
    result = {
        **common.heading(store, ns), "block": number, "first_token": number * ns.block_tokens,
        "hash": hash_.hex(), "parent": parent.hex(),
        "run": {"head": run.head.hex(), "block": run.block, "blocks": run.count},
        "children": len(store.index.children(ns.number, hash_)),
        "class": store.index.class_names().get(run.class_id, ""),
        "written_ms": run.written_ms, "expires_ms": run.expires_ms, "segment": segment.path,
        "slot": place.slot, "offset": place.offset, "payload_bytes": ns.row_bytes,
        "record_bytes": ns.stride,
    }  # fmt: skip
    return result, _verify(store, ns, place, ids, result)


def _verify(
    store: Store, ns: Namespace, place: Place, ids: bool, result: dict[str, Any]
) -> DamageError | None:
    """Adds what the record itself says; returns what is wrong with it. Raises BackendError."""
    from kvfs.vfs.file import read_payload, read_tokens, read_trailer

    wanted = ["checksum", "token_ids"] if ids else ["checksum"]
    try:
        read_payload(store.backend, ns, place)
        result["damage"] = None
        result["checksum"] = f"{read_trailer(store.backend, ns, place).checksum:016x}"
        if ids:
            result["token_ids"] = list(read_tokens(store.backend, ns, [place])[0])
    except DamageError as e:
        result.update(damage=str(e), **dict.fromkeys(wanted))
        return e
    return None


def _print(result: dict[str, Any]) -> None:
    run, first = result["run"], result["first_token"]
    last = f"{run['block'] + run['blocks'] - 1:,}"
    rows = [
        ("namespace", result["namespace"]),
        ("block", f"{result['block']:,}, from token {first:,} on"),
        ("hash", result["hash"]),
        ("parent", result["parent"]),
        ("run", f"blocks {run['block']:,} to {last}, begins with {run['head']}"),
        ("followed by", output.many(result["children"], "run")),
        ("class", result["class"]),
        ("written", output.when(result["written_ms"])),
        ("expires", output.when(result["expires_ms"])),
        ("segment", result["segment"]),
        ("record", f"slot {result['slot']}, byte {result['offset']:,}, "
                   f"{result['record_bytes']:,} bytes"),
        ("payload", f"{result['payload_bytes']:,} bytes"),
        ("checksum", result["checksum"] or ""),
        ("verified", result["damage"] or "yes"),
    ]  # fmt: skip
    output.pairs(rows)
    if result.get("token_ids"):
        output.line(" ".join(map(str, result["token_ids"])))
