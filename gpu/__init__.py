"""Swap-in: from host memory into the KV pool of an engine, layer by layer, and back.

swap_in      a fetch into paged KV tensors, a layer at a time, in a thread of the engine process
swap_out     the mirror: blocks of an engine's memory as rows for `Store.put`
strategies   ways to copy; batched, gather: those that only a GPU has
choosing     which of them, by measurement; found: what the machine has
cudart       the calls of the CUDA runtime that torch does not pass on
paged        where the bytes of a row belong
host_memory  the arena as tensors; memory pinned exactly as large as it is
streams      the order of copies, on a GPU and on a CPU
bench        figures

Beside the connectors it is the only part of kvfs that may import torch, and nothing but connectors
imports it.
"""
