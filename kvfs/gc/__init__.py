"""Room on the store: expiry, the cleaner, eviction under limits, removal, and who leads it.

`collector` is one run of it, `housekeeping` the thread that runs it for months, `purge` removes
bytes on demand.
"""
