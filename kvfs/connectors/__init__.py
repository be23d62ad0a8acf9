"""Connectors: how the caches of inference engines get into a store and out of it again.

A few modules for each engine; the engines share the public calls of the store, `settings`, and
`digests` of files. What a connector must do: build the identity from what shapes the bytes
(weights, dtype, layout, rank, adapter), never from a name alone; turn whatever the storage does
into a shorter prefix, never into an exception or a wrong byte; leave at least one token to compute,
where the engine does not.

This package imports no engine and nothing of kvfs imports it: who uses an engine imports that
engine's module.
"""
