"""`kvctl check`: how much of a prompt is stored. Started per request by simple routers.

Imports nothing heavy, and reads this host's index alone where there is one: no system call goes to
the shared storage, so it answers while that hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_MISS, EXIT_OK, EXIT_PARTIAL, InputError

if TYPE_CHECKING:
    from kvfs.chain import PrefixHasher
    from kvfs.explain import Explanation, Sibling
    from kvfs.local import LocalStore
    from kvfs.namespace import Namespace
    from kvfs.plan import Plan
    from kvfs.state.decision import Decision

MANUAL = {
    "Token ids": tokens.MANUAL,
    "Reasons": """
    hit -- every whole block of the prompt is stored
    no tokens, short -- the prompt is empty, or shorter than a block
    root unknown -- not even the first block is stored: often another tokenizer, template or
    namespace
    diverged at block K -- what is stored goes on otherwise, or not at all
    expired at block K -- it was stored, and its time is over
    """,
    "JSON output": """
    An object:

    namespace, nsid -- name of the namespace and its id
    tokens -- tokens of the prompt
    block_tokens -- tokens of a block
    stored_tokens -- the longest stored prefix
    hit_tokens -- what of it may be hit: a token, or a sliding window, is left to compute
    reason -- one of those above
    extents -- list of objects, one for each stretch of stored blocks: segment (path in the
    store), segment_id, slot, count and block (records, and the number of the first block),
    offset, stride, extent, first (bytes), expires_ms (milliseconds since 1970)
    slots -- list of objects, one for each host that is said to hold the sliding-window state of
    the hit, the one to ask first in front: position (tokens before it), host, address, pool (hex
    digits), generation, expires_ms
    decision -- only where the model has a sliding window: tokens, cap (tokens that may be hit at
    most), l1 (the hit, if its slot is there), hit_tokens (the hit as it is), compute_tokens, slot
    (position of the slot to load, or null), replay (object with start, end, tokens, layers,
    exact_layers and writes_blocks, or null), reason, holders (those of slots that have it)
    explain -- with --explain: block and first_token (where the stored prefix ends), hash and
    parent of that block, expired_ms or null, sibling_count, siblings (objects with hash,
    written_ms, expires_ms, common_tokens, ours, theirs, shift) and elsewhere (objects with
    namespace and stored_tokens)

    The object is the plan that kvctl fetch --plan takes, on any host.
    """,
}


@common.command("""
    kvctl check prompt.u32
    kvctl check --json - < prompt.u32
    kvctl check --tokens 1,2,3 --explain
    kvctl check -q prompt.json && echo full hit
""")
@common.options
@common.namespace_option
@tokens.options
@click.option("--catch-up", is_flag=True,
              help="First apply what other hosts have written: reads the shared storage.",
              )  # fmt: skip
@click.option("--explain", "why", is_flag=True,
              help="Say where the prompt leaves what is stored, and what is stored there; reads "
                   "the shared storage.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, catch_up: bool,
    why: bool, quiet: bool,
) -> int:  # fmt: skip
    """Say how much of a prompt is stored.

    Exits with 0 if all that may be hit is stored, 4 if a shorter prefix is, 3 if nothing is.
    """
    ids = tokens.read(path, inline, form)
    explanation = None
    with opened(settings, fully=catch_up or why) as (store, ns):
        hasher = ns.hasher(ids)
        plan = store.check(ns, hasher)
        if why and plan.reason != "hit":
            explanation = _explain(store, ns, hasher, plan)
        if not quiet:
            _print(settings, plan, _decision(ns, plan), explanation, store.now_ms())
    return exit_code(ns, plan)


def _explain(store: LocalStore, ns: Namespace, hasher: PrefixHasher, plan: Plan) -> Explanation:
    from kvfs.explain import explain
    from kvfs.store import Store

    assert isinstance(store, Store)
    return explain(store, ns, hasher, plan)


def _decision(ns: Namespace, plan: Plan) -> Decision | None:
    """What a sliding window makes of the plan; None for a model without one."""
    if ns.identity.state is None:
        return None
    from kvfs.state.decision import decide

    return decide(plan, ns.identity)


@contextlib.contextmanager
def opened(settings: Settings, *, fully: bool) -> Iterator[tuple[LocalStore, Namespace]]:
    """The index alone if that will do, else everything: on a new host, for a new namespace."""
    with contextlib.ExitStack() as stack:
        store = None if fully else common.open_index(settings)
        ns: Namespace | None = None
        if store is not None:
            stack.enter_context(store)
            with contextlib.suppress(InputError):
                ns = common.pick_namespace(store, settings)
        if store is None or ns is None:
            store = stack.enter_context(common.open_store(settings))
            ns = common.pick_namespace(store, settings)
        yield store, ns


def exit_code(ns: Namespace, plan: Plan) -> int:
    """0 for a full hit, 4 for a part of one, 3 for a miss."""
    if not plan.stored_tokens:
        return EXIT_MISS
    return EXIT_OK if plan.hit_tokens == ns.identity.hit_cap(plan.tokens) else EXIT_PARTIAL


def _print(
    settings: Settings, plan: Plan, decision: Decision | None, why: Explanation | None, now_ms: int
) -> None:
    if settings.as_json:
        result: dict[str, Any] = plan.to_json()
        if decision is not None:
            result["decision"] = decision.to_json()
        if why is not None:
            result["explain"] = why.to_json()
        output.json_line(result)
        return
    blocks = plan.tokens // plan.block_tokens
    share = f" ({plan.hit_tokens / plan.tokens:.1%})" if plan.tokens else ""
    segments = len({extent.segment for extent in plan.extents})
    where = f"{output.many(len(plan.extents), 'run')} in {output.many(segments, 'segment')}"
    soonest = min((extent.expires_ms for extent in plan.extents), default=None)
    output.pairs(
        [("prompt", f"{output.many(plan.tokens, 'token')}, {output.many(blocks, 'block')}"),
         ("stored", f"{plan.stored_tokens:,} tokens, {output.many(plan.stored_blocks, 'block')}"),
         ("may be hit", f"{plan.hit_tokens:,} tokens{share}"),
         ("window", "" if decision is None else _window(decision)),
         ("reason", plan.reason),
         ("where", where if segments else ""),
         ("expires", "" if soonest is None else f"in {output.left(soonest, now_ms)}")]
    )  # fmt: skip
    if why is not None:
        _print_explanation(why)


def _window(decision: Decision) -> str:
    """What the sliding window takes from the hit."""
    if not decision.l1:
        return decision.reason
    hosts = list(dict.fromkeys(hint.host for hint in decision.holders))
    where = f" on {', '.join(hosts)}" if hosts else ""
    text = f"{decision.reason}{where}; hit {decision.hit_tokens:,} tokens"
    return text + f", replay {decision.replay_tokens:,}" * (decision.replay is not None)


def _print_explanation(why: Explanation) -> None:
    first = why.block * why.block_tokens
    output.line()
    output.line(f"block {why.block} (tokens {first:,} to {first + why.block_tokens - 1:,}) is the "
                f"first that is not stored")  # fmt: skip
    if why.hash:
        output.line(f"  its hash is {why.hash.hex()}")
    else:
        output.line("  the prompt ends within it")
    if why.expired_ms is not None:
        output.line(f"  it was stored and expired at {output.when(why.expired_ms)}")
    where = "at the start" if not why.block else f"behind block {why.block - 1}"
    if why.hash and why.expired_ms is None:
        others = output.many(why.sibling_count, "other block")
        output.line(f"  {others} stored {where}")
    for sibling in why.siblings:
        output.line(f"  nearest: {sibling.hash.hex()}, {_likeness(sibling, first)}")
    for name, stored in why.elsewhere:
        output.line(f"  namespace {name} holds {stored:,} tokens of this prompt")


def _likeness(sibling: Sibling, first: int) -> str:
    if sibling.common_tokens is None:
        return "cannot be read"
    same = f"same for {output.many(sibling.common_tokens, 'token')}"
    if sibling.ours is not None and sibling.theirs is not None:
        at = first + sibling.common_tokens
        same += f"; token {at:,} is {sibling.ours} here and {sibling.theirs} there"
    if sibling.shift:
        more = "more" if sibling.shift > 0 else "fewer"
        same += f"; the same ids, with {abs(sibling.shift)} {more} in front here"
    return same
