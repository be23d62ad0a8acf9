"""Tools for tests of kvfs and of what is built on it: docs/testing.md has those made for the latter.

No product code imports this package.
"""
