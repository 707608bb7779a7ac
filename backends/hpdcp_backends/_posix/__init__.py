"""What the backends of mounted folders, `local` and `nfs`, share: the backend itself, and the files under it."""
