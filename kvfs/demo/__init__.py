"""The demonstration: what kvfs does, shown to somebody who has never seen it.

A program of its own, on top of everything else: it may use what the command line has.
"""
