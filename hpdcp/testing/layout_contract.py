"""What every layout must do, as tests."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointExistsError, CorruptCheckpointError, HpdcpError
from hpdcp._engine.verbs import load, save
from hpdcp._files import registry
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import PerRank
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state.geometry import Box
from hpdcp.testing._layout.ranks import StoppingPlanner, save_as_ranks
from hpdcp.testing._layout.states import DTYPES, ODD_NAMES, assert_equal, bits, cut, mixed_state
from hpdcp.testing._layout.stores import FailingBackend, first_file_of, keys_of, open_place


class LayoutContract(ABC):
    """Inherit, say which layout by its name, and call the class `Test...`.

    The layout must be registered: hpdcp's own are, and others are by an entry point of the group `hpdcp.layouts`.
    """

    layout: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}
    """As the configuration gives them."""
    least_files: ClassVar[int] = 2
    """Of `mixed_state`: a save of it writes at least so many files."""

    @pytest.fixture(autouse=True)
    def configured(self) -> Iterator[None]:
        """Every save of a test uses the layout."""
        with config.using(layout=self.layout, layouts={self.layout: dict(self.options)} if self.options else {}):
            yield

    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        """An empty folder, or URL, of the test's own."""
        return str(tmp_path / "checkpoint")

    # What comes back

    @pytest.mark.parametrize("name", DTYPES)
    def test_elements_of_every_dtype_come_back_bit_for_bit(self, place: str, name: str) -> None:
        dtype = getattr(torch, name)
        raw = torch.arange(3 * 40 * dtype.itemsize, dtype=torch.int32).mul(37).to(torch.uint8)
        raw = (raw % 2) if dtype is torch.bool else raw
        saved = raw.view(dtype).reshape(3, 40)
        save({"w": saved}, checkpoint_id=place)
        target = {"w": torch.zeros(3, 40 * dtype.itemsize, dtype=torch.uint8).view(dtype)}
        load(target, checkpoint_id=place)
        assert torch.equal(bits(target["w"]), bits(saved))

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7,), (1, 1, 1), (2, 3, 4, 5, 6)])
    def test_tensors_of_any_shape_come_back(self, place: str, shape: tuple[int, ...]) -> None:
        saved = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        save({"w": saved, "other": torch.ones(2)}, checkpoint_id=place)
        target = {"w": torch.full(shape, -1.0), "other": torch.zeros(2)}
        load(target, checkpoint_id=place)
        assert torch.equal(target["w"], saved)
        assert torch.equal(target["other"], torch.ones(2))

    def test_memory_in_any_order_comes_back(self, place: str) -> None:
        base = torch.arange(240.0).reshape(4, 6, 10)
        views = {"transposed": base.transpose(0, 2), "sliced": base[:, 1::2], "expanded": base[0, 0].expand(3, 10)}
        save(views, checkpoint_id=place)
        target = {name: torch.zeros(view.shape) for name, view in views.items()}
        target["sliced"] = torch.zeros(10, 3, 4).permute(2, 1, 0)
        load(target, checkpoint_id=place)
        assert all(torch.equal(target[name], view) for name, view in views.items())

    def test_odd_names_are_names(self, place: str) -> None:
        saved: dict[str, Any] = {name: torch.full((2,), -float(at)) for at, name in enumerate(ODD_NAMES)}
        saved["deep"] = {name: torch.full((3,), float(at)) for at, name in enumerate(ODD_NAMES)}
        save(saved, checkpoint_id=place)
        target: dict[str, Any] = {name: torch.zeros(2) for name in ODD_NAMES}
        target["deep"] = {name: torch.zeros(3) for name in ODD_NAMES}
        load(target, checkpoint_id=place)
        assert_equal(target, saved)
        with open_place(place) as backend:
            assert all(".." not in info.key.split("/") for info in backend.list_keys(recursive=True))

    def test_everything_else_of_a_state_comes_back(self, place: str) -> None:
        def state(tied: torch.Tensor, filled: bool) -> dict[Any, Any]:
            def tensor(count: int) -> torch.Tensor:
                return torch.arange(float(count)) if filled else torch.full((count,), -1.0)

            optimizer = {
                "state": {0: {"step": 3 if filled else 0, "exp_avg": tensor(4)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)} if filled else {"lr": 0.0, "betas": ()}],
            }
            return {
                "model": {"embed": tied, "head": tied},
                "optimizer": optimizer,
                "list": [tensor(2), "text" if filled else "", None, (1, {"set": {1, 2}}) if filled else ()],
                "rng": PerRank({"state": tensor(5), "seed": 7 if filled else 0}),
                5: 1.5 if filled else 0,
            }

        saved, target = state(torch.arange(6.0), True), state(torch.zeros(6), False)
        save(saved, checkpoint_id=place)
        load(target, checkpoint_id=place)
        rng, expected = target.pop("rng").value, saved.pop("rng").value
        assert_equal(target, saved)
        assert_equal(rng, expected)

    def test_a_state_without_tensors_and_one_without_anything(self, place: str) -> None:
        save({"step": 3}, checkpoint_id=f"{place}/values")
        save({}, checkpoint_id=f"{place}/nothing")
        target = {"step": 0}
        load(target, checkpoint_id=f"{place}/values")
        load({}, checkpoint_id=f"{place}/nothing")
        assert target == {"step": 3}

    def test_a_part_of_a_tensor_is_read_out_of_it(self, place: str) -> None:
        whole = torch.arange(60.0).reshape(6, 10)
        save({"w": whole}, checkpoint_id=place)
        part = cut(torch.zeros(6, 10), Box((2, 5), (3, 4)))
        load({"w": part}, checkpoint_id=place)
        assert torch.equal(part, whole[2:5, 5:9])

    # Several ranks

    @pytest.mark.parametrize(
        "boxes",
        [
            [Box((0, 0), (2, 10)), Box((2, 0), (2, 10)), Box((4, 0), (2, 10))],
            [Box((0, 0), (6, 3)), Box((0, 3), (6, 6)), Box((0, 9), (6, 1))],
            [Box((0, 0), (1, 10)), Box((1, 0), (4, 10)), Box((5, 0), (1, 7)), Box((5, 7), (1, 3))],
            [Box((0, 0), (6, 10)), Box((0, 0), (6, 10)), None],
        ],
        ids=["rows", "columns", "uneven", "replicated"],
    )
    def test_what_ranks_hold_parts_of_comes_back_in_other_parts(self, place: str, boxes: list[Box | None]) -> None:
        whole = {"w": torch.arange(60.0).reshape(6, 10), "half": torch.arange(60).reshape(6, 10).bfloat16()}

        def held(rank: int, box: Box | None) -> dict[str, Any]:
            parts = {} if box is None else {name: cut(full, box) for name, full in whole.items()}
            return {**parts, "step": 4, "mine": PerRank(rank)}

        saved = save_as_ranks(place, [held(rank, box) for rank, box in enumerate(boxes)])
        assert saved.world_size == len(boxes)
        for box in (Box((0, 0), (6, 10)), Box((1, 2), (3, 7)), Box((5, 0), (1, 10)), Box((0, 9), (6, 1))):
            target = {name: cut(torch.full_like(full, -1), box) for name, full in whole.items()}
            load(target, checkpoint_id=place)
            assert all(torch.equal(target[name], cut(full, box)) for name, full in whole.items())
        assert verify_checkpoint(place).is_sound

    # What is on record, and what is there

    def test_every_file_on_record_is_there_as_long_as_recorded_and_no_other(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        with open_place(place) as backend:
            there = {info.key: info.size for info in backend.list_keys(recursive=True)}
        assert {key: size for key, size in there.items() if key not in (".metadata", ".attempt")} == dict(
            metadata.files
        )

    def test_every_file_on_record_has_a_name_by_which_a_removal_knows_it(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        others = [key for key in metadata.files if not key.startswith("_rank")]
        assert registry.fixed_names(others) == set(others)
        assert not registry.find_layout(self.layout).is_fixed_name("notes.txt")

    def test_a_file_that_describes_itself_says_what_is_on_record(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        layout = registry.find_layout(metadata.settings["layout"])
        stored = [metadata.storage_info(row) for row in range(len(metadata.chunks))]
        with open_place(place) as backend:
            for key, size in metadata.files.items():
                described = layout.described_extents(backend, key, size)
                if described is not None:
                    assert {(info.offset, info.length) for info in stored if info.key == key} <= set(described)

    def test_what_is_on_record_covers_every_tensor_and_is_sound(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        assert metadata.settings["layout"] == self.layout
        assert metadata.has_checksums
        volumes = np.zeros(len(metadata.entries), dtype=np.int64)
        np.add.at(volumes, metadata.chunks.entry, metadata.chunks.volumes())
        assert volumes.tolist() == metadata.entries.volumes().tolist()
        report = verify_checkpoint(place)
        assert report.is_sound
        assert report.nbytes == int(metadata.storage.length.sum())

    def test_saving_again_replaces_all_of_it_or_is_refused_and_changes_nothing(self, place: str) -> None:
        save(mixed_state(1.0), checkpoint_id=place)
        before = keys_of(place)
        expected = 2.0
        try:
            save(mixed_state(2.0), checkpoint_id=place)
        except CheckpointExistsError:
            assert keys_of(place) == before
            expected = 1.0
        target = mixed_state(0.0)
        load(target, checkpoint_id=place)
        assert_equal(target, mixed_state(expected))
        assert verify_checkpoint(place).is_sound

    # Damage

    def test_a_file_that_is_gone_is_an_error_that_names_it(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        for key in sorted({metadata.storage.file_names[int(file)] for file in metadata.storage.file}):
            with open_place(place) as backend:
                kept = backend.read(key)
                backend.delete([key])
                with pytest.raises(CorruptCheckpointError) as raised:
                    load(mixed_state(0.0), checkpoint_id=place)
                assert key in str(raised.value)
                assert [damage.key for damage in verify_checkpoint(place).damages] == [key]
                backend.write(key, [memoryview(kept)], size=len(kept), exclusive=False)
        load(mixed_state(0.0), checkpoint_id=place)

    def test_a_file_of_another_length_is_an_error_that_names_it(self, place: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        key = first_file_of(metadata, "w")
        for longer in (False, True):
            with open_place(place) as backend:
                kept = backend.read(key)
                damaged = kept + b"\0" if longer else kept[:-1]
                backend.write(key, [memoryview(damaged)], size=len(damaged), exclusive=False)
                with pytest.raises(CorruptCheckpointError) as raised:
                    load(mixed_state(0.0), checkpoint_id=place)
                assert key in str(raised.value)
                backend.write(key, [memoryview(kept)], size=len(kept), exclusive=False)

    @pytest.mark.parametrize("name", ["w", "long", "step"])
    def test_a_byte_that_flipped_is_found_when_checksums_are_compared(self, place: str, name: str) -> None:
        metadata = save(mixed_state(1.0), checkpoint_id=place)
        info = metadata.storage_info(metadata.chunk_rows(next(iter(metadata.rows_of(name))))[0])
        for position in (info.offset, info.offset + info.length // 2, info.offset + info.length - 1):
            with open_place(place) as backend:
                data = bytearray(backend.read(info.key))
                data[position] ^= 1
                backend.write(info.key, [memoryview(bytes(data))], size=len(data), exclusive=False)
                with pytest.raises(CorruptCheckpointError) as raised:
                    load(mixed_state(0.0), storage_reader=FileSystemReader(place, verify="always"))
                assert info.key in str(raised.value)
                assert not verify_checkpoint(place).is_sound
                data[position] ^= 1
                backend.write(info.key, [memoryview(bytes(data))], size=len(data), exclusive=False)
        assert verify_checkpoint(place).is_sound

    # Failures of a save

    @pytest.mark.parametrize("calls", range(4))
    def test_a_save_that_fails_leaves_no_data_and_the_next_one_works(
        self, place: str, calls: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = registry.open_backend

        def failing(*args: Any, **kwargs: Any) -> Backend:
            return FailingBackend(real(*args, **kwargs), calls)

        with monkeypatch.context() as patched:
            patched.setattr(registry, "open_backend", failing)
            if calls < self.least_files:
                with pytest.raises(HpdcpError, match="the store is full"):
                    save(mixed_state(1.0), checkpoint_id=place)
                assert [key for key in keys_of(place) if key != ".attempt"] == []
        save(mixed_state(2.0), checkpoint_id=place)
        target = mixed_state(0.0)
        load(target, checkpoint_id=place)
        assert_equal(target, mixed_state(2.0))

    def test_a_failure_on_one_rank_leaves_no_data_of_any(self, place: str) -> None:
        boxes = [Box((0, 0), (3, 10)), Box((3, 0), (3, 10))]
        whole = torch.arange(60.0).reshape(6, 10)
        states = [{"w": cut(whole, box), "step": 1} for box in boxes]
        with pytest.raises(HpdcpError, match="enough"):
            save_as_ranks(place, states, [StandardSavePlanner(), StoppingPlanner()])
        assert [key for key in keys_of(place) if key != ".attempt"] == []
        save_as_ranks(place, states)
        target = {"w": torch.zeros(6, 10), "step": 0}
        load(target, checkpoint_id=place)
        assert_equal(target, {"w": whole, "step": 1})
