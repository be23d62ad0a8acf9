"""The words the tree itself says: the README at its top."""

README = """\
This is a store of LLM KV-cache prefixes, shown as files: {store} ({uuid}).

  <namespace>/namespace.json    which model and layout the cache belongs to
  <namespace>/000000-<hash>/    a stretch of a prompt; the number is that of its first block
    000000.kv, 000001.kv, ...   blocks, in the order of the prompt: the bytes the engine stored
    000002-<hash>/              another continuation behind block 1, of the same shape
    tokens                      the token ids, a line a block, ten digits each

Where an engine keys its blocks itself there are no token ids, and a stretch whose beginning is not
stored stands at the top.

Times: mtime is when a block was stored, atime when it was last renewed. What has expired is not
shown. `getfattr -d FILE` says more of a block: its chain hash, its class, when it expires, and in
which segment of the store it lies (user.kvfs.segment, .offset, .length).

With -o rw: rm evicts a block and all that follows it, touch renews it and what it builds on,
setfattr -n user.kvfs.ttl_class -v CLASS moves it to another class.
"""
