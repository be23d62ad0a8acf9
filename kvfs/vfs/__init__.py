"""The tree of a store: see kvfs.vfs.tree. No FUSE in here."""

from kvfs.vfs.node import Entry, Node, Stat
from kvfs.vfs.tree import Tree

__all__ = ["Entry", "Node", "Stat", "Tree"]
