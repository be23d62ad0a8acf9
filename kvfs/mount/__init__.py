"""The mounted file system: FUSE requests into questions to `kvfs.vfs`, and a mount's life."""
