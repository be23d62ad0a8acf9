"""Tools for tests of kvfs and of what is built on it. No product code imports this package."""
