"""Conversions between stores of every kind: folders, S3, and what fsspec has in memory."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hpdcp import offline_transform
from hpdcp._base import config
from hpdcp._base.errors import CheckpointExistsError, CorruptCheckpointError, InvalidArgumentError
from hpdcp._files import registry
from tests.support.huggingface import INDEX, write_shards
from tests.support.s3 import S3Server
from tests.unit._convert.test_round_trips import all_kinds, bits, differing

Place = tuple[str, dict[str, Any]]


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/root"


def sizes(place: str, options: Mapping[str, Any]) -> dict[str, int]:
    with closing(registry.open_backend(place, storage_options=options)) as backend:
        return {info.key: info.size for info in backend.list_keys(recursive=True)}


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_go_from_a_folder_to_s3_and_back_by_way_of_a_checkpoint_there(
    tmp_path: Path, s3_server: S3Server, shards: int
) -> None:
    tensors, options = all_kinds() | {"large": bits(torch.bfloat16, (3000, 1111))}, s3_server.storage_options()
    write_shards(tmp_path / "hf", tensors, shards=shards)
    (tmp_path / "hf" / "config.json").write_text("{}")
    saved, exported = s3_server.new_prefix(), s3_server.new_prefix()
    offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", saved, dst_storage_options=options)
    done = offline_transform.convert_dcp_to_huggingface(
        saved, exported, max_shard_size="1MB", src_storage_options=options, dst_storage_options=options
    )
    assert sizes(exported, options) == dict(done.files)
    assert (
        differing(tensors, offline_transform.parse_checkpoint_from_huggingface(exported, src_storage_options=options))
        == []
    )
    assert differing(tensors, offline_transform.dcp_to_full_state_dict(saved, src_storage_options=options)) == []
    offline_transform.convert_full_checkpoint_to_dcp(exported, tmp_path / "dcp", src_storage_options=options)
    assert differing(tensors, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []
    offline_transform.convert_dcp_to_torch(
        saved, f"{saved}-file/all.pt", src_storage_options=options, dst_storage_options=options
    )
    offline_transform.convert_full_checkpoint_to_dcp(
        f"{saved}-file/all.pt", tmp_path / "again", "torch", src_storage_options=options
    )
    assert differing(tensors, offline_transform.dcp_to_full_state_dict(tmp_path / "again")) == []


def test_an_export_on_s3_is_replaced_or_refused_as_in_a_folder(tmp_path: Path, s3_server: S3Server) -> None:
    options, place = s3_server.storage_options(), s3_server.new_prefix()
    state = {f"w{number}": torch.full((5,), float(number)) for number in range(6)}

    def export(size: int, **more: Any) -> offline_transform.Conversion:
        return offline_transform.save_state_dict_as_huggingface_format(
            place, state, size, dst_storage_options=options, **more
        )

    export(60)
    with pytest.raises(CheckpointExistsError, match="model-00001-of-00002"):
        export(60)
    done = export(40)
    assert sizes(place, options) == dict(done.files)
    done = export(40, overwrite=True)
    assert sizes(place, options) == dict(done.files)
    done = export(10**6)
    assert sizes(place, options) == dict(done.files)
    assert (
        differing(state, offline_transform.parse_checkpoint_from_huggingface(place, src_storage_options=options)) == []
    )


def test_what_is_wrong_on_s3_is_said_before_anything_is_written(tmp_path: Path, s3_server: S3Server) -> None:
    options, place = s3_server.storage_options(), s3_server.new_prefix()
    write_shards(tmp_path / "hf", {"a": torch.ones(3), "b": torch.ones(3)}, shards=2)
    with closing(registry.open_backend(place, storage_options=options)) as backend:
        for path in (tmp_path / "hf").iterdir():
            data = path.read_bytes()
            data = data[:-1] if path.name.startswith("model-00002") else data
            backend.publish(path.name, data)
        backend.publish("m.pt", b"nothing")
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00002"):
        offline_transform.convert_full_checkpoint_to_dcp(place, tmp_path / "dcp", src_storage_options=options)
    with pytest.raises(InvalidArgumentError, match="src_platform='huggingface'"):
        offline_transform.convert_full_checkpoint_to_dcp(place, tmp_path / "dcp", "torch", src_storage_options=options)
    with pytest.raises(CorruptCheckpointError, match=r"m\.pt"):
        offline_transform.convert_full_checkpoint_to_dcp(
            f"{place}/m.pt", tmp_path / "dcp", "torch", src_storage_options=options
        )
    with pytest.raises(InvalidArgumentError, match="both"):
        offline_transform.convert_full_checkpoint_to_dcp(place, f"{place}/", src_storage_options=options)
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_go_through_memory(tmp_path: Path, shards: int) -> None:
    tensors = all_kinds()
    write_shards(tmp_path / "hf", tensors, shards=shards)
    (tmp_path / "hf" / "config.json").write_text("{}")
    saved, exported = memory(), memory()
    offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", saved)
    done = offline_transform.convert_dcp_to_huggingface(saved, exported, max_shard_size=200, copy_from=tmp_path / "hf")
    assert sizes(exported, {}) == {**done.files, "config.json": 2}
    assert INDEX in done.files
    assert differing(tensors, offline_transform.parse_checkpoint_from_huggingface(exported)) == []
    offline_transform.convert_full_checkpoint_to_dcp(exported, tmp_path / "dcp")
    assert differing(tensors, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []


def test_a_route_of_the_configuration_decides_which_store_is_used(tmp_path: Path) -> None:
    write_shards(tmp_path / "hf", {"a": torch.ones(3)}, shards=1)
    with config.using(routes=[{"prefix": "memory://", "backend": "fsspec"}]):
        place = memory()
        offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", place)
        assert offline_transform.dcp_to_full_state_dict(place)["a"].tolist() == [1, 1, 1]
