"""The index of one host: LMDB, derived from the journals, thrown away and rebuilt at will.

schema   tables, keys, values              env     LMDB and the rules it must be used by
apply    journal entries into rows         guard   is what we find on disk sound
lookup   check                             place   where indexes live
tally    counters, beside it               index    the class the rest of kvfs uses
"""

from kvfs.index.index import Index, OutOfStep, apply_journal

__all__ = ["Index", "OutOfStep", "apply_journal"]
