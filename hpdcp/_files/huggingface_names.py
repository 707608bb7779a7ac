"""Hugging Face weights under the names, and in the tensors, that a load asks for: hpdcp's own metadata of them.

Most stored tensors are wanted as they are, perhaps under another name. Some are parts: models stack the matrices of
all their experts into one parameter, while the files hold each expert's by itself. Such a parameter is recorded as a
tensor of many chunks, as if many ranks had saved it, so that each rank reads what its shard takes of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files.huggingface_folder import FolderTensor, Weights
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import NO_CHECKSUMS, Metadata, StorageTable
from hpdcp._format.strings import StringColumn
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box
from hpdcp._state.paths import encode_path
from hpdcp._state.scales import scale_beside, separated_codes_setting

ORIGIN: Final = "huggingface"
"""The setting `origin` of metadata that was made here."""
MISMATCH_ADVICE: Final = (
    "A Hugging Face folder holds the weights of one model and nothing else. Its names are mapped by "
    "storage_reader=hpdcp.HuggingFaceReader(checkpoint_id, prefix=..., name_map=...). A weight that the model ties to "
    "another is stored under one name only: tie the targets before the load (model.tie_weights()), or name both with "
    "HuggingFaceReader(..., tied={'lm_head.weight': 'model.embed_tokens.weight'})."
)
"""What to do where a state dict asks such a folder for names it does not hold."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Says of a stored tensor that it is one box of a larger wanted one.

    The wanted tensor ends where the parts that begin farthest end. For an expert's matrix in all experts' stacked ones:

    >>> TensorPart("mlp.experts.down_proj", offsets=(3, 0, 0)).box_of((16, 8))
    Box(offsets=(3, 0, 0), sizes=(1, 16, 8))
    """

    name: str
    """The wanted tensor's, before the prefix."""
    offsets: tuple[int, ...]
    """Where it begins in the wanted tensor; where that has more dimensions, it is one thick along the first of them."""

    def box_of(self, shape: tuple[int, ...]) -> Box:
        """The box that a stored tensor of `shape` is; InvalidArgumentError where `offsets` do not fit it."""
        added = len(self.offsets) - len(shape)
        if added < 0 or any(type(offset) is not int or offset < 0 for offset in self.offsets):
            raise InvalidArgumentError(
                f"a part of {self.name!r} has offsets {self.offsets!r}; expected at least {len(shape)} numbers from 0, "
                f"for a stored tensor of shape {list(shape)}."
            )
        return Box(self.offsets, (1,) * added + shape)


Part = TensorPart
"""The earlier name of `TensorPart`."""

NameMapping = Mapping[str, str | TensorPart] | Callable[[str], str | TensorPart | None]


@dataclass(frozen=True)
class Names:
    """Under which names a load finds the stored tensors; `HuggingFaceReader` explains each."""

    prefix: str = ""
    name_map: NameMapping | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def wanted(self, key: str) -> str | TensorPart | None:
        """What the stored `key` is wanted as, before the prefix; None where it is left out."""
        if self.name_map is None:
            return key
        found: object = self.name_map(key) if callable(self.name_map) else self.name_map.get(key, key)
        if found is not None and not isinstance(found, (str, TensorPart)):
            raise InvalidArgumentError(
                f"name_map maps {key!r} to a {type(found).__name__}; expected a str, a TensorPart, or None to leave it "
                "out."
            )
        return found

    def path_of(self, name: str) -> tuple[str, ...]:
        """The keys of a nested state dict that lead to a wanted name.

        >>> Names(prefix="model.").path_of("layers.0.weight")
        ('model', 'layers.0.weight')
        """
        *outer, last = self.prefix.split(".")
        return (*outer, last + name)


@dataclass(slots=True)
class _ModelTensor:
    """One tensor that a load may ask for, and the stored ones that are its parts."""

    name: str
    whole: bool
    """Whether one stored tensor is all of it."""
    parts: list[tuple[Box, FolderTensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.whole:
            return self.parts[0][0].sizes
        stops = [box.stops for box, _ in self.parts]
        return tuple(map(max, zip(*stops, strict=True)))

    @property
    def dtype(self) -> str:
        return self.parts[0][1].torch_dtype


def weights_metadata(weights: Weights, names: Names | None = None) -> Metadata:
    """`weights` as metadata of hpdcp's own, which records no checksums.

    Raises:
        InvalidArgumentError: two tensors get one name; parts overlap or differ in dtype or dimensions; or `tied` names
            a tensor that is stored, or ties one to what is not.
    """
    names = names or Names()
    wanted = _gathered(weights, names)
    entries = _entries(wanted, names) + _tied_entries(weights, wanted, names)
    entries.sort(key=lambda entry: entry.fqn.encode("utf-8", "surrogatepass"))
    by_fqn = {".".join(names.path_of(name)): found for name, found in wanted.items()}
    chunks = [
        (row, box, tensor)
        for row, entry in enumerate(entries)
        if entry.kind is EntryKind.TENSOR
        for box, tensor in sorted(by_fqn[entry.fqn].parts, key=lambda part: (part[0].offsets, part[0].sizes))
        if not box.is_empty
    ]
    separated = _separated_codes(weights, wanted, names)
    position = {file.key: number for number, file in enumerate(weights.files)}
    return Metadata(
        EntryTable.from_entries(entries),
        ChunkTable.from_boxes([row for row, _, _ in chunks], [(box.offsets, box.sizes) for _, box, _ in chunks]),
        StorageTable(
            file=np.array([position[tensor.file] for _, _, tensor in chunks], dtype=np.int32),
            offset=np.array([tensor.offset for _, _, tensor in chunks], dtype=np.int64),
            length=np.array([tensor.nbytes for _, _, tensor in chunks], dtype=np.int64),
            crc_ends=np.zeros(len(chunks), dtype=np.int64),
            crcs=np.zeros(0, dtype=np.uint32),
            file_names=StringColumn.from_strings([file.key for file in weights.files]),
            file_sizes=np.array([file.size for file in weights.files], dtype=np.int64),
            file_marks=np.array([file.mark for file in weights.files], dtype=np.uint32),
        ),
        {
            "world_size": "1",
            "layout": "safetensors",
            "origin": ORIGIN,
            "listed_in": weights.listed_in,
            "checksums": NO_CHECKSUMS,
            **separated_codes_setting(separated),
        },
    )


def _gathered(weights: Weights, names: Names) -> dict[str, _ModelTensor]:
    """Wanted name, before the prefix → what is stored of it."""
    found: dict[str, _ModelTensor] = {}
    seen: set[tuple[object, ...]] = set()
    for tensor in weights.tensors:
        wanted = names.wanted(tensor.key)
        if wanted is None:
            continue
        shape = tensor.torch_shape
        whole = isinstance(wanted, str) and tensor.offsets is None
        name = wanted if isinstance(wanted, str) else wanted.name
        box = _moved(Box.whole(shape) if isinstance(wanted, str) else wanted.box_of(shape), tensor)
        before = found.setdefault(name, _ModelTensor(name, whole, []))
        if before.parts and (whole or before.whole):
            raise InvalidArgumentError(
                f"name_map maps both {before.parts[0][1].key!r} and {tensor.key!r} of {weights.url} to {name!r}; "
                "give each its own name, or say with hpdcp.TensorPart which part of it each is."
            )
        if tensor.offsets is not None:
            if (tensor.key, tensor.offsets, tensor.shape) in seen:
                continue  # one part, which several ranks saved
            seen.add((tensor.key, tensor.offsets, tensor.shape))
        before.parts.append((box, tensor))
    for each in found.values():
        if not each.whole:
            _check_parts(each, weights.url)
    return found


def _moved(box: Box, tensor: FolderTensor) -> Box:
    """Where a part of a stored tensor lies, given where the whole begins."""
    if tensor.offsets is None:
        return box
    added = box.ndim - len(tensor.offsets)
    moved = (a + b for a, b in zip(box.offsets[added:], tensor.torch_offsets, strict=True))
    return Box((*box.offsets[:added], *moved), box.sizes)


def _check_parts(wanted: _ModelTensor, url: str) -> None:
    first_box, first = wanted.parts[0]
    for box, tensor in wanted.parts:
        if (box.ndim, tensor.torch_dtype) != (first_box.ndim, first.torch_dtype):
            raise InvalidArgumentError(
                f"{first.key!r} and {tensor.key!r} cannot be parts of one tensor {wanted.name!r}: they are of "
                f"{first_box.ndim} and {box.ndim} dimensions, of {first.torch_dtype} and {tensor.torch_dtype}."
            )
    whole = Box((0,) * first_box.ndim, wanted.shape)
    boxes = [box for box, _ in wanted.parts]
    if sum(box.volume for box in boxes) == whole.volume and missing(whole, boxes) is None:
        return
    # With a hole somewhere, which is no matter unless that tensor is asked for; an overlap is ambiguous.
    index = BoxIndex(np.array([box.offsets for box in boxes]), np.array([box.sizes for box in boxes]))
    for box in boxes:
        met = index.overlapping(box).tolist()
        if len(met) > 1:
            others = [wanted.parts[number][1].key for number in met]
            raise InvalidArgumentError(f"the parts {others[:3]} of {wanted.name!r} in {url} have boxes that overlap.")


def _separated_codes(weights: Weights, wanted: Mapping[str, _ModelTensor], names: Names) -> dict[str, str]:
    """Wanted codes → their scale as it is stored, where a map renamed it, or left it out, so that no name tells."""
    if names.name_map is None:
        return {}
    stored = {tensor.key for tensor in weights.tensors}
    found = {}
    for name, tensor in wanted.items():
        if scale_beside(name, tensor.dtype, wanted.__contains__) is not None:
            continue
        scales = (scale_beside(part.key, part.torch_dtype, stored.__contains__) for _, part in tensor.parts)
        scale = next(filter(None, scales), None)
        if scale is not None:
            found[".".join(names.path_of(name))] = scale
    return found


def _entries(wanted: Mapping[str, _ModelTensor], names: Names) -> list[Entry]:
    entries = []
    for name, found in wanted.items():
        path = names.path_of(name)
        entries.append(Entry(".".join(path), encode_path(path), EntryKind.TENSOR, found.dtype, found.shape))
    return entries


def _tied_entries(weights: Weights, wanted: Mapping[str, _ModelTensor], names: Names) -> list[Entry]:
    entries: list[Entry] = []
    stored = {tensor.key for tensor in weights.tensors}
    for key, target in names.tied.items():
        if key in stored:
            raise InvalidArgumentError(f"{key!r} is stored in {weights.url}: leave it out of tied.")
        name, other = names.wanted(key), names.wanted(target)
        if target not in stored or not isinstance(other, str):
            raise InvalidArgumentError(
                f"tied says that {key!r} is tied to {target!r}, which {weights.url} does not hold as a tensor of that "
                "name (give names as they are stored, before name_map and prefix)."
            )
        if name is None:
            continue
        if not isinstance(name, str) or name in wanted or any(e.fqn == ".".join(names.path_of(name)) for e in entries):
            raise InvalidArgumentError(f"{key!r}, which tied ties to {target!r}, is mapped to a name that is taken.")
        path = names.path_of(name)
        found = wanted[other]
        entries.append(
            Entry(
                ".".join(path), encode_path(path), EntryKind.ALIAS, found.dtype, found.shape,
                target=".".join(names.path_of(other)),
            )
        )  # fmt: skip
    return entries
