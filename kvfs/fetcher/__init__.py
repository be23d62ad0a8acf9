"""FETCH as a process of its own: from segments into a shared-memory arena, in chain order.

wire      the frames between client and fetcher          client   what an engine process uses
tickets   a request, and its progress in shared memory   server   trio: sockets and deadlines
core      which blocks are where, shared between tickets launch   one fetcher a host, user and store
workers   threads that read and verify

A client needs the store's mount no more than an index: the plan says where the blocks are.
"""
