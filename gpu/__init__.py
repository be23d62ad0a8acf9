"""Swap-in: from host memory into the KV pool of an engine, layer by layer.

What belongs here: pinned staging buffers, copy streams, the hand-over of a layer to the forward
pass that needs it next, and the kernels that scatter block rows into an engine's pages. It is the
only part of kvfs that may import torch, and nothing outside it and the connectors imports it.
"""
