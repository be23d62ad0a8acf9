"""A stand-in for 3FS's client daemon, for tests: a local directory as a 3FS mount with rings.

`python -m kvfs.testing.threefs BACKING MOUNTPOINT` runs one; `host.Host` does so for a test. Two of
them over one backing directory are two hosts of a cluster, each with a cache of its own. Needs root
and /dev/fuse, and the standard library only.

Not there: the daemon's write buffer, lengths that lag at the servers, stalls of 5 s on chunks that
are being written, holes by chunk. Deletions, caches, faults and the deaths of processes are.
"""
