"""What a folder of Hugging Face weights holds, and everything that can be wrong with one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open

import hpdcp
from hpdcp import StandardLoadPlanner
from hpdcp._base import config
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HpdcpError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from hpdcp._files.huggingface_folder import Weights, read_weights
from hpdcp._format.dtypes import DTYPE_BITS
from hpdcp_backends.local import LocalBackend
from tests.support.backends import Traffic, registered
from tests.support.huggingface import (
    INDEX,
    blanks,
    read_index,
    same,
    shard_name,
    write_index,
    write_raw,
    write_shards,
    write_single,
)

FIRST, SECOND = shard_name(0, 2), shard_name(1, 2)


def weights() -> dict[str, torch.Tensor]:
    return {"embed": torch.randn(8, 4), "layers.0.w": torch.randn(4, 4), "layers.1.w": torch.randn(4, 4)}


def found_in(folder: Path, *, file: str | None = None) -> Weights:
    with LocalBackend(str(folder)) as backend:
        return read_weights(backend, file=file)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_table_is_what_safetensors_itself_reads(tmp_path: Path, shards: int) -> None:
    tensors = {f"layers.{n}.w": torch.randn(n + 1, 3).to(dtype) for n, dtype in enumerate([torch.bfloat16] * 7)}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "größe.重み": torch.arange(5)}
    if shards == 1:
        write_single(tmp_path, tensors)
    else:
        write_shards(tmp_path, tensors, shards=shards)
    table = {tensor.key: tensor for tensor in found_in(tmp_path).tensors}
    assert table.keys() == tensors.keys()
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # no mapping
                stored = table[key]
                part = file.get_slice(key)
                assert (stored.file, stored.dtype_name, list(stored.shape)) == (
                    path.name, part.get_dtype(), part.get_shape(),
                )  # fmt: skip
                data = path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
                assert data == file.get_tensor(key).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_of_safetensors_is_known(tmp_path: Path) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, bits in DTYPE_BITS.items():
        header[name] = {"dtype": name, "shape": [8, 2], "data_offsets": [end, end + 2 * bits]}
        end += 2 * bits
    write_raw(tmp_path / "model.safetensors", header, bytes(end))
    found = {tensor.key: tensor for tensor in found_in(tmp_path).tensors}
    in_torch = {name: (tensor.torch_dtype, tensor.torch_shape) for name, tensor in found.items()}
    assert in_torch["F8_E4M3"] == ("float8_e4m3fn", (8, 2))
    assert in_torch["F4"] == ("float4_e2m1fn_x2", (8, 1))
    # torch has no such dtypes: whoever wants such a tensor is told so, and the others load.
    unknown = {name for name, (dtype, _) in in_torch.items() if not hasattr(torch, dtype)}
    assert unknown <= {"F6_E2M3", "F6_E3M2"}


def test_headers_alone_are_read(tmp_path: Path) -> None:
    big = {f"layers.{n}.a_name_that_makes_headers_long": torch.randn(64, 64) for n in range(3000)}
    write_shards(tmp_path, big, shards=2)
    with registered() as traffic, config.using(backend="counting"):
        _counted(traffic, tmp_path)


def _counted(traffic: Traffic, folder: Path) -> None:
    traffic.reads.clear()
    hpdcp.load({}, checkpoint_id=str(folder))
    # `Traffic` leaves out reads from byte 0: what is left is the rest of each long header, once.
    assert sorted(key for key, _ in traffic.reads) == [FIRST, SECOND]
    for key, range_ in traffic.reads:
        assert range_.stop == 8 + int.from_bytes((folder / key).read_bytes()[:8], "little")


def test_a_single_file_goes_before_an_index_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path, weights(), shards=2)
    write_single(tmp_path, {"other": torch.ones(2)})
    with caplog.at_level(logging.WARNING, "hpdcp"):
        found = found_in(tmp_path)
    assert [tensor.key for tensor in found.tensors] == ["other"]
    assert found.listed_in == "model.safetensors"
    assert INDEX in caplog.text
    assert {tensor.key for tensor in found_in(tmp_path, file=INDEX).tensors} == set(weights())


def test_other_files_beside_are_not_opened(tmp_path: Path) -> None:
    write_shards(tmp_path, weights(), shards=2)
    for name in ("adapter_model.safetensors", "consolidated.safetensors", "optimizer.pt", shard_name(2, 3)):
        (tmp_path / name).write_bytes(b"\xff" * 64)
    (tmp_path / "1_Pooling").mkdir()
    assert {tensor.key for tensor in found_in(tmp_path).tensors} == set(weights())


def test_another_file_is_read_when_it_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, {"lora.a": torch.ones(2)}, name="adapter_model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"file='adapter_model\.safetensors'"):
        hpdcp.load({}, checkpoint_id=tmp_path)
    assert [tensor.key for tensor in found_in(tmp_path, file="adapter_model.safetensors").tensors] == ["lora.a"]
    with pytest.raises(CheckpointNotFoundError, match=r"there is no other\.safetensors"):
        found_in(tmp_path, file="other.safetensors")
    for odd in ("../model.safetensors", "/etc/model.safetensors", "weights.bin", ""):
        with pytest.raises(InvalidArgumentError, match="expected the name of a"):
            found_in(tmp_path, file=odd)


def test_a_snapshot_of_the_hub_s_cache_is_links_and_reads_the_same(tmp_path: Path) -> None:
    write_shards(tmp_path / "blobs", weights(), shards=2)
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert {tensor.key for tensor in found_in(snapshot).tensors} == set(weights())
    targets = blanks(weights())
    expected = {key: tensor for path in sorted(snapshot.glob("*.safetensors")) for key, tensor in _tensors(path)}
    hpdcp.load(targets, checkpoint_id=snapshot)
    assert all(same(expected[key], targets[key]) for key in expected)


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118  # no mapping
            yield key, file.get_tensor(key)


@pytest.mark.parametrize("cache", ["models--meta--tiny/blobs", "weights"])
def test_a_link_may_lead_to_a_blob_of_the_hub_s_cache_and_nowhere_else_outside(tmp_path: Path, cache: str) -> None:
    blob = tmp_path / cache / ("5f" * 32)
    write_single(blob.parent, weights(), name=blob.name)
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob)
    if cache == "weights":
        with pytest.raises(CorruptCheckpointError, match="out of the folder"):
            found_in(folder)
    else:
        assert {tensor.key for tensor in found_in(folder).tensors} == set(weights())


def test_the_index_decides_where_files_hold_more_than_it_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As merged and edited models are published: an older copy of a tensor in another shard, one that nobody names."""
    tensors = weights()
    write_shards(tmp_path, tensors, shards=2)
    index = read_index(tmp_path)
    left = {key: tensors[key] for key, file in index["weight_map"].items() if file == SECOND}
    older = {"embed": torch.full((8, 4), -1.0), "rotary.inv_freq": torch.ones(3)}
    assert index["weight_map"]["embed"] == FIRST
    write_single(tmp_path, left | older, name=SECOND)
    with caplog.at_level(logging.WARNING, "hpdcp"):
        assert {(found.key, found.file) for found in found_in(tmp_path).tensors} == set(index["weight_map"].items())
    assert "'rotary.inv_freq'" in caplog.text
    assert "total_size" not in caplog.text
    targets = blanks(tensors)
    hpdcp.load(targets, checkpoint_id=tmp_path)
    assert all(same(tensors[key], targets[key]) for key in tensors)


def test_an_index_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_shards(tmp_path, weights(), shards=2)
    (tmp_path / INDEX).write_bytes(b"\xef\xbb\xbf" + (tmp_path / INDEX).read_bytes())
    assert {tensor.key for tensor in found_in(tmp_path).tensors} == set(weights())


def test_a_total_size_that_is_wrong_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path, weights(), shards=2)
    index = read_index(tmp_path)
    with caplog.at_level(logging.WARNING, "hpdcp"):
        found_in(tmp_path)
        write_index(tmp_path, {"weight_map": index["weight_map"]})
        found_in(tmp_path)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "hpdcp"):
        write_index(tmp_path, {**index, "metadata": {"total_size": 12}})
        found_in(tmp_path)
    assert "total_size 12" in caplog.text


# What is wrong → (how to make it so of a sound folder of two shards, the error, what the message says).
Damage = tuple[Callable[[Path], None], type[HpdcpError], str]


def _mapped(changes: dict[str, object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = read_index(folder)
        write_index(folder, {**index, "weight_map": {**index["weight_map"], **changes}})

    return change


def _reheaded(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        data = (folder / FIRST).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        write_raw(folder / FIRST, header, data[8 + length :])

    return rewrite


def _cut(count: int) -> Callable[[Path], None]:
    return lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:count])


def _lead_out(name: str) -> Callable[[Path], None]:
    """The file moved out of the folder, with a link in its stead."""

    def move(folder: Path) -> None:
        elsewhere = folder.parent / f"{folder.name}-elsewhere"
        elsewhere.mkdir()
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)

    return move


def _key_given_twice(folder: Path) -> None:
    write_index(folder, f'{{"weight_map": {{"embed": "{FIRST}", "embed": "{SECOND}"}}}}')


def _drop(folder: Path) -> None:
    (folder / INDEX).unlink()


def _only_pickles(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    torch.save({"w": torch.ones(1)}, folder / "pytorch_model.bin")


def _pointer(folder: Path) -> None:
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n")


DAMAGES: dict[str, Damage] = {
    "index: no JSON": (lambda f: write_index(f, "{"), CorruptCheckpointError, INDEX),
    "index: not UTF-8": (lambda f: write_index(f, b"\xff\xfe"), CorruptCheckpointError, INDEX),
    "index: empty": (lambda f: write_index(f, b""), CorruptCheckpointError, INDEX),
    "index: a list": (lambda f: write_index(f, []), CorruptCheckpointError, "not a table"),
    "index: deep": (lambda f: write_index(f, "[" * 100_000), CorruptCheckpointError, INDEX),
    "index: no map": (lambda f: write_index(f, {"metadata": {}}), CorruptCheckpointError, "weight_map"),
    "index: a map that is a list": (
        lambda f: write_index(f, {"weight_map": ["a"]}), CorruptCheckpointError, "weight_map",
    ),
    "index: a key given twice": (_key_given_twice, CorruptCheckpointError, "'embed' is given twice"),
    "index: traversal": (_mapped({"embed": "../model.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: absolute": (_mapped({"embed": "/etc/model.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: backslashes": (_mapped({"embed": "..\\model.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: a sub-folder": (_mapped({"embed": "sub/model.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: a NUL": (_mapped({"embed": "a\0.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: a lone surrogate": (_mapped({"embed": "\ud800.safetensors"}), CorruptCheckpointError, "'embed' lies in"),
    "index: another kind of file": (_mapped({"embed": "optimizer.pt"}), CorruptCheckpointError, "'optimizer.pt'"),
    "index: a number": (_mapped({"embed": 3}), CorruptCheckpointError, "'embed' lies in 3"),
    "shard: missing": (lambda f: (f / FIRST).unlink(), IncompleteCheckpointError, FIRST),
    "shard: empty": (_cut(0), CorruptCheckpointError, FIRST),
    "shard: cut in its header": (_cut(60), CorruptCheckpointError, FIRST),
    "shard: cut in its data": (_cut(-1), CorruptCheckpointError, FIRST),
    "shard: a pointer": (_pointer, IncompleteCheckpointError, "git lfs pull"),
    "shard: a folder": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()), IncompleteCheckpointError, FIRST,
    ),
    "shard: bytes too many": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"x"), CorruptCheckpointError, FIRST,
    ),
    "shard: lacks a key": (_mapped({"nowhere": FIRST}), CorruptCheckpointError, "'nowhere'"),
    "shard: swapped": (lambda f: shutil.copy(f / SECOND, f / FIRST), CorruptCheckpointError, "'embed'"),
    "shard: a link out of the folder": (_lead_out(FIRST), CorruptCheckpointError, "out of the folder"),
    "index: a link out of the folder": (_lead_out(INDEX), CorruptCheckpointError, "out of the folder"),
    "header: beyond the end": (
        _reheaded(lambda h: h["embed"].update(data_offsets=[0, 1 << 40])), CorruptCheckpointError, "'embed'",
    ),
    "header: a wrong length": (_reheaded(lambda h: h["embed"].update(shape=[8, 5])), CorruptCheckpointError, "'embed'"),
    "header: an unknown dtype": (_reheaded(lambda h: h["embed"].update(dtype="F7")), CorruptCheckpointError, "'embed'"),
    "header: an overlap": (
        _reheaded(lambda h: h["layers.1.w"].update(data_offsets=[64, 128])), CorruptCheckpointError, "overlaps",
    ),
    "header: too long": (
        lambda f: (f / FIRST).write_bytes((200_000_000).to_bytes(8, "little") + b"{}"), CorruptCheckpointError, FIRST,
    ),
    "no index": (_drop, IncompleteCheckpointError, INDEX),
    "only pickles": (_only_pickles, UnsupportedFormatError, "pytorch_model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_said_before_any_target_is_touched(tmp_path: Path, damage: str) -> None:
    make, kind, said = DAMAGES[damage]
    write_shards(tmp_path, weights(), shards=2)
    make(tmp_path)
    target = torch.full((8, 4), 7.0)
    with pytest.raises(kind) as caught:
        hpdcp.load({"embed": target}, checkpoint_id=tmp_path)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert bool((target == 7.0).all())


def test_any_byte_of_index_and_headers_may_be_wrong(tmp_path: Path) -> None:
    """Whatever is flipped, cut or doubled there: a load succeeds, or says what is wrong in an error of hpdcp's own."""
    random = Random(7)
    write_shards(tmp_path / "sound", weights(), shards=2)
    sound = {path.name: path.read_bytes() for path in (tmp_path / "sound").iterdir()}
    said: list[str] = []
    for trial in range(300):
        folder = tmp_path / str(trial)
        folder.mkdir()
        spoiled = random.choice(sorted(sound))
        for name, data in sound.items():
            (folder / name).write_bytes(_spoiled(data, random) if name == spoiled else data)
        targets = {key: torch.zeros_like(tensor) for key, tensor in weights().items()}
        try:
            hpdcp.load(targets, checkpoint_id=folder, planner=StandardLoadPlanner(allow_dtype_cast=False))
        except HpdcpError as error:
            said.append(str(error))
    assert all(said)
    assert len(said) > 200


def _spoiled(data: bytes, random: Random) -> bytes:
    end = len(data) if data[:1] == b"{" else 8 + int.from_bytes(data[:8], "little")
    place = random.randrange(end)
    kind = random.randrange(4)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[place : place + 9] + data[place:]
    return data[:place] + random.choice([b"0", b"-", b'"', b"}", b"\0", b"1e9", b"[["]) + data[place + 1 :]
