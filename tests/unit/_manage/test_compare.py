"""Two checkpoints compared: names, shapes, values bit for bit or within a tolerance, under any two layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import hpdcp
from hpdcp._base.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidArgumentError
from hpdcp._convert import tensor_streams
from hpdcp._manage import _compare_values, _value_differences
from hpdcp._manage._value_differences import Tally
from hpdcp._manage.compare import Aspect, Comparison, compare_checkpoints
from tests.support.data_files import data_file
from tests.support.huggingface import write_shards
from tests.support.runs import begin_run

Saver = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saver:
    """Saves a state, and gives the folder."""

    def save(name: str, state: Mapping[Any, Any]) -> Path:
        hpdcp.save(dict(state), checkpoint_id=tmp_path / name)
        return tmp_path / name

    return save


def aspects(found: Comparison) -> dict[str, Aspect]:
    return {each.fqn: each.aspect for each in found.differences}


def test_the_same_state_saved_twice_is_equal(saved: Saver) -> None:
    state = {"w": torch.randn(30, 7), "none": torch.zeros(0, 3), "zero_dim": torch.tensor(3.0), "step": 7, "s": "x"}
    found = compare_checkpoints(saved("a", state), saved("b", state), values=True)
    assert found.is_equal
    assert not found.arrangement
    assert found.names == 5
    assert found.nbytes == 30 * 7 * 4 + 4 + len("7") + len('"x"')


def test_structure_is_told_from_the_metadata_alone(saved: Saver) -> None:
    a = saved(
        "a", {"gone": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "kind": 1, "w": torch.ones(2)}
    )
    b = saved(
        "b",
        {"new": 1, "shape": torch.ones(3), "dtype": torch.ones(2).half(), "kind": torch.ones(1), "w": torch.zeros(2)},
    )
    for folder in (a, b):
        for file in folder.glob("_rank*"):
            file.unlink()
    found = compare_checkpoints(a, b)
    assert aspects(found) == {
        "gone": Aspect.ONLY_IN_A, "new": Aspect.ONLY_IN_B,
        "shape": Aspect.SHAPE, "dtype": Aspect.DTYPE, "kind": Aspect.KIND,
    }  # fmt: skip
    (dtype,) = [each for each in found.differences if each.fqn == "dtype"]
    assert (dtype.a, dtype.b) == ("float32", "float16")


def test_one_changed_element_is_found_and_described(saved: Saver) -> None:
    w = torch.arange(24.0).reshape(4, 6)
    changed = w.clone()
    changed[2, 3] += 0.5
    found = compare_checkpoints(saved("a", {"w": w}), saved("b", {"w": changed}), values=True)
    ((difference),) = found.differences
    elements = difference.elements
    assert elements is not None
    assert (elements.differing, elements.elements, elements.first) == (1, 24, (2, 3))
    assert elements.max_abs == 0.5
    assert elements.max_rel == pytest.approx(0.5 / 15.5)


def bits(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32).view(torch.float32)


def test_values_are_compared_bit_for_bit(saved: Saver) -> None:
    quiet, other = 0x7FC00000, 0x7FC00001
    state = {"nan": bits(quiet, other), "zero": torch.tensor([0.0])}
    a, same = saved("a", state), saved("same", state)
    assert compare_checkpoints(a, same, values=True).is_equal
    b = saved("b", {"nan": bits(quiet, quiet), "zero": torch.tensor([-0.0])})
    found = {each.fqn: each.elements for each in compare_checkpoints(a, b, values=True).differences}
    assert found["nan"] is not None
    assert found["zero"] is not None
    assert (found["nan"].differing, found["nan"].first, found["nan"].one_nan) == (1, (1,), 0)
    assert (found["zero"].differing, found["zero"].max_abs) == (1, 0.0)
    assert compare_checkpoints(a, b, atol=1e-9).is_equal, "as numbers, both are the same"


@pytest.mark.parametrize(
    ("a", "b", "rtol", "atol", "equal"),
    [
        (1.0, 1.001, 0.0, 0.01, True),
        (1.0, 1.1, 0.0, 0.01, False),
        (1000.0, 1001.0, 0.01, 0.0, True),
        (math.inf, math.inf, 0.01, 0.0, True),
        (math.inf, 1.0, 0.01, 0.0, False),
        (math.inf, -math.inf, 0.01, 0.0, False),
        (math.nan, math.nan, 0.01, 0.0, True),
        (math.nan, 1.0, 0.01, 0.0, False),
    ],
)
def test_a_tolerance_lets_numbers_pass(a: float, b: float, rtol: float, atol: float, equal: bool, saved: Saver) -> None:
    one = saved("a", {"w": torch.tensor([a, 2.0]), "lr": a})
    other = saved("b", {"w": torch.tensor([b, 2.0]), "lr": b})
    found = compare_checkpoints(one, other, rtol=rtol, atol=atol)
    assert set(aspects(found)) == (set() if equal else {"w", "lr"})


def test_whole_numbers_are_exact_whatever_the_tolerance(saved: Saver) -> None:
    a = saved("a", {"count": torch.tensor([2**60]), "step": 100, "flag": torch.tensor([True])})
    b = saved("b", {"count": torch.tensor([2**60 + 1]), "step": 101, "flag": torch.tensor([False])})
    assert set(aspects(compare_checkpoints(a, b, rtol=0.5, atol=5))) == {"count", "step", "flag"}


def test_with_a_tolerance_values_of_other_dtypes_are_compared_as_numbers(saved: Saver) -> None:
    w = torch.randn(50)
    a, b = saved("a", {"w": w}), saved("b", {"w": w.bfloat16()})
    found = compare_checkpoints(a, b, rtol=0.01)
    assert [each.aspect for each in found.differences] == [Aspect.DTYPE]
    found = compare_checkpoints(a, b, rtol=1e-6)
    assert [each.aspect for each in found.differences] == [Aspect.DTYPE, Aspect.VALUES]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared(dtype: torch.dtype, saved: Saver) -> None:
    data = torch.zeros(6 * dtype.itemsize, dtype=torch.uint8)
    a = saved("a", {"w": data.view(dtype)})
    data = data.clone()
    data[4 * dtype.itemsize] = 1
    found = compare_checkpoints(a, saved("b", {"w": data.view(dtype)}), values=True)
    ((difference),) = found.differences
    assert difference.elements is not None
    assert (difference.elements.differing, difference.elements.first) == (1, (4,))
    assert compare_checkpoints(a, saved("c", {"w": torch.zeros_like(data).view(dtype)}), values=True).is_equal


def by_two_ranks(
    folder: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, *, rows: int, seed: int = 0
) -> Path:
    """`whole` saved by two ranks without collectives, the first of which has so many rows."""
    monkeypatch.setenv("HPDCP_RUN_ID", folder.name)
    store = dist.HashStore()
    for rank, part in enumerate((slice(0, rows), slice(rows, len(whole)))):
        begin_run()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            tensor = whole[part].clone()
            box = hpdcp.ChunkStorageMetadata((part.start, 0), tuple(tensor.shape))
            setattr(tensor, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(whole.shape)))
            state = {"w": tensor, "seed": hpdcp.PerRank(rank + seed)}
            hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
        finally:
            dist.destroy_process_group()
    return folder


def test_sharding_does_not_count_unless_asked_for(
    saved: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(9, 5)
    a = by_two_ranks(tmp_path / "a", whole, monkeypatch, rows=6)
    b = by_two_ranks(tmp_path / "b", whole, monkeypatch, rows=2)
    one = saved("one", {"w": whole})
    found = compare_checkpoints(a, b, values=True)
    assert found.is_equal
    assert [(each.fqn, each.aspect) for each in found.arrangement] == [("w", Aspect.LAYOUT)]
    assert compare_checkpoints(a, one, values=True, keys=["w"]).is_equal
    assert aspects(compare_checkpoints(a, b, layout=True)) == {"w": Aspect.LAYOUT}
    whole[7, 1] += 1
    (found_w,) = compare_checkpoints(a, saved("changed", {"w": whole}), values=True, keys=["w"]).differences
    assert found_w.elements is not None
    assert found_w.elements.first == (7, 1)


def test_what_ranks_keep_for_themselves_is_compared_rank_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(4, 2)
    a = by_two_ranks(tmp_path / "a", whole, monkeypatch, rows=2)
    b = by_two_ranks(tmp_path / "b", whole, monkeypatch, rows=2, seed=1)
    found = compare_checkpoints(a, b, values=True)
    assert [(each.fqn, each.owner, each.a, each.b) for each in found.differences] == [
        ("seed", 0, "0", "1"),
        ("seed", 1, "1", "2"),
    ]


def test_hugging_face_weights_are_compared_with_a_part_of_a_checkpoint(saved: Saver, tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.randn(5, 3), "layers.1.w": torch.randn(5, 3).bfloat16()}
    folder = write_shards(tmp_path / "hf", weights, shards=2)
    a = saved("a", {"model": weights, "optimizer": {"step": 3}})
    found = compare_checkpoints(a, folder, values=True, prefix_a="model.")
    assert found.is_equal
    assert found.names == 2
    assert compare_checkpoints(folder, folder, values=True).is_equal
    weights["layers.1.w"][0, 0] += 1
    b = saved("b", {"model": weights})
    assert aspects(compare_checkpoints(folder, b, values=True, prefix_b="model.")) == {"layers.1.w": Aspect.VALUES}


def test_ties_and_nesting_are_told_apart_from_what_counts(saved: Saver) -> None:
    w = torch.randn(3)
    a = saved("a", {"x": w, "y": w, "m": {"a.b": torch.ones(1)}})
    b = saved("b", {"x": w, "y": w.clone(), "m": {"a": {"b": torch.ones(1)}}})
    found = compare_checkpoints(a, b, values=True)
    assert found.is_equal
    assert {(each.fqn, each.aspect) for each in found.arrangement} == {
        ("y", Aspect.TIES),
        ("m.a.b", Aspect.NESTING),
    }
    assert len(compare_checkpoints(a, b, layout=True).differences) == 2
    tied = saved("c", {"x": w + 1, "y": w + 1, "m": {"a.b": torch.ones(1)}})
    assert set(aspects(compare_checkpoints(a, tied, values=True))) == {"x", "y"}, "each name is told of"


@pytest.mark.parametrize("stored", ["embed", "head"])
def test_a_tied_name_that_the_other_side_stores_under_its_tie_is_the_same(
    saved: Saver, tmp_path: Path, stored: str
) -> None:
    w = torch.randn(3)
    a = saved("a", {"embed": w, "head": w, "norm": torch.ones(2)})
    write_shards(tmp_path / "weights", {stored: w, "norm": torch.ones(2)}, shards=1)
    for found in (
        compare_checkpoints(a, tmp_path / "weights", values=True),
        compare_checkpoints(tmp_path / "weights", a, values=True),
    ):
        assert found.is_equal
        assert {each.aspect for each in found.arrangement} == {Aspect.TIES}
        assert any(not (each.a and each.b) for each in found.arrangement), "told of as on one side only"
    strict = compare_checkpoints(a, tmp_path / "weights", layout=True)
    assert set(aspects(strict).values()) == {Aspect.TIES}
    write_shards(tmp_path / "other", {stored: w + 1, "norm": torch.ones(2)}, shards=1)
    assert aspects(compare_checkpoints(a, tmp_path / "other", values=True)) == {stored: Aspect.VALUES}
    write_shards(tmp_path / "less", {"norm": torch.ones(2)}, shards=1)
    gone = {"embed": Aspect.ONLY_IN_A, "head": Aspect.ONLY_IN_A}
    assert aspects(compare_checkpoints(a, tmp_path / "less", values=True)) == gone


def test_equal_checksums_save_the_reading(saved: Saver) -> None:
    state = {"w": torch.randn(100, 100), "v": torch.zeros(10), "note": "x" * 50}
    a, b = saved("a", state), saved("b", {**state, "v": torch.ones(10)})
    for folder in (a, b):
        file = data_file(folder)
        data = bytearray(file.read_bytes())
        data[-4] ^= 0xFF  # in `w`: narrower tensors come first only where their elements are narrower
        file.write_bytes(data)
    found = compare_checkpoints(a, b, trust_checksums=True)
    assert aspects(found) == {"v": Aspect.VALUES}
    assert found.nbytes == 40
    assert found.trusted_nbytes == 40_000 + 52
    with pytest.raises(CorruptCheckpointError, match=r"_rank0_\..*\.safetensors"):
        compare_checkpoints(a, b, values=True)


def test_checksums_of_other_boxes_or_of_nobody_save_nothing(
    saved: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.zeros(8, 4)
    a = by_two_ranks(tmp_path / "a", whole, monkeypatch, rows=6)
    b = by_two_ranks(tmp_path / "b", whole, monkeypatch, rows=2)
    found = compare_checkpoints(a, b, trust_checksums=True, keys=["w"])
    assert (found.nbytes, found.trusted_nbytes) == (128, 0)
    folder = write_shards(tmp_path / "hf", {"w": whole}, shards=1)
    found = compare_checkpoints(folder, folder, trust_checksums=True)
    assert (found.nbytes, found.trusted_nbytes) == (128, 0)


def test_python_values_are_shown(saved: Saver) -> None:
    a, b = saved("a", {"s": "x" * 500, "t": (1, None)}), saved("b", {"s": "y", "t": (2, None)})
    found = {each.fqn: each for each in compare_checkpoints(a, b, values=True).differences}
    assert found["s"].a.endswith("…")
    assert len(found["s"].a) == 60
    assert found["s"].b == "'y'"
    assert {fqn for fqn in found if fqn.startswith("t")} == {"t"}


def test_many_blocks_of_other_sizes_on_both_sides_are_matched(saved: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    state = {f"w{n}": torch.randn(n % 7 + 1, 13) for n in range(40)}
    changed = {name: w.clone() for name, w in state.items()}
    changed["w17"][2, 5] += 1
    a = saved("a", state)
    b = saved("b", dict(reversed(changed.items())))
    monkeypatch.setattr(tensor_streams, "STREAM_BYTES", 100)
    monkeypatch.setattr(_value_differences, "_NUMBERS_AT_ONCE", 3)
    monkeypatch.setattr(_compare_values, "_OBJECT_BYTES", 1)
    calls: list[tuple[int, int]] = []
    found = compare_checkpoints(a, b, values=True, on_progress=lambda done, total: calls.append((done, total)))
    assert aspects(found) == {"w17": Aspect.VALUES}
    total = sum(w.nbytes for w in state.values())
    assert found.nbytes == total
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_a_tally_counts_as_torch_does(a: list[int], b: list[int], cut: int) -> None:
    length = min(len(a), len(b))
    numbers = torch.tensor([0.0, -0.0, math.nan, 1.5])
    x, y = numbers[a[:length]], numbers[b[:length]]
    tally = Tally((length,), 0.0, 0.0)
    for start in range(0, length, cut):
        tally.compare(start, x[start : start + cut], y[start : start + cut])
    differ = (x.view(torch.int32) != y.view(torch.int32)).nonzero().view(-1).tolist()
    found = tally.result()
    if not differ:
        assert found is None
        return
    assert found is not None
    assert (found.differing, found.first) == (len(differ), (differ[0],))
    apart = [abs(float(p - q)) for p, q in zip(x, y, strict=True) if not math.isnan(p - q)]
    of_those = [abs(float(x[n] - y[n])) for n in differ if not math.isnan(x[n] - y[n])]
    assert found.max_abs == (max(of_those) if of_those else None)
    assert (found.max_abs or 0.0) == max([0.0, *apart])


def test_a_missing_side_is_an_error(saved: Saver, tmp_path: Path) -> None:
    a = saved("a", {"w": torch.ones(2)})
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        compare_checkpoints(a, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rtol": -1.0}, "rtol"),
        ({"atol": math.inf}, "atol"),
        ({"keys": "w"}, "list of patterns"),
        ({"keys": ["nothing.*"]}, "nothing is left to compare"),
        ({"prefix_a": "x.", "prefix_b": "y."}, "nothing is left to compare"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], says: str, saved: Saver) -> None:
    a = saved("a", {"w": torch.ones(2)})
    with pytest.raises(InvalidArgumentError, match=says):
        compare_checkpoints(a, a, **arguments)


def test_a_report_is_plain_data(saved: Saver) -> None:
    a = saved("a", {"w": torch.ones(2)})
    found = compare_checkpoints(a, a)
    assert replace(found, seconds=0.0) == Comparison(str(a), str(a), 1, False, 0, 0, 0.0, ())
