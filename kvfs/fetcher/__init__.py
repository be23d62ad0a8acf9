"""FETCH as a process of its own: from segments into a shared-memory arena, in chain order.

For clients: engine (never raises, reconnects), client and ticket (one connection, one request),
launch (finds and starts). For both sides: wire (frames), control (progress in shared memory). The
fetcher: process, server and watches (trio), core and stretches (which blocks are where, shared
between requests), workers (threads that read and verify).

A client needs the store's mount no more than an index: the plan says where the blocks are.
"""
