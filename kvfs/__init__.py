"""kvfs: a store of LLM KV-cache prefixes.

Importing this package must stay cheap: routers and `kvctl check` start it per request, so nothing
here imports torch, pyfuse3, trio, numpy or click.
"""

__version__ = "0.1.0"
