"""The documents that describe arrays and groups of zarr, version 3, and the dtypes they name.

A dtype that the specification or its registry of extensions has goes by the name there: tensorstore and zarrs read all
of them, zarr-python those of numpy, and the others after `zarr_dtypes.register()`. Any other is
stored as bytes, one dimension deeper, with torch's name in the attributes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

NODE: Final = "zarr.json"
"""The key, below a node's path, of the document that describes it."""
FORMAT: Final = {"name": "hpdcp", "version": "1.0"}

CORE: Final[Mapping[str, str]] = {
    name: name
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
}  # fmt: skip
EXTENSIONS: Final[Mapping[str, str]] = {
    name: name
    for name in (
        "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
"""torch's name → the registered one: today they are the same."""
ZARR_NAMES: Final = {**CORE, **EXTENSIONS}


def array_document(
    dtype: str,
    shape: Sequence[int],
    steps: Sequence[int],
    itemsize: int,
    compressors: Sequence[Mapping[str, object]],
    attributes: Mapping[str, object],
) -> bytes:
    """`zarr.json` of an array of torch's `dtype`, in chunks of `steps`."""
    name = ZARR_NAMES.get(dtype)
    deeper = () if name is not None else (itemsize,)
    name = name or "uint8"
    endian: dict[str, object] = {"name": "bytes"}
    if itemsize > 1 and name != "uint8":
        endian["configuration"] = {"endian": "little"}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [*shape, *deeper],
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*steps, *deeper]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(name),
        "codecs": [endian, *compressors],
        "attributes": dict(attributes),
    }
    return json.dumps(document, indent=1).encode()


def group_document(attributes: Mapping[str, object]) -> bytes:
    """`zarr.json` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}, indent=1).encode()


def chunk_key(node: str, offsets: Sequence[int], steps: Sequence[int], *, deeper: bool) -> str:
    """The key of the chunk that begins at `offsets`.

    >>> chunk_key("model/w", (4, 0), (2, 8), deeper=False), chunk_key("step", (), (), deeper=False)
    ('model/w/c/2/0', 'step/c')
    """
    at = [str(offset // step) for offset, step in zip(offsets, steps, strict=True)]
    return "/".join([node, "c", *at, *(["0"] if deeper else [])])


def _zero(name: str) -> object:
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in name else 0
