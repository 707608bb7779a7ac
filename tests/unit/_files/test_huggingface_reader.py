"""Loading from a Hugging Face folder: values, names, ties, and what does not fit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

import hpdcp
from hpdcp import HuggingFaceReader, PerRank, StandardLoadPlanner
from hpdcp._base import config
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DtypeMismatchError,
    HpdcpError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    LoadMismatchError,
    MissingKeysError,
    NotSupportedError,
    ShapeMismatchError,
)
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._plan.planner import PlannerContext
from tests.support.backends import registered
from tests.support.huggingface import blanks, same, shard_name, write_raw, write_shards, write_single

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


def every_kind() -> dict[str, torch.Tensor]:
    """A tensor of every dtype, with any bits; a scalar, one without elements, and names people use."""
    found: dict[str, torch.Tensor] = {}
    for name in DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        bits = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
        found[f"t.{name}"] = (bits % 2 if name == "bool" else bits).view(dtype)
    found |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "重み.größe": torch.arange(7),
        "a/b c": torch.ones(2),
    }
    return found


def model() -> dict[str, torch.Tensor]:
    return {f"model.layers.{n}.{part}": torch.randn(4, 6) for n in range(3) for part in ("up", "down")}


def refused(state: dict[str, Any], kind: type[HpdcpError], **how: Any) -> str:
    with pytest.raises(kind) as caught:
        hpdcp.load(state, **how)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("far", [False, True])
def test_every_dtype_loads_bit_for_bit(tmp_path: Path, shards: int, far: bool) -> None:
    tensors = every_kind()
    if shards == 1:
        write_single(tmp_path, tensors)
    else:
        write_shards(tmp_path, tensors, shards=shards)
    targets = blanks(tensors)
    with registered(), config.using(backend="counting" if far else "local"):
        hpdcp.load(targets, checkpoint_id=str(tmp_path))
    assert [key for key in tensors if not same(tensors[key], targets[key])] == []


def test_packed_four_bit_weights_load_as_torch_packs_them(tmp_path: Path) -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no 4-bit floats")
    bits = torch.randint(0, 256, (4, 3), dtype=torch.uint8)
    header = {"w": {"dtype": "F4", "shape": [4, 6], "data_offsets": [0, 12]}}
    write_raw(tmp_path / "model.safetensors", header, bits.numpy().tobytes())
    target = torch.zeros(4, 3, dtype=torch.uint8).view(dtype)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target.view(torch.uint8), bits)


def test_a_dtype_torch_lacks_is_refused_where_it_is_wanted_only(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "even": {"dtype": "U8", "shape": [3], "data_offsets": [3, 6]},
    }
    write_raw(tmp_path / "model.safetensors", header, b"abcdef")
    even = torch.zeros(3, dtype=torch.uint8)
    hpdcp.load({"even": even}, checkpoint_id=tmp_path)
    assert even.tolist() == list(b"def")
    said = refused({"odd": torch.zeros(4)}, DtypeMismatchError, checkpoint_id=tmp_path)
    assert "'odd' (stored F6_E2M3, wanted float32)" in said


def test_dtypes_are_cast_as_from_any_checkpoint(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.arange(6.0).to(torch.bfloat16)})
    target = torch.zeros(6)
    with pytest.warns(UserWarning, match="1 tensors are cast"):
        hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert target.tolist() == [0, 1, 2, 3, 4, 5]


def test_names_take_a_prefix_a_table_or_a_function(tmp_path: Path) -> None:
    tensors = model()
    write_shards(tmp_path, tensors, shards=2)
    nested = {"model": blanks(tensors)}
    hpdcp.load(nested, storage_reader=HuggingFaceReader(tmp_path, prefix="model."))
    assert all(same(tensors[key], nested["model"][key]) for key in tensors)

    first = "model.layers.0.up"
    renamed = {"first": torch.zeros(4, 6), "model.layers.1.up": torch.zeros(4, 6)}
    hpdcp.load(renamed, storage_reader=HuggingFaceReader(tmp_path, name_map={first: "first"}))
    assert same(tensors[first], renamed["first"])
    assert same(tensors["model.layers.1.up"], renamed["model.layers.1.up"])

    ups = {f"net.layers.{n}.up": torch.zeros(4, 6) for n in range(3)}
    reader = HuggingFaceReader(
        prefix="net.", name_map=lambda key: None if key.endswith("down") else key.removeprefix("model.")
    )
    hpdcp.load(ups, checkpoint_id=tmp_path, storage_reader=reader)
    assert all(same(tensors[f"model.layers.{n}.up"], ups[f"net.layers.{n}.up"]) for n in range(3))
    assert set(reader.load_metadata().state_dict_metadata) == set(ups)


def test_names_that_collide_or_are_none_are_refused(tmp_path: Path) -> None:
    write_single(tmp_path, model())
    both = "'model.layers.0.down' and 'model.layers.0.up'"
    said = refused({}, InvalidArgumentError, storage_reader=HuggingFaceReader(tmp_path, name_map=lambda key: key[:14]))
    assert both in said or "'model.layers.0.up' and 'model.layers.0.down'" in said
    said = refused({}, InvalidArgumentError, storage_reader=HuggingFaceReader(tmp_path, name_map=lambda key: 3))  # type: ignore[arg-type,return-value]
    assert "to a int" in said


def test_a_missing_prefix_is_named_with_the_next_step(tmp_path: Path) -> None:
    tensors = model()
    write_single(tmp_path, tensors)
    nested = {"net": blanks(tensors)}
    said = refused(nested, MissingKeysError, checkpoint_id=tmp_path)
    assert "All 6 keys that are not in the checkpoint are stored without 'net.' in front: 'net." in said
    assert "HuggingFaceReader(checkpoint_id, prefix=" in said
    bare = {key.removeprefix("model."): tensor for key, tensor in blanks(tensors).items()}
    assert "All 6 keys that are not in the checkpoint are stored with 'model.' in front" in refused(
        bare, MissingKeysError, checkpoint_id=tmp_path
    )
    assert not any(same(tensors[key], nested["net"][key]) for key in tensors)


def test_weights_that_the_targets_tie_need_only_one_name_stored(tmp_path: Path) -> None:
    embed = torch.randn(5, 4)
    write_single(tmp_path, {"model.embed_tokens.weight": embed})
    shared = torch.zeros(5, 4)
    state = {"lm_head.weight": shared, "model.embed_tokens.weight": shared}
    hpdcp.load(state, checkpoint_id=tmp_path)
    assert same(embed, shared)
    # The same memory, but seen in another way, is not the same tensor.
    turned = {"lm_head.weight": shared[:4, :4].t(), "model.embed_tokens.weight": shared}
    assert "'lm_head.weight'" in refused(turned, MissingKeysError, checkpoint_id=tmp_path)


def test_untied_targets_say_what_to_do_and_can_be_tied_by_the_reader(tmp_path: Path) -> None:
    embed = torch.randn(5, 4)
    write_single(tmp_path, {"model.embed_tokens.weight": embed})
    state = {"lm_head.weight": torch.zeros(5, 4), "model.embed_tokens.weight": torch.zeros(5, 4)}
    said = refused(state, MissingKeysError, checkpoint_id=tmp_path)
    assert "1 key is not in the checkpoint: 'lm_head.weight'" in said
    assert "tie_weights()" in said
    assert "tied={" in said
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    hpdcp.load({"net": state}, storage_reader=HuggingFaceReader(tmp_path, prefix="net.", tied=tied))
    assert same(embed, state["lm_head.weight"])
    assert same(embed, state["model.embed_tokens.weight"])


def test_ties_that_do_not_fit_what_is_stored_are_refused(tmp_path: Path) -> None:
    write_single(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    said = refused({}, InvalidArgumentError, storage_reader=HuggingFaceReader(tmp_path, tied={"a": "b"}))
    assert "'a' is stored" in said
    said = refused({}, InvalidArgumentError, storage_reader=HuggingFaceReader(tmp_path, tied={"c": "d"}))
    assert "'c' is tied to 'd'" in said


def test_what_such_a_folder_cannot_hold_is_missing(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    target = torch.zeros(2)
    said = refused({"w": target, "step": 0}, MissingKeysError, checkpoint_id=tmp_path)
    assert "'step'" in said
    assert "weights of one model and nothing else" in said
    said = refused({"w": target, "rng": PerRank(torch.zeros(2))}, MissingKeysError, checkpoint_id=tmp_path)
    assert "'rng'" in said
    assert target.tolist() == [0, 0]
    planner = StandardLoadPlanner(allow_partial_load=True)
    hpdcp.load({"w": target, "step": 0}, checkpoint_id=tmp_path, planner=planner)
    assert planner.not_loaded == ("step",)
    assert target.tolist() == [1, 1]


def test_state_per_rank_is_missing_for_any_number_of_ranks(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    metadata = hpdcp.FileSystemReader(tmp_path).load_metadata()
    planner = StandardLoadPlanner()
    planner.configure_planner({"rng": PerRank(torch.zeros(2))}, metadata, PlannerContext(1, 4, False, True, False))
    with pytest.raises(MissingKeysError, match="'rng'"):
        planner.build_local_plan()


def test_several_kinds_of_trouble_come_with_the_advice_and_shapes_alone_without(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    said = refused({"w": torch.zeros(3), "x": torch.zeros(1)}, LoadMismatchError, checkpoint_id=tmp_path)
    assert "HuggingFaceReader" in said
    said = refused({"w": torch.zeros(3)}, ShapeMismatchError, checkpoint_id=tmp_path)
    assert "'w' (stored [2], wanted [3])" in said
    assert "HuggingFaceReader" not in said


def test_a_checkpoint_in_the_same_folder_goes_first(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    hpdcp.save({"w": torch.full((2,), 5.0)}, checkpoint_id=tmp_path)
    target = torch.zeros(2)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert target.tolist() == [5, 5]
    hpdcp.load({"w": target}, storage_reader=HuggingFaceReader(tmp_path))
    assert target.tolist() == [1, 1]


def test_a_save_that_did_not_finish_beside_the_weights_is_not_passed_over(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    hpdcp.save({"w": torch.full((2,), 5.0)}, checkpoint_id=tmp_path)
    os.unlink(tmp_path / ".metadata")
    target = torch.zeros(2)
    refused({"w": target}, IncompleteCheckpointError, checkpoint_id=tmp_path)
    assert target.tolist() == [0, 0]


def test_ranks_that_saved_each_for_itself_go_before_the_weights(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(2)})
    hpdcp.save({"w": torch.full((2,), 5.0)}, checkpoint_id=tmp_path, no_dist=True)
    target = torch.zeros(2)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert target.tolist() == [5, 5]


def test_a_file_that_changes_between_its_header_and_its_data_is_noticed(tmp_path: Path) -> None:
    tensors = model()
    write_shards(tmp_path, tensors, shards=2)

    class Swapped(HuggingFaceReader):
        def load_metadata(self) -> Metadata:
            metadata = super().load_metadata()
            write_single(tmp_path, {"other": torch.ones(500)}, name=shard_name(0, 2))
            return metadata

    said = refused(blanks(tensors), CorruptCheckpointError, storage_reader=Swapped(tmp_path))
    assert shard_name(0, 2) in said

    class Lost(HuggingFaceReader):
        def load_metadata(self) -> Metadata:
            metadata = super().load_metadata()
            (tmp_path / shard_name(0, 2)).unlink()
            return metadata

    write_shards(tmp_path, tensors, shards=2)
    said = refused(blanks(tensors), CorruptCheckpointError, storage_reader=Lost(tmp_path))
    assert "has lost a data file that its model.safetensors.index.json lists" in said


def test_only_the_wanted_bytes_are_read(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(64, 64) for n in range(8)}
    write_shards(tmp_path, tensors, shards=2)
    target = torch.zeros(64, 64)
    with registered() as traffic, config.using(backend="counting"):
        traffic.reads.clear()
        hpdcp.load({"w3": target}, checkpoint_id=str(tmp_path))
    assert same(tensors["w3"], target)
    assert traffic.nbytes == target.nbytes


def test_checksums_that_nobody_recorded_are_not_said_to_be_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_single(tmp_path, {"w": torch.randn(300, 300)})
    target = torch.zeros(300, 300)
    with caplog.at_level(logging.WARNING, "hpdcp"), config.using(verify="always"):
        hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert "records no checksums" in caplog.text
    assert same(load_file(tmp_path / "model.safetensors")["w"], target)
    with pytest.raises(NotSupportedError, match="records no checksums"):
        verify_checkpoint(tmp_path)


def test_metadata_without_checksums_travels_between_ranks_unchanged(tmp_path: Path) -> None:
    write_shards(tmp_path, every_kind(), shards=3)
    metadata = HuggingFaceReader(tmp_path, tied={"again": "scalar"}).load_metadata()
    again = Metadata.from_bytes(metadata.to_bytes(), where="a message")
    assert again.to_bytes() == metadata.to_bytes()
    assert not again.has_checksums
    assert {again.storage_info(row).checksums for row in range(len(again.chunks))} == {()}


def test_inspect_shows_a_folder_as_it_shows_a_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path, model(), shards=2)
    report = inspect_checkpoint(tmp_path, pattern="*.up")
    assert (report.origin, report.version, report.by_rank) == ("huggingface", "", False)
    assert [entry.fqn for entry in report.tensors] == [f"model.layers.{n}.up" for n in range(3)]
    assert {(entry.kind, entry.dtype, entry.shape) for entry in report.tensors} == {
        (EntryKind.TENSOR, "float32", (4, 6))
    }
    assert [file.key for file in report.files] == [shard_name(0, 2), shard_name(1, 2)]
    assert report.metadata_bytes == (tmp_path / "model.safetensors.index.json").stat().st_size


def test_a_folder_without_anything_says_what_was_looked_for(tmp_path: Path) -> None:
    said = refused({}, CheckpointNotFoundError, storage_reader=HuggingFaceReader(tmp_path))
    assert "no model.safetensors and no model.safetensors.index.json" in said
    with pytest.raises(InvalidArgumentError, match="HuggingFaceReader has no location to load from"):
        hpdcp.load({}, storage_reader=HuggingFaceReader())


def test_a_folder_in_the_memory_of_the_process_loads_like_one_on_disk(tmp_path: Path) -> None:
    tensors = model()
    write_shards(tmp_path, tensors, shards=2)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/weights-of-a-model", recursive=True)
    try:
        targets = blanks(tensors)
        hpdcp.load(targets, checkpoint_id="memory://weights-of-a-model")
        assert all(same(tensors[key], targets[key]) for key in tensors)
        memory.rm(f"/weights-of-a-model/{shard_name(1, 2)}")
        said = refused(targets, IncompleteCheckpointError, checkpoint_id="memory://weights-of-a-model")
        assert shard_name(1, 2) in said
    finally:
        memory.rm("/weights-of-a-model", recursive=True)
