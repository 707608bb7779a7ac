"""The bytes on storage: the container of columns, and the metadata, names and checksums of a checkpoint.

In come columns and names, out go bytes, and back again; it does no I/O of its own and needs no torch.
Face: `container`, `columns`, `strings`, `metadata`, `file_names`, `checksums`, `dtypes`.
"""
