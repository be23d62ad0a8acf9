"""FSCK and REBUILD: find what is wrong with a store, take it out of sight, make an index anew."""
