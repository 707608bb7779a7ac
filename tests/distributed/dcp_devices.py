"""State on devices whose process groups carry their tensors only: what goes over them, and what goes over hosts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp._base import config
from hpdcp._base.errors import RankFailedError, StorageError
from hpdcp._comm import process_group
from tests.support import fake_ccl, fake_device
from tests.support.backends import Traffic, registered
from tests.support.fake_device import NAME, shadow
from tests.support.job import Job
from tests.support.ranks import is_rank

RANKS = 3

DEVICE = fake_device.STATE
if is_rank():
    fake_device.install()
    fake_ccl.register()


def rank_environment(request: pytest.FixtureRequest, parameters: Mapping[str, object]) -> dict[str, str]:
    """Devices that are not the CPU, and process groups that carry their tensors only."""
    return {"HYPER_PARALLEL_TEST_DEVICE_TYPE": NAME, "HPDCP_TEST_GROUP_BACKEND": f"{NAME}:{fake_ccl.BACKEND}"}


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted
        counted.fails = None


@pytest.fixture(autouse=True)
def _the_device_is_never_waited_for_as_a_whole() -> Iterator[None]:
    DEVICE.log.clear()
    yield
    assert "wait device" not in DEVICE.log


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(NAME)


def values() -> dict[str, torch.Tensor]:
    """Small ones, which go in batches, and one that goes by itself."""
    made = {f"small{n}": torch.arange(n, n + 50, dtype=torch.float32) for n in range(20)}
    return made | {
        "half": torch.arange(300, dtype=torch.bfloat16),
        "eight": torch.arange(70, dtype=torch.float32).to(torch.float8_e4m3fn),
        "large": torch.arange(40_000, dtype=torch.int64),
    }


def blank(tensors: Mapping[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    """Targets on the device, filled with something else by work that is still queued."""
    targets = {key: on_device(torch.zeros_like(tensor)) for key, tensor in tensors.items()}
    for target in targets.values():
        target.fill_(job.rank + 1)
    return targets


def differing(targets: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        key
        for key, target in targets.items()
        if not torch.equal(shadow(target).view(torch.uint8), expected[key].view(torch.uint8))
    ]


def sent() -> int:
    """Bytes that this rank has sent or received from device to device."""
    return sum(int(line.split()[1]) for line in DEVICE.log if line.startswith("broadcast "))


def test_the_default_group_carries_no_host_tensors(ranks: Job) -> None:
    assert ranks.world_size == 3
    assert process_group.backends_of(dist.group.WORLD) == {NAME: fake_ccl.BACKEND}


def test_one_group_for_plans_is_made_once_and_the_log_says_so(
    ranks: Job, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_own_group", None)
    state = {"a": on_device(torch.arange(5.0)), "step": 3}
    before = len(dist.distributed_c10d._world.pg_map)
    with caplog.at_level(logging.INFO, "hpdcp"):
        for step in range(3):
            hpdcp.save(state, checkpoint_id=folder / str(step))
    said = [record.message for record in caplog.records if "so hpdcp makes one of gloo beside it" in record.message]
    assert len(said) == 1
    assert f"cpu:gloo,{NAME}:{fake_ccl.BACKEND}" in said[0]
    assert len(dist.distributed_c10d._world.pg_map) == before + 1
    own = process_group._host_group()
    assert process_group.backends_of(own)["cpu"] == "gloo"


def test_an_asynchronous_save_makes_no_group(ranks: Job, folder: Path) -> None:
    before = dict(dist.distributed_c10d._world.pg_map)
    state = {"a": on_device(torch.arange(5.0)), "rank": hpdcp.PerRank(ranks.rank)}
    hpdcp.async_save(state, checkpoint_id=folder / "c").get_result()
    assert dist.distributed_c10d._world.pg_map == before
    loaded = {"a": torch.zeros(5)}
    hpdcp.load(loaded, checkpoint_id=folder / "c")
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("batch_bytes", [0, 1000, 6 << 20])
def test_what_all_devices_want_is_read_once_and_goes_from_device_to_device(
    ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int
) -> None:
    expected = values()
    hpdcp.save({key: on_device(tensor) for key, tensor in expected.items()}, checkpoint_id=folder)
    targets = blank(expected, ranks)
    traffic.reads.clear()
    DEVICE.log.clear()
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert differing(targets, expected) == []
    total = sum(tensor.nbytes for tensor in expected.values())
    assert sum(ranks.gather(traffic.nbytes)) == total
    assert sent() >= total


def test_buffers_on_the_device_stay_within_eight_batches(ranks: Job, folder: Path) -> None:
    expected = {f"t{n}": torch.full((900,), n, dtype=torch.uint8) for n in range(100)}
    hpdcp.save({key: on_device(tensor) for key, tensor in expected.items()}, checkpoint_id=folder)
    targets = blank(expected, ranks)
    gc.collect()  # what earlier tests left in circles
    held = DEVICE.held()
    DEVICE.forget_peak()
    hpdcp.load(targets, checkpoint_id=folder, broadcast_replicated_tensors=True, broadcast_batch_bytes=1000)
    assert differing(targets, expected) == []
    assert 0 < DEVICE.peak - held <= 8 * (1000 + 16)


def test_a_state_of_which_a_part_is_on_the_host_goes_both_ways(ranks: Job, folder: Path, traffic: Traffic) -> None:
    expected = values()
    hpdcp.save(expected, checkpoint_id=folder)
    targets = blank(expected, ranks)
    on_host = {key for number, key in enumerate(targets) if number % 2}
    # What some ranks hold on the host goes over hosts for all of them.
    apart = "small0" if ranks.rank == 1 else "small1"
    for key in on_host | {apart}:
        targets[key] = torch.full_like(expected[key], ranks.rank + 1)
    traffic.reads.clear()
    DEVICE.log.clear()
    hpdcp.load(targets, checkpoint_id=folder)
    assert differing(targets, expected) == []
    assert sum(ranks.gather(traffic.nbytes)) == sum(tensor.nbytes for tensor in expected.values())
    assert 0 < sent() < sum(tensor.nbytes for tensor in expected.values())


def test_devices_that_want_another_dtype_or_other_strides_get_them(ranks: Job, folder: Path) -> None:
    expected = {"cast": torch.arange(60, dtype=torch.float32), "turned": torch.arange(60).reshape(6, 10)}
    hpdcp.save(expected, checkpoint_id=folder)
    whole = on_device(torch.zeros(10, 6, dtype=torch.int64))
    targets = {"cast": on_device(torch.zeros(60, dtype=torch.bfloat16)), "turned": whole.t()}
    for batch_bytes in (0, 6 << 20):
        with pytest.warns(UserWarning, match="are cast to their target's dtype"):
            hpdcp.load(
                targets, checkpoint_id=folder, broadcast_replicated_tensors=True, broadcast_batch_bytes=batch_bytes
            )
        assert torch.equal(shadow(targets["cast"]), expected["cast"].bfloat16())
        assert torch.equal(shadow(whole).t(), expected["turned"])
        whole.zero_()


def test_ranks_that_share_a_chunk_get_a_group_of_their_devices(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(8.0)
    hpdcp.save({"a": value}, checkpoint_id=folder)
    traffic.reads.clear()
    made: list[tuple[tuple[int, ...], str]] = []
    new_group = dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda of, **how: (made.append((tuple(of), how["backend"])), new_group(of, **how))[1]
    )
    offset = 4 if ranks.rank == 2 else 0
    target = on_device(torch.zeros(4))
    setattr(target, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((offset,), (4,)), (8,)))
    DEVICE.log.clear()
    hpdcp.load({"a": target}, checkpoint_id=folder)
    assert torch.equal(shadow(target), value[offset : offset + 4])
    assert made == [((0, 1), f"{NAME}:{fake_ccl.BACKEND}")]
    assert sum(ranks.gather(traffic.nbytes)) == value.nbytes
    assert (sent() > 0) == (ranks.rank != 2)


def test_sharded_and_replicated_tensors_of_a_mesh_of_devices_come_back(
    ranks: Job, folder: Path, traffic: Traffic
) -> None:
    value = torch.arange(7 * 40, dtype=torch.float32).reshape(7, 40)
    mesh = ranks.mesh(3)
    assert mesh.device_type == NAME
    mine = value[ranks.rank * 3 : (ranks.rank + 1) * 3]
    layouts = {"sharded": (Shard(0), mine), "replicated": (Replicate(), value)}

    def placed(filled: bool) -> dict[str, DTensor]:
        return {
            key: DTensor.from_local(
                on_device(local if filled else torch.zeros_like(local)), mesh, [placement],
                run_check=False, shape=value.shape, stride=value.stride(),
            )
            for key, (placement, local) in layouts.items()
        }  # fmt: skip

    hpdcp.save(placed(True), checkpoint_id=folder)
    targets = placed(False)
    traffic.reads.clear()
    DEVICE.log.clear()
    hpdcp.load(targets, checkpoint_id=folder)
    for key, (_, local) in layouts.items():
        assert torch.equal(shadow(targets[key].to_local()), local), key
    assert sum(ranks.gather(traffic.nbytes)) == 2 * value.nbytes
    assert sent() >= value.nbytes


def test_given_groups_of_devices_are_used_for_what_is_on_them(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"a": torch.arange(4.0), "b": torch.arange(6.0)}
    hpdcp.save(expected, checkpoint_id=folder)
    whole = (0, 1, 2)
    group = dist.new_group(list(whole), backend=f"{NAME}:{fake_ccl.BACKEND}")
    used: list[object] = []
    broadcast = dist.broadcast

    def noted(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        used.append((tensor.device.type, options["group"] is group))
        return broadcast(tensor, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "broadcast", noted)
    targets = {"a": on_device(torch.zeros(4)), "b": torch.zeros(6)}
    hpdcp.load(targets, checkpoint_id=folder, broadcast_groups={whole: group})
    assert differing(targets, expected) == []
    assert (NAME, True) in used
    assert ("cpu", False) in used
    assert not {(NAME, False), ("cpu", True)} & set(used)
    monkeypatch.undo()
    dist.destroy_process_group(group)


def test_a_source_that_fails_fails_all_and_nobody_waits(ranks: Job, folder: Path, traffic: Traffic) -> None:
    expected = values()
    hpdcp.save(expected, checkpoint_id=folder)
    targets = blank(expected, ranks)
    if ranks.rank == 1:
        traffic.fails = lambda key, range_: True
    errors = ranks.errors(lambda: hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=1000))
    assert [type(error) for error in errors] in ([StorageError] * 3, [RankFailedError] * 3), errors
    assert all("the cable is cut" in str(error) for error in errors)


def test_objects_and_plans_stay_on_the_host_whatever_torch_s_default_device_is(ranks: Job, folder: Path) -> None:
    torch.set_default_device(NAME)
    try:
        state = {"a": torch.full((4,), 2.0), "config": {"lr": 0.1, "name": "x"}}
        assert state["a"].device.type == NAME
        hpdcp.save(state, checkpoint_id=folder)
        loaded = {"a": torch.zeros(4), "config": {"lr": 0.0, "name": ""}}
        hpdcp.load(loaded, checkpoint_id=folder, broadcast_replicated_tensors=True)
    finally:
        torch.set_default_device("cpu")
    assert shadow(loaded["a"]).tolist() == [2.0] * 4
    assert loaded["config"] == {"lr": 0.1, "name": "x"}
