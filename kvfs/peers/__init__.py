"""Slots between hosts: pulled by who needs one, pushed by who leaves.

auth    who may ask: a secret that the hosts share, over each request and each answer
wire    addresses, paths and headers of the protocol, for both sides
http    just as much HTTP/1.1 as the client needs, with one deadline over everything
client  pull, push and ask; connections are kept; whatever fails is a reason, never an exception
load    this prompt's slot: from here, from the nearest holder, or not: replay
drain   this host's slots, moved to others before it leaves
bundle  a request that goes on elsewhere: tokens, plan, slot, sampling state
app     the answers of a host that has slots; connection: how they are sent; server: the socket and
        the thread it runs on; pools: the slots it has; announce: tells of them; service: all of it

The hosts trust each other and nobody else: without the secret nothing is told or taken. Packets are
not encrypted; what may be read or changed on the way has to go through a tunnel. Only answering
needs anything that kvfs itself does not (`pip install 'kvfs[serve]'`).
"""

from __future__ import annotations
