"""Tools for tests of kvfs and of what is built on it (docs/testing.md). Not for product code."""
