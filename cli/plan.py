"""`kvctl plan`: what a fleet would ask of its storage. How it is reckoned, kvfs.sim.fleet says."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, DURATION, FiniteRange

if TYPE_CHECKING:
    from kvfs.sim.fleet import Fleet, Plan

MANUAL = {
    "How it is reckoned": """
    The trace says how long prompts are, how much of each was asked before and in how many runs that
    lies. The preset says how large a block is. GPUs and their rate say how many tokens are computed
    a second: those of prompts that are not stored; so more hits mean more requests, and more bytes
    read. Every block that is computed is stored, and stays for its time to live, or for less if the
    room does not last so long. What GPUs that decode store comes with the prompt that follows. The
    index takes 42 bytes a block; a router reads the journals of all writers. On 3FS each run begins
    in a chunk of its own, and the directory of a day goes by one call. What removals 3FS has shown,
    its authors have published: it is no limit.

    Nothing is stored and no time passes: queues, retries and hot spots are not in it.
    """,
    "JSON output": """
    An object; rates are a second, sizes bytes, shares from 0 to 1:

    requests -- the fleet's
    prompt_tokens -- of a request, on average
    hit_share -- of the blocks asked for
    capacity_bytes, resident_bytes -- room there is, and what of it is taken
    retention_seconds -- how long a block that nobody asks for stays
    blocks, index_bytes -- stored blocks, and the index of each host that has one
    journal_rate -- bytes that each router reads
    server_reads, server_read_rate, server_read_share -- I/Os and bytes of one storage server, and
    their share of what it can do
    server_writes, server_write_rate, server_write_share -- the same for writes
    unused_share -- of the room: what runs leave at the ends of chunks
    removals -- files removed
    removals_by_block -- the same with a file for each block
    removal_calls -- calls that remove them: one for each day's directory, or one for each file
    where room is too short for the time to live
    chunk_removals, chunk_removals_by_block -- chunks that the servers then remove
    """,
}
DEFAULT_TRACE = "weka_claude_code_small"
_MOST = 1_000_000_000


@click.command(
    context_settings=common.HELP,
    epilog=common.examples("""
    kvctl plan
    kvctl plan --prefill 256 --rate 14000 --servers 12 --replicas 2
    kvctl plan --preset deepseek-v3 --ttl 7d --chunk 4M mooncake_conversation_2000
"""),
)
@common.json_option
@click.option("--prefill", "prefill_gpus", type=click.IntRange(1, _MOST), default=64,
              show_default=True, help="GPUs that compute prompts.")  # fmt: skip
@click.option("--rate", "prefill_rate", type=FiniteRange(1, _MOST), default=10_000,
              show_default=True, help="Tokens a second that one of them computes.")  # fmt: skip
@click.option("--servers", type=click.IntRange(1, _MOST), default=3, show_default=True,
              help="Storage servers.")  # fmt: skip
@click.option("--server", "server_bytes", type=BYTES, metavar="SIZE",
              help="Room of one. Default: 20 drives of 30.73 TB.")  # fmt: skip
@click.option("--read", "server_read", type=BYTES, metavar="SIZE",
              help="Bytes a second that one reads. Default: 40 GB.")  # fmt: skip
@click.option("--write", "server_write", type=BYTES, metavar="SIZE",
              help="Bytes a second that one writes. Default: 5 GB.")  # fmt: skip
@click.option("--replicas", type=click.IntRange(1, _MOST), default=1, show_default=True,
              help="How often each byte is stored.")  # fmt: skip
@click.option("--ttl", "ttl_seconds", type=DURATION, metavar="TIME",
              help="Time to live of a block. Default: 3d.")  # fmt: skip
@click.option("--chunk", "extent", type=BYTES, metavar="SIZE",
              help="Chunk of the file system. Default: 1M.")  # fmt: skip
@click.option("--preset", default="deepseek-v4.1-flash", show_default=True,
              help="Model whose blocks are stored.")  # fmt: skip
@click.option("--packed", is_flag=True, help="Runs share chunks, as on other than 3FS.")
@click.argument("trace", default=DEFAULT_TRACE)
@click.make_pass_decorator(Settings, ensure=True)
def command(settings: Settings, /, trace: str, preset: str, packed: bool, **chosen: Any) -> None:
    """Say what a fleet would ask of its storage.

    TRACE is a trace file or the name of one that comes with kvfs (kvctl replay --list): the mix of
    requests is taken from it.
    """
    from kvfs import presets
    from kvfs.record import Shape
    from kvfs.sim.fleet import Fleet, plan
    from kvfs.sim.trace import find

    identity = presets.get(preset, weights="plan", tokenizer="plan")
    given = {name: value for name, value in chosen.items() if value is not None}
    fleet = Fleet(
        stride=Shape.of(identity).stride, block_tokens=identity.block_tokens,
        own_extents=not packed, **given,
    )  # fmt: skip
    result = plan(find(trace).requests(), fleet)
    if settings.as_json:
        output.json_line(asdict(result))
    else:
        _print(result, fleet)


def _print(p: Plan, fleet: Fleet) -> None:
    from kvfs.sim.fleet import REMOVALS_SHOWN as shown

    day = p.removal_calls * 86400
    calls = f"{day:.0f} call a day" if day <= 1 else f"{p.removal_calls:,.1f} calls/s"

    def rate(n: float) -> str:
        return f"{output.size(n)}/s"

    output.pairs([
        ("requests", f"{p.requests:,.1f}/s of {p.prompt_tokens:,.0f} tokens, "
                     f"{p.hit_share:.1%} of their blocks stored"),
        ("room", f"{output.size(p.resident_bytes)} taken of {output.size(p.capacity_bytes)}, "
                 f"{p.unused_share:.1%} of it unused by runs"),
        ("blocks", f"{p.blocks:,.0f}, each for {output.duration(p.retention_seconds)}"),
        ("index", f"{output.size(p.index_bytes)} on each host that has one"),
        ("journals", f"{rate(p.journal_rate)} read by each router"),
        ("server reads", f"{p.server_reads:,.0f}/s, {rate(p.server_read_rate)}, "
                         f"{p.server_read_share:.0%} of what it can do"),
        ("server writes", f"{p.server_writes:,.0f}/s, {rate(p.server_write_rate)}, "
                          f"{p.server_write_share:.0%} of what it can do"),
        ("removals", f"{p.removals:,.1f} files/s by {calls}; "
                     f"a file for each block: {p.removals_by_block:,.0f}/s"),
        ("chunks", f"{p.chunk_removals:,.0f}/s removed by the servers; a file for each block: "
                   f"{p.chunk_removals_by_block:,.0f}/s, {p.chunk_removals_by_block / shown:.1%} "
                   f"of what 3FS has shown ({shown / 1e6:.1f} million/s)"),
    ])  # fmt: skip
    for share, what in ((p.server_read_share, "read"), (p.server_write_share, "write")):
        if share > 1:
            output.line(f"the storage cannot {what} so much: it would bound the fleet")
