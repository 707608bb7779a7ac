"""Folders of torch.distributed.checkpoint, whatever version and setting wrote them, load as checkpoints of ours do."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.serialization import config as torch_config

import hpdcp
from hpdcp._base import config
from hpdcp._files._torch_metadata import torch_entries
from hpdcp._files.torch_folder import folder_metadata
from hpdcp._files.torch_layout import TorchLayout
from hpdcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotSupportedError,
    UnsafePickleError,
)
from hpdcp.offline_transform import convert_dcp_to_huggingface, convert_full_checkpoint_to_dcp
from hpdcp.verify import verify_checkpoint
from hpdcp_backends.local import LocalBackend
from tests.support.backends import Traffic, registered
from tests.support.pickled import Save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What is read, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted


def renamed(data: bytes, names: dict[str, str]) -> bytes:
    """The same pickle with other names of modules and classes; of protocol 2, in which they are lines of text."""
    out = pickle.dumps(pickle.loads(data), protocol=2)
    for before, after in names.items():
        assert f"c{before}\n".encode() in out, before
        out = out.replace(f"c{before}\n".encode(), f"c{after}\n".encode())
    return out


# Other versions.

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

WRITERS = {
    "torch before 2.3": {
        f"{_METADATA}\nTensorProperties": f"{_SHARDED}\nTensorProperties",
        f"{_METADATA}\n_MEM_FORMAT_ENCODING": f"{_SHARDED}\nMEM_FORMAT_ENCODING",
    },
    "Python 3.13": {"pathlib\nPosixPath": "pathlib._local\nPosixPath"},
    "Windows": {"pathlib\nPosixPath": "pathlib\nWindowsPath"},
    "Megatron": {f"{_METADATA}\nMetadata": "megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata"},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_other_writers_call_the_same_is_known(writer: str, tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    save.write(renamed(save.data, WRITERS[writer]))
    target: dict[str, Any] = {"w": torch.zeros(3, 4), "step": None}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4)) and target["step"] == 3


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_is_read_alike(protocol: int, tmp_path: Path) -> None:
    save = Save.make(tmp_path, **{f"layers.{n}.w": torch.ones(n, 3) for n in range(300)})
    again = pickle.dumps(pickle.loads(save.data), protocol=protocol)
    assert torch_entries(again) == torch_entries(save.data)


def test_fields_that_newer_versions_add_are_passed_over(tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    save.edit(
        lambda metadata: vars(metadata).update(mcore_data={"w": {"shape": (3, 4)}}, flags=[1.5, True, b""[:0] or ""])
    )
    hpdcp.load({"w": torch.zeros(3, 4)}, checkpoint_id=tmp_path)


def test_a_value_that_holds_lists_without_their_paths_is_one_value(tmp_path: Path) -> None:
    """As torch before 2.4 saved an optimizer's groups: dicts were flattened only where tensors were below."""
    groups = [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}]
    dcp.save({"optimizer.param_groups": groups}, checkpoint_id=tmp_path, no_dist=True,
             planner=DefaultSavePlanner(flatten_state_dict=False))  # fmt: skip
    optimizer = {"param_groups": [{"lr": None, "params": None}, {"lr": None, "params": None}]}
    hpdcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path)
    assert optimizer["param_groups"] == groups


def test_a_state_dict_that_was_not_flattened_has_its_own_names(tmp_path: Path) -> None:
    state = {"a.b": torch.arange(3.0), "c": {"d": 1}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    target: dict[str, Any] = {"a.b": torch.zeros(3), "c": None}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["a.b"], state["a.b"]) and target["c"] == {"d": 1}


# What is read.


def test_an_eighth_of_the_rows_reads_an_eighth_of_the_bytes(tmp_path: Path, traffic: Traffic) -> None:
    tensors = {f"w{n}": torch.randn(64, 4096) for n in range(6)}
    Save.make(tmp_path / "theirs", **tensors)
    parts = {}
    for name, whole in tensors.items():
        parts[name] = torch.zeros(8, 4096)
        box = hpdcp.ChunkStorageMetadata((24, 0), (8, 4096))
        setattr(parts[name], hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(whole.shape)))
    hpdcp.load(parts, checkpoint_id=tmp_path / "theirs")
    assert all(torch.equal(parts[name], whole[24:32]) for name, whole in tensors.items())
    wanted = sum(part.nbytes for part in parts.values())
    assert wanted <= traffic.nbytes <= 1.05 * wanted


@pytest.mark.parametrize("alignment", [1, 64, 4096, 1 << 15])
def test_elements_are_found_wherever_torch_aligned_them(alignment: int, tmp_path: Path) -> None:
    with torch_config.patch("save.storage_alignment", alignment):
        Save.make(tmp_path, w=torch.arange(12.0), last=torch.arange(5, dtype=torch.int8))
    target = {"w": torch.zeros(12), "last": torch.zeros(5, dtype=torch.int8)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], torch.arange(12.0)) and target["last"].tolist() == [0, 1, 2, 3, 4]
    assert verify_checkpoint(tmp_path).is_sound


ODD = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "a view": torch.arange(20.0)[5:9],
    "every second": torch.arange(20.0)[::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "of one element": torch.ones(1, 1, 1),
    "a parameter": torch.nn.Parameter(torch.arange(3.0)),
    "without a name in typed storages": torch.arange(4).to(torch.uint32),
    "of 8-bit floats": torch.arange(4.0).to(torch.float8_e5m2),
    "scalar": torch.tensor(7, dtype=torch.int16),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_of_any_strides_and_dtype_loads(kind: str, tmp_path: Path) -> None:
    tensor = ODD[kind].detach()
    Save.make(tmp_path, w=ODD[kind])
    target = torch.zeros(tensor.shape, dtype=tensor.dtype)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target.to(torch.complex128), tensor.to(torch.complex128))
    if tensor.ndim > 1:
        part = torch.zeros(1, *tensor.shape[1:], dtype=tensor.dtype)
        box = hpdcp.ChunkStorageMetadata((tensor.shape[0] - 1, *[0] * (tensor.ndim - 1)), tuple(part.shape))
        setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(tensor.shape)))
        hpdcp.load({"w": part}, checkpoint_id=tmp_path)
        assert torch.equal(part, tensor[-1:])


@pytest.mark.filterwarnings("ignore:1 tensors are cast")
def test_a_dtype_is_cast_as_it_is_from_our_own(tmp_path: Path) -> None:
    Save.make(tmp_path, w=torch.arange(4.0))
    target = torch.zeros(4, dtype=torch.float64)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert target.tolist() == [0, 1, 2, 3]


# Python values.


@dataclasses.dataclass
class Own:
    number: int


def test_a_value_that_needs_code_is_refused_by_key_unless_it_is_allowed(tmp_path: Path) -> None:
    dcp.save({"mine": Own(3), "counts": defaultdict(int, a=1)}, checkpoint_id=tmp_path, no_dist=True)
    target: dict[str, Any] = {"mine": None}
    with pytest.raises(UnsafePickleError, match=r"'mine' is a pickle that would run code .*Own"):
        hpdcp.load(target, checkpoint_id=tmp_path)
    hpdcp.load(target, storage_reader=hpdcp.FileSystemReader(tmp_path, allow_pickle=True))
    assert target["mine"] == Own(3)


# What is not whole.


def test_a_save_that_did_not_finish_is_told(tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    (save.folder / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"a save of torch.distributed.checkpoint that did not finish"):
        hpdcp.load({"w": torch.zeros(3, 4)}, checkpoint_id=tmp_path)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_save_that_replaces_the_checkpoint_meanwhile_is_noticed(tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    saves = iter([{"w": torch.ones(3, 4), "more": torch.ones(1000)}])

    class Replaced(hpdcp.FileSystemReader):
        def load_metadata(self) -> Any:
            found = super().load_metadata()
            for state in saves:
                Save.make(tmp_path, **state)
            return found

    target = {"w": torch.zeros(3, 4)}
    hpdcp.load(target, storage_reader=Replaced(save.folder))  # which starts again
    assert torch.equal(target["w"], torch.ones(3, 4))


def test_a_flipped_bit_is_found_by_verify_and_named(tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    save.edit_item("w", lambda item: item.__setitem__(710, item[710] ^ 1))
    (damage,) = verify_checkpoint(tmp_path).damages
    assert damage.fqn == "w" and "CRC of its record 'archive/data/0' differs" in damage.problem


# Compression.


def test_compressed_items_without_the_package_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Path(__file__).parents[2] / "golden" / "torch_dcp_2_13" / "zstd"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    target = {"model": {"rows": torch.zeros(5, 3)}}
    with pytest.raises(NotSupportedError, match=r"'model\.rows' was compressed .* pip install \"hpdcp\[zstd\]\""):
        hpdcp.load(target, checkpoint_id=golden)
    assert not target["model"]["rows"].any()


def test_an_item_that_decompresses_without_end_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    save = Save.make(tmp_path)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    (tmp_path / "__0_0.distcp").write_bytes(bomb)

    def edit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length, info.transform_descriptors = 0, len(bomb), ["stream.zstd/1"]

    save.edit(edit)
    for target in ({"w": torch.zeros(3, 4)}, {"step": None}):
        with pytest.raises(CorruptCheckpointError, match="made to fill memory"):
            hpdcp.load(target, checkpoint_id=tmp_path)


# Conversions, and the layout.


def test_a_model_becomes_hugging_face_weights(tmp_path: Path) -> None:
    save = Save.make(tmp_path / "theirs", **{"model.w": torch.arange(6.0)})
    convert_dcp_to_huggingface(save.folder, tmp_path / "hf", prefix="model.")
    target = {"w": torch.zeros(6)}
    hpdcp.load(target, checkpoint_id=tmp_path / "hf")
    assert torch.equal(target["w"], torch.arange(6.0))


def test_a_conversion_from_hugging_face_says_what_is_there(tmp_path: Path) -> None:
    save = Save.make(tmp_path / "theirs")
    with pytest.raises(Exception, match="src_platform='torch' makes one of hpdcp of it"):
        convert_full_checkpoint_to_dcp(save.folder, tmp_path / "ours")


def test_nothing_is_saved_in_torch_s_layout(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="layout 'torch' is that of torch"):
        hpdcp.save({"w": torch.ones(2)}, storage_writer=hpdcp.FileSystemWriter(tmp_path / "new", layout="torch"))
    assert not (tmp_path / "new").exists()


def test_metadata_made_of_a_folder_says_who_wrote_it(tmp_path: Path) -> None:
    save = Save.make(tmp_path)
    metadata = folder_metadata(LocalBackend(str(tmp_path)), save.data)
    assert (metadata.origin, metadata.settings["layout"], metadata.has_checksums) == ("torch", TorchLayout.name, False)


def test_writers_of_torch_s_own_names_are_found_by_the_reader(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0).reshape(10, 100), "step": 4}
    for name, options in {"threads": {"thread_count": 3}, "files": {"single_file_per_rank": False}}.items():
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / name, **options), no_dist=True)  # type: ignore[arg-type]
        target: dict[str, Any] = {"w": torch.zeros(10, 100), "step": None}
        hpdcp.load(target, checkpoint_id=tmp_path / name)
        assert torch.equal(target["w"], state["w"]) and target["step"] == 4
