"""kvfs: a store of LLM KV-cache prefixes.

    with kvfs.Store.open("/path/of/store") as store:
        ns = store.namespace("llama")
        plan = store.check(ns, tokens)          # metadata only, microseconds
        got = store.fetch(ns, plan, tokens)     # verified blocks
        store.put(ns, tokens, blocks)

Importing this package must stay cheap: routers and `kvctl check` start it per request, so nothing
here imports torch, pyfuse3, trio, numpy or click.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfs.chain import PrefixHasher
    from kvfs.errors import KvfsError
    from kvfs.fetch import FetchResult
    from kvfs.layout import Identity, Partition, Span, StateLayout
    from kvfs.namespace import Namespace
    from kvfs.plan import Extent, Plan
    from kvfs.put import PutResult
    from kvfs.store import Store

__version__ = "0.1.0"

_HOME = {
    "Store": "store", "Namespace": "namespace", "Plan": "plan", "Extent": "plan",
    "FetchResult": "fetch", "PutResult": "put", "PrefixHasher": "chain", "KvfsError": "errors",
    "Identity": "layout", "Span": "layout", "StateLayout": "layout", "Partition": "layout",
}  # fmt: skip

__all__ = [
    "Extent", "FetchResult", "Identity", "KvfsError", "Namespace", "Partition", "Plan",
    "PrefixHasher", "PutResult", "Span", "StateLayout", "Store", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Each name is imported when it is first used, so that a program pays only for what it uses.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"kvfs.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvfs' has no attribute {name!r}")
