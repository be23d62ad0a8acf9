"""The command line: `kvctl`, also installed as `kvfs` and `mount.kvfs`.

A module per command, imported when that command runs. Commands parse, call the library and print;
what they do not do is decide: everything a command knows is in the store's own modules.
"""
