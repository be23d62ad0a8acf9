"""`kvctl state`: sliding-window state. The arithmetic is kvfs.state's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, state_slots
from kvfs.cli.settings import Settings

if TYPE_CHECKING:
    from kvfs.layout import Identity
    from kvfs.state.decision import Decision
    from kvfs.state.inventory import Found
    from kvfs.state.policy import Cost

MANUAL = {
    "Policies": """
    A prefix is of use to a model with a sliding window only if the window before its end is there
    too: in a slot, or made anew by a replay of one window in the layers whose state is stored. A
    policy says which block boundaries get a slot:

    full -- every one
    periodic:N -- one every N tokens
    last -- the last one of a prompt, and the one at which the very same prompt can hit again;
    then the last one that decoding crossed. The default
    last:1 -- the same without the one for the same prompt
    zero -- none: every hit replays

    OF BLOCKS compares with the bytes of the prompt's blocks. RETRY is the same prompt again, NEXT
    TURN one that goes on behind it, FORK the average over all prompts that share some number of
    its blocks and then go on otherwise: tokens that are computed although they are stored, +
    tokens that are replayed.
    """,
    "JSON output": """
    kvctl state policy prints an object:

    model, tokens, block_tokens -- what it is about
    window, ring, layers, slot_bytes -- tokens that attention reads, tokens in the ring, layers
    whose state is stored, and bytes of a slot; 0 for a model without a sliding window
    cap, l1 -- tokens that may be hit at most, and cut down to whole blocks
    compute_with_slot -- tokens to compute where all is stored and there is a slot at l1
    compute_without_slot, replay_without_slot -- tokens to compute, and to replay, without it
    exact_replay -- tokens of a replay after which all stored layers are exact
    anchors -- positions at which a prefill in one chunk leaves slots, by the default policy
    latest_chunk -- where the last chunk of a prefill has to begin at the latest for that
    policies -- list of objects, one for each policy: policy, slots, bytes, share (of the bytes of
    the prompt's blocks), retry and turn (objects with tokens, cap, l1, hit_tokens, compute_tokens,
    slot, replay, reason), fork_lost, fork_replay; empty for a model without a sliding window

    """
    + state_slots.JSON.lstrip(),
}


@click.group(
    context_settings=common.HELP,
    epilog=common.examples("""
    kvctl state policy --preset deepseek-v4.1-flash --tokens 131072
    kvctl state policy --ns llama --tokens 8000 --json
    kvctl state pools
    kvctl state pools --remove
    kvctl state slots --at 10.0.0.8:7420 --secret-file /etc/kvfs/secret
    kvctl state pull --secret-file /etc/kvfs/secret prompt.u32
"""),
)
def command() -> None:
    """Look at the sliding-window state that models keep beside blocks."""


@command.command(context_settings=common.HELP)
@common.options
@common.namespace_option
@click.option("--preset", metavar="NAME",
              help="A model whose layout is known; see kvctl-ns(1). Default: the namespace.",
              )  # fmt: skip
@click.option("--tokens", type=click.IntRange(0, 1 << 28), metavar="L", required=True,
              help="Length of the prompt.")  # fmt: skip
@click.option("--period", type=click.IntRange(1), metavar="N", default=4096, show_default=True,
              help="Tokens between the slots of the policy periodic.")  # fmt: skip
def policy(settings: Settings, preset: str | None, tokens: int, period: int) -> None:
    """Show what may be hit of a prompt, and what each policy costs.

    For a prompt of L tokens of which every whole block is stored.
    """
    identity = _identity(settings, preset)
    fields, costs = _fields(identity, tokens, period)
    if settings.as_json:
        output.json_line({**fields, "policies": [cost.to_json() for cost in costs]})
    else:
        _print(fields, costs)


@command.command(context_settings=common.HELP)
@common.json_option
@click.option("--dir", "directory", metavar="DIR", default="/dev/shm", show_default=True,
              help="Where they are.")  # fmt: skip
@click.option(
    "--remove",
    is_flag=True,
    help="Remove those that nobody has open and whose slots have all expired.",
)
@click.option("--live", is_flag=True, help="With --remove: also those with slots of use.")
@click.make_pass_decorator(Settings, ensure=True)
def pools(settings: Settings, directory: str, remove: bool, live: bool) -> None:
    """Show the slot pools of this user on this host.

    A pool takes all its memory from the start, and outlives the processes that use it.
    """
    from kvfs.errors import InputError
    from kvfs.state import inventory

    if live and not remove:
        raise InputError("--live is for --remove")
    found = [(pool, False) for pool in inventory.pools(directory)]
    if remove:
        gone = {pool.path for pool in inventory.sweep(directory, live=live)}
        found = [(pool, pool.path in gone) for pool, _ in found]
    if settings.as_json:
        for pool, removed in found:
            output.json_line({**pool.to_json(), "removed": removed})
    elif found:
        header = ("NAMESPACE", "SLOTS", "LIVE", "BYTES", "IN USE", "")
        output.table(header, (_pool_row(pool, removed) for pool, removed in found), right="lrrr")


def _pool_row(pool: Found, removed: bool) -> tuple[str, ...]:
    return (
        pool.namespace, f"{pool.slots:,}", f"{pool.live:,}", output.size(pool.file_bytes),
        "yes" if pool.in_use else "no", "removed" if removed else "",
    )  # fmt: skip


def _identity(settings: Settings, preset: str | None) -> Identity:
    if preset is not None:
        from kvfs import presets

        return presets.get(preset, weights="-", tokenizer="-")
    with common.open_index(settings) or common.open_store(settings) as store:
        return common.pick_namespace(store, settings).identity


def _fields(identity: Identity, tokens: int, period: int) -> tuple[dict[str, Any], list[Cost]]:
    from kvfs.state.decision import decide_length, exact_tokens
    from kvfs.state.policy import Policy, cost
    from kvfs.state.ring import Ring

    block, state, ring = identity.block_tokens, identity.state, Ring.of(identity)
    stored = tokens // block * block
    bare = decide_length(identity, tokens, stored)
    with_slot = decide_length(identity, tokens, stored, {bare.l1})
    fields = {
        "model": identity.model, "tokens": tokens, "block_tokens": block,
        "window": 0 if state is None else state.window,
        "ring": 0 if state is None else state.ring,
        "layers": 0 if state is None else state.layers,
        "slot_bytes": 0 if state is None else state.slot_bytes,
        "cap": bare.cap, "l1": bare.l1,
        "compute_with_slot": with_slot.compute_tokens,
        "compute_without_slot": bare.compute_tokens,
        "replay_without_slot": bare.replay_tokens,
        "exact_replay": 0 if state is None else exact_tokens(state),
        "anchors": [] if ring is None else list(ring.after_prefill(tokens).anchors),
        "latest_chunk": max(0, tokens - 1) if ring is None else ring.latest_chunk(tokens),
    }  # fmt: skip
    if ring is None:
        return fields, []
    policies = (Policy("full"), Policy("periodic", period), Policy("last"),
                Policy("last", retry=False), Policy("zero"))  # fmt: skip
    return fields, [cost(p, identity, tokens) for p in policies]


def _print(fields: dict[str, Any], costs: list[Cost]) -> None:
    window = (
        f"{fields['window']} tokens, ring of {fields['ring']}, {fields['layers']} layers stored"
    )
    without = f"{fields['compute_without_slot']:,} tokens"
    if fields["replay_without_slot"]:
        without += f", and {fields['replay_without_slot']:,} to replay"
    slotted = bool(costs)
    output.pairs(
        [("prompt", output.many(fields["tokens"], "token")),
         ("window", window if slotted else "none: no slots, no replay"),
         ("slot", f"{fields['slot_bytes']:,} bytes" if slotted else ""),
         ("may be hit", f"{fields['cap']:,} tokens, {fields['l1']:,} in whole blocks"),
         ("to compute", f"{fields['compute_with_slot']:,} tokens"
          + (" with a slot there" if slotted else "")),
         ("without slot", without if slotted else ""),
         ("slots are taken", _anchors(fields) if slotted else "")]
    )  # fmt: skip
    if costs:
        output.line()
        header = ("POLICY", "SLOTS", "BYTES", "OF BLOCKS", "RETRY", "NEXT TURN", "FORK")
        output.table(header, map(_row, costs), right="lrrrrrr")


def _anchors(fields: dict[str, Any]) -> str:
    where = " and ".join(f"{anchor:,}" for anchor in fields["anchors"])
    if not where:
        return "nowhere: the prompt is too short"
    return f"at {where}, if the last chunk begins at {fields['latest_chunk']:,} or before"


def _row(cost: Cost) -> tuple[str, ...]:
    return (
        str(cost.policy), f"{cost.slots:,}", f"{cost.slot_bytes:,}", f"{cost.share:.1%}",
        _work(cost.retry), _work(cost.turn), f"{cost.fork_lost:,.1f} + {cost.fork_replay:,.1f}",
    )  # fmt: skip


def _work(decision: Decision) -> str:
    lost = decision.l1 - decision.hit_tokens
    return f"{lost:,} + {decision.replay_tokens:,}"


command.add_command(state_slots.slots)
command.add_command(state_slots.pull)
