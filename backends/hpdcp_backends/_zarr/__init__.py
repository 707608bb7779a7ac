"""The parts of the layout `zarr`: names, grids of chunks, documents, codecs, who writes what, and foreign groups."""
