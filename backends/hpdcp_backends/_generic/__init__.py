"""The parts of the backend for every other URL: what it must know of the file systems that fsspec serves."""
