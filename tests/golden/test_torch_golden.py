"""Checkpoints that versions of torch.distributed.checkpoint wrote load, in full and by any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp.compare import compare_checkpoints
from hpdcp.inspect import inspect_checkpoint
from hpdcp.offline_transform import convert_dcp_to_torch, convert_full_checkpoint_to_dcp
from hpdcp.verify import verify_checkpoint
from tests.golden import torch_values, values

HERE = Path(__file__).parent
VERSIONS = ("torch_dcp_2_13",)
KINDS = ("together", "threads", "files", "zstd", "safetensors", "apart")


@pytest.fixture(params=VERSIONS)
def together(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param) / "together"


@pytest.fixture(params=[f"{version}/{kind}" for version in VERSIONS for kind in KINDS])
def folder(request: pytest.FixtureRequest) -> Path:
    if str(request.param).endswith("zstd"):
        pytest.importorskip("zstandard")
    return HERE / str(request.param)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def blank(value: Any) -> Any:
    """The same structure, with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other and repr(one) == repr(other)


def model() -> dict[str, torch.Tensor]:
    return {
        "rows": values.sharded(3),
        "columns": values.sharded(4, torch.bfloat16),
        "same": values.sharded(2),
        "fsdp1": values.sharded(6),
    }


def everything() -> dict[str, Any]:
    net, optimizer = torch_values.trained()
    flat: dict[str, Any] = {}
    for number, (name, _) in enumerate(net.named_parameters()):
        flat |= {f"state.{name}.{key}": each for key, each in optimizer.state_dict()["state"][number].items()}
        group = {key: each for key, each in optimizer.state_dict()["param_groups"][0].items() if key != "params"}
        flat |= {f"param_groups.{name}.{key}": each for key, each in group.items()}
    return {
        "model": model(),
        "net": dict(net.state_dict()),
        "optimizer": optimizer.state_dict(),
        "flat": flat,
        "dtypes": {name: values.of_dtype(name) for name in values.DTYPES},
        "nan": values.nan_payloads(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "turned": values.sharded(3).t(),
        "values": torch_values.plain(),
        "listed": [torch.ones(2), {"deep": torch.arange(3)}, "text"],
    }


def test_the_whole_state_loads_bit_for_bit(together: Path) -> None:
    expected = everything()
    target = blank(expected)
    hpdcp.load(target, checkpoint_id=together)
    for key, value in expected.items():
        assert same(target[key], value), key


def test_every_way_of_writing_loads_bit_for_bit(folder: Path) -> None:
    target: dict[str, Any] = {"model": blank(model())}
    if folder.name != "together":
        target["step"] = None
    hpdcp.load(target, checkpoint_id=folder)
    assert same(target["model"], model())
    assert target.get("step", 7) == 7


def test_any_slice_loads(folder: Path) -> None:
    for name, whole in model().items():
        part = torch.zeros(2, whole.shape[1] - 1, dtype=whole.dtype)
        box = hpdcp.ChunkStorageMetadata((2, 1), tuple(part.shape))  # across both ranks' rows
        setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(whole.shape)))
        hpdcp.load({"model": {name: part}}, checkpoint_id=folder)
        assert bits(part) == bits(whole[2:4, 1:]), name


def test_an_optimizer_s_states_are_allocated_and_filled(together: Path) -> None:
    trained = torch_values.trained()[1].state_dict()
    for prefix in ("optimizer", "flat"):
        net, _ = torch_values.trained()
        fresh = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.1)
        assert hpdcp.allocate_optimizer_state(fresh, checkpoint_id=together, prefix=prefix, model=net) == 3
        if prefix == "optimizer":
            hpdcp.load({"optimizer": fresh}, checkpoint_id=together)
            assert same(fresh.state_dict(), trained)


def test_the_whole_becomes_one_file_with_its_nesting(together: Path, tmp_path: Path) -> None:
    convert_dcp_to_torch(together, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    for key, value in everything().items():
        assert same(found[key], value), key


def test_a_conversion_keeps_everything(folder: Path, tmp_path: Path) -> None:
    convert_full_checkpoint_to_dcp(folder, tmp_path / "ours", src_platform="torch")
    assert inspect_checkpoint(tmp_path / "ours").origin == ""
    assert verify_checkpoint(tmp_path / "ours").is_sound
    assert compare_checkpoints(folder, tmp_path / "ours").is_equal
    target = {"model": blank(model())}
    hpdcp.load(target, checkpoint_id=tmp_path / "ours")
    assert same(target["model"], model())


def test_every_item_is_verified(folder: Path) -> None:
    report = verify_checkpoint(folder)
    assert report.is_sound and report.blocks > 0
    assert report.files == sum(path.stat().st_size > 0 for path in folder.glob("*.distcp"))


def test_what_is_there_is_shown(together: Path) -> None:
    report = inspect_checkpoint(together, pattern="model.*")
    assert (report.origin, report.layout) == ("torch", "torch")
    shown = {entry.fqn: (entry.dtype, entry.shape, entry.chunks) for entry in report.entries}
    assert shown["model.rows"] == ("float32", (5, 3), 2) and shown["model.columns"] == ("bfloat16", (5, 4), 2)
