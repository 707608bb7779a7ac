"""The bytes on storage: containers of columns, the metadata of a checkpoint, names of files, checksums.

In come columns and names, out go bytes; and back again, once they are known to be sound. Does no I/O of its own, and
needs no torch.

    `container`   the safetensors container: a header, then data
    `strings`     a column of strings
    `columns`     names on record and their chunks, as columns
    `metadata`    what a checkpoint records, and the marks that a state dict may carry
    `file_names`  every name of a file on storage
    `checksums`   of blocks, and marks of files
    `dtypes`      names of dtypes, safetensors' and torch's
    `signatures`  what a file is, told by its first bytes

All of these are the face.
"""
