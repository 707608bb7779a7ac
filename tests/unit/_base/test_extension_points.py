"""Classes that somebody else wrote, against the contracts alone: a store in memory, planners of their own mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch

import hpdcp
import hpdcp.utils
from hpdcp._base.errors import CheckpointNotFoundError, MissingKeysError, NotSupportedError, StorageError
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import HEAD_BYTES, block_checksums
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import StorageInfo
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import LoadPlanner, PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageReader, StorageWriter
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults


class MemoryWriter(StorageWriter):
    """Keeps checkpoints in a dict: one value for each rank's bytes, one for the metadata."""

    def __init__(self, store: dict[str, bytes]) -> None:
        self._store = store
        self.calls: list[str] = []

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        self.calls.append(f"initialize_writer {checkpoint_id}")

    def configure_writer(self, context: PlannerContext) -> None:
        self.calls.append("configure_writer")
        self._key = f"rank {context.rank}"

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        self.calls.append("optimize_local_plan")
        return plan

    def optimize_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        self.calls.append("optimize_global_plan")
        return [plan.with_storage_data({"greeting": "from the coordinator"}) for plan in plans]

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        self.calls.append(f"execute_write {plan.storage_data['greeting']}")
        data = bytearray()
        results = []
        for item in plan.items:
            if item.kind is EntryKind.OBJECT:
                pieces = [memoryview(planner.get_bytes(item))]
            else:
                pieces = list(byte_pieces(planner.get_tensor(item)))
            info = StorageInfo(self._key, len(data), item.nbytes, tuple(block_checksums(iter(pieces))))
            results.append(WriteResult(info))
            data += b"".join(pieces)
        self._store[self._key] = bytes(data)
        return WriteResults.build(results, [FileRecord(self._key, len(data), crc32c.crc32c(bytes(data[:HEAD_BYTES])))])

    def finalize_checkpoint(self, metadata: hpdcp.Metadata, results: Sequence[WriteResults]) -> hpdcp.Metadata:
        self.calls.append("finalize_checkpoint")
        self._store["metadata"] = metadata.to_bytes()
        return metadata

    def discard(self) -> None:
        self.calls.append("discard")
        self._store.pop(self._key, None)


class MemoryReader(StorageReader):
    """Reads what `MemoryWriter` keeps."""

    def __init__(self, store: Mapping[str, bytes]) -> None:
        self._store = store
        self.calls: list[str] = []

    def load_metadata(self) -> hpdcp.Metadata:
        self.calls.append("load_metadata")
        if "metadata" not in self._store:
            raise CheckpointNotFoundError("there is no checkpoint in this dict.")
        return hpdcp.Metadata.from_bytes(self._store["metadata"], where="the dict's metadata")

    def configure_reader(self, metadata: hpdcp.Metadata, context: PlannerContext) -> None:
        self.calls.append("configure_reader")
        self._metadata = metadata

    def execute_read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self.calls.append("execute_read")
        for item in plan.items:
            info = self._metadata.storage_info(item.storage_row)
            data = self._store[info.key][info.offset : info.offset + info.length]
            if item.kind is EntryKind.OBJECT:
                planner.apply_bytes(item, data)
                continue
            entry = self._metadata.entries[int(self._metadata.chunks.entry[item.storage_row])]
            _, sizes = self._metadata.chunks.box(item.storage_row)
            stored = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype)).reshape(sizes)
            wanted = stored[tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))]
            target = planner.acquire_tensor(item)
            target.copy_(wanted)
            planner.apply_tensor(item, target)


def state(fill: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((4, 3), float(fill)) + torch.arange(3), "scale": torch.tensor(float(fill))},
        "optimizer": {"exp_avg": torch.full((2,), float(fill)), "lr": fill},
        "step": int(fill),
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def test_a_writer_and_a_reader_of_anothers_make_a_whole_round() -> None:
    store: dict[str, bytes] = {}
    writer = MemoryWriter(store)
    metadata = hpdcp.save(state(3), storage_writer=writer)
    assert set(metadata.files) == {"rank 0"}
    target = state(0)
    reader = MemoryReader(store)
    hpdcp.load(target, storage_reader=reader)
    assert_equal(target, state(3))
    assert writer.calls == [
        "configure_writer", "optimize_local_plan", "optimize_global_plan",
        "execute_write from the coordinator", "finalize_checkpoint",
    ]  # fmt: skip
    assert reader.calls == ["load_metadata", "configure_reader", "execute_read"]


def test_a_slice_of_what_is_stored_is_read_through_a_reader_of_anothers() -> None:
    store: dict[str, bytes] = {}
    whole = torch.arange(20.0).reshape(5, 4)
    hpdcp.save({"w": whole}, storage_writer=MemoryWriter(store))
    part = torch.zeros(2, 4)
    box = hpdcp.ChunkStorageMetadata((2, 0), (2, 4))
    setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, (5, 4)))
    hpdcp.load({"w": part}, storage_reader=MemoryReader(store))
    assert torch.equal(part, whole[2:4])


def test_a_checkpoint_id_goes_to_the_writer_and_is_refused_by_one_that_takes_none() -> None:
    store: dict[str, bytes] = {}
    writer = MemoryWriter(store)
    hpdcp.save(state(1), storage_writer=writer, checkpoint_id="somewhere")
    assert writer.calls[0] == "initialize_writer somewhere"
    with pytest.raises(NotSupportedError, match="MemoryReader takes no checkpoint_id"):
        hpdcp.load(state(0), storage_reader=MemoryReader(store), checkpoint_id="somewhere")


class LosingWriter(MemoryWriter):
    """Reports one item less than it was given."""

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        results = super().execute_write(plan, planner)
        return results.take(torch.arange(len(plan) - 1).numpy())


def test_a_writer_that_loses_an_item_publishes_nothing() -> None:
    store: dict[str, bytes] = {}
    writer = LosingWriter(store)
    with pytest.raises(StorageError, match="4 results for the 5 items"):
        hpdcp.save(state(1), storage_writer=writer)
    assert store == {}
    assert writer.calls[-1] == "discard"


class WeightsOnly(hpdcp.StandardSavePlanner):
    """Leaves the optimizer out, whatever script calls it."""

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        super().configure_planner({k: v for k, v in state_dict.items() if k != "optimizer"}, context)


def test_a_save_planner_can_leave_things_out(tmp_path: Path) -> None:
    metadata = hpdcp.save(state(5), checkpoint_id=tmp_path, planner=WeightsOnly())
    assert set(metadata.state_dict_metadata) == {"model.weight", "model.scale", "step"}
    target = state(0)
    with pytest.raises(MissingKeysError, match=r"optimizer\.exp_avg"):
        hpdcp.load(target, checkpoint_id=tmp_path)
    del target["optimizer"]
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["weight"], state(5)["model"]["weight"])


class InHalf(hpdcp.StandardSavePlanner):
    """Stores float32 tensors as bfloat16."""

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        flat, paths = hpdcp.utils.flatten_state_dict(state_dict)
        half = {
            key: value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
            for key, value in flat.items()
        }
        super().configure_planner(hpdcp.utils.unflatten_state_dict(half, paths), context)


def test_a_save_planner_can_change_what_is_stored(tmp_path: Path) -> None:
    metadata = hpdcp.save(state(5), checkpoint_id=tmp_path, planner=InHalf())
    assert metadata.state_dict_metadata["model.weight"].dtype == "bfloat16"
    target = state(0)
    with pytest.warns(UserWarning, match="3 tensors are cast"):
        hpdcp.load(target, checkpoint_id=tmp_path)
    assert_equal(target, state(5))


class Renaming(hpdcp.StandardLoadPlanner):
    """Loads into `new` names what an older program stored under `old` ones, at the top of the state dict."""

    def __init__(self, new_to_old: Mapping[str, str]) -> None:
        super().__init__()
        self._new_to_old = new_to_old

    def configure_planner(
        self, state_dict: Mapping[Any, Any], metadata: hpdcp.Metadata, context: PlannerContext
    ) -> None:
        self._asked = state_dict
        self._renamed = {self._new_to_old.get(key, key): value for key, value in state_dict.items()}
        super().configure_planner(self._renamed, metadata, context)

    def finish_load(self) -> None:
        super().finish_load()
        for key in self._asked:
            # Tensors were filled where they are; a Python value at the top was put into the renamed dict.
            self._asked[key] = self._renamed[self._new_to_old.get(key, key)]  # type: ignore[index]


def test_a_load_planner_can_rename(tmp_path: Path) -> None:
    saved = state(7)
    hpdcp.save({"net": saved["model"], "optim": saved["optimizer"], "iteration": 7}, checkpoint_id=tmp_path)
    target = state(0)
    weight = target["model"]["weight"]
    hpdcp.load(
        target, checkpoint_id=tmp_path,
        planner=Renaming({"model": "net", "optimizer": "optim", "step": "iteration"}),
    )  # fmt: skip
    assert_equal(target, saved)
    assert target["model"]["weight"] is weight


class Broken(hpdcp.StandardSavePlanner):
    """Fails where a state dict of another library might."""

    def build_local_plan(self) -> SavePlan:
        raise LookupError("no such layer")


def test_what_a_planner_raises_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no such layer"):
        hpdcp.save(state(1), checkpoint_id=tmp_path, planner=Broken())
    assert list(tmp_path.iterdir()) == []
