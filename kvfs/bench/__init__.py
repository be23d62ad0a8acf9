"""`kvctl bench`: what this machine does, each figure beside the limit of the hardware in one run.

A benchmark returns rows (kvfs.bench.timing.Row). A row's ratio is to a reference that is measured
in turns with it, so that it holds on a machine whose speed moves while it runs; seconds do not
travel, ratios do.

timing     rows, and measuring cases in turns       place      temporary stores, page cache
synthetic  an index of millions of blocks           check      `check.*`
payload    prompts of 1,022 blocks and their bytes  put        `put.*`
fetch      `fetch.*`                                startup    `startup.*`
state      `state.*`, from state_host               netns      two network namespaces and a link
follow     `follow.*`                               cleaner    `cleaner.*`
fetcher    `fetch.fetcher.*`, with plain, clients   advice     what the figures of fetch advise
report     tables and JSON

steady     `steady.*`: days of a store's life
swap-in    `swap.*`, from kvfs.gpu.bench: the only one that needs torch

A new benchmark is a module with `run(options) -> Iterator[Row]`, named in BENCHES.
"""

from __future__ import annotations

BENCHES = ("check", "put", "fetch", "startup", "follow", "cleaner", "state")
LONG = ("steady", "swap-in")
"""Those that take many minutes, or need torch: only when they are named."""
ELSEWHERE = {"swap-in": "kvfs.gpu.bench"}
"""Modules of those that are built on what is above this package."""
