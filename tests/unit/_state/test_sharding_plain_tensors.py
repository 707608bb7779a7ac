"""Plain tensors, tensors that say which chunk they are, tensors of several shards, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as TorchChunk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpdcp._base.errors import StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp._state.geometry import Box
from hpdcp._state.sharding import LocalChunk, local_shards
from hpdcp._state.ties import tie_key


def marked(shape: tuple[int, ...], offsets: tuple[int, ...], global_shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.zeros(shape)
    setattr(tensor, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata(offsets, shape), global_shape))
    return tensor


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
def test_a_plain_tensor_is_one_chunk_of_everything(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, requires_grad=True)
    shards = local_shards(tensor, key="w")
    assert shards.chunks == (LocalChunk(Box.whole(shape), Box.whole(shape)),)
    view = shards.view(shards.chunks[0])
    view.fill_(7)
    assert tensor.eq(7).all()
    assert (shards.dtype, shards.global_shape) == (torch.float32, shape)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_a_tensor_without_elements_has_a_shape_and_no_chunk(shape: tuple[int, ...]) -> None:
    shards = local_shards(torch.zeros(shape, dtype=torch.int8), key="w")
    assert (shards.chunks, shards.global_shape, shards.dtype) == ((), shape, torch.int8)


def test_a_subclass_without_a_storage_of_its_own_kind_is_a_plain_tensor() -> None:
    class Named(torch.Tensor):
        pass

    shards = local_shards(torch.ones(3).as_subclass(Named), key="w")
    assert type(shards.view(shards.chunks[0])) is torch.Tensor


def test_chunk_info_places_a_plain_tensor_in_a_larger_one() -> None:
    shards = local_shards(marked((2, 3), (4, 0), (6, 3)), key="w")
    assert shards.global_shape == (6, 3)
    assert [chunk.box for chunk in shards.chunks] == [Box((4, 0), (2, 3))]
    assert local_shards(marked((0, 3), (6, 0), (6, 3)), key="w").chunks == ()


@pytest.mark.parametrize(
    ("info", "says"),
    [
        (ChunkInfo(ChunkStorageMetadata((0,), (3,)), (6,)), r"sizes \(3,\), and the tensor has shape \(2,\)"),
        (ChunkInfo(ChunkStorageMetadata((5,), (2,)), (6,)), r"lies outside the global shape \(6,\)"),
        (ChunkInfo(ChunkStorageMetadata((-1,), (2,)), (6,)), r"lies outside the global shape"),
        (ChunkInfo(ChunkStorageMetadata((0,), (2,)), (6, 1)), r"lies outside the global shape"),
        (ChunkInfo(ChunkStorageMetadata((0, 0), (2,)), (6,)), r"of different lengths"),
        ("0:2", r"must be a ChunkInfo; found str"),
    ],
)
def test_a_chunk_info_that_contradicts_its_tensor_is_refused_with_the_key(info: object, says: str) -> None:
    tensor = torch.zeros(2)
    setattr(tensor, CHUNK_INFO, info)
    with pytest.raises(StateDictError, match=rf"^blocks\.0\.w: .*{says}"):
        local_shards(tensor, key="blocks.0.w")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "holds its values in other tensors"),
        (quantised, r"quantised tensors \(torch.qint8\)"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"lazy conjugate view.*resolve_conj\(\)"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, r"lazy negative view.*resolve_neg\(\)"),
        (fake, "FakeTensor holds its values"),
        (lambda: nn.LazyLinear(3).weight, "lazy module"),
    ],
)
def test_tensors_without_plain_memory_are_refused_with_the_key(make: object, says: str) -> None:
    assert callable(make)
    tensor = make()
    with pytest.raises(UnsupportedTypeError, match=rf"^layer\.w: .*{says}"):
        local_shards(tensor, key="layer.w")


@pytest.fixture
def mesh() -> object:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def wrapped(
    mesh: object, shards: list[torch.Tensor], offsets: list[tuple[int, ...]], shape: tuple[int, ...]
) -> DTensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    wrapper = LocalShardsWrapper(shards, offsets)
    return DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)  # type: ignore[arg-type]


def test_a_wrapper_of_several_shards_gives_a_chunk_each_with_the_shards_dtype_and_memory(mesh: object) -> None:
    parts = [torch.full((2, 4), 1.0, dtype=torch.bfloat16), torch.full((2, 2), 2.0, dtype=torch.bfloat16)]
    parts[0].requires_grad_()
    tensor = wrapped(mesh, parts, [(0, 0), (0, 6)], (2, 8))
    shards = local_shards(tensor, key="table")
    assert shards.dtype is torch.bfloat16
    assert [chunk.box for chunk in shards.chunks] == [Box((0, 0), (2, 4)), Box((0, 6), (2, 2))]
    for chunk, part in zip(shards.chunks, parts, strict=True):
        assert shards.view(chunk).data_ptr() == part.data_ptr()
    # Detaching torch's wrapper would strip the shards in it, for everybody.
    assert parts[0].requires_grad
    assert tie_key(tensor) is not None
    assert tie_key(tensor) == tie_key(wrapped(mesh, parts, [(0, 0), (0, 6)], (2, 8)))
    assert tie_key(tensor) != tie_key(wrapped(mesh, parts, [(0, 0), (0, 4)], (2, 8)))


def test_a_wrapper_of_no_shards_holds_no_chunk(mesh: object) -> None:
    tensor = wrapped(mesh, [], [], (2, 8))
    assert local_shards(tensor, key="table").chunks == ()
    assert tie_key(tensor) is None


def test_a_wrapper_whose_shards_overlap_or_leave_the_tensor_is_refused(mesh: object) -> None:
    parts = [torch.zeros(2, 4), torch.zeros(2, 2)]
    with pytest.raises(StateDictError, match=r"^table: .*\(0, 3\) of sizes \(2, 2\) overlaps"):
        local_shards(wrapped(mesh, parts, [(0, 0), (0, 3)], (2, 8)), key="table")
    with pytest.raises(StateDictError, match=r"^table: .*outside the global shape \(2, 8\)"):
        local_shards(wrapped(mesh, parts, [(0, 0), (0, 7)], (2, 8)), key="table")


class TwoRows(torch.Tensor):
    """A class of a third party: rows 1 and 4 of six."""

    def __create_chunk_list__(self) -> list[TorchChunk]:
        return [TorchChunk(torch.Size((row, 0)), torch.Size((1, 3))) for row in (1, 4)]

    def __get_tensor_shard__(self, index: object) -> torch.Tensor:
        row = index.offset[0]  # type: ignore[attr-defined]
        return self.as_subclass(torch.Tensor)[row : row + 1]


def test_another_class_with_torchs_chunk_protocol_is_asked_for_its_chunks() -> None:
    shards = local_shards(torch.arange(18).reshape(6, 3).as_subclass(TwoRows), key="rows")
    assert shards.global_shape == (6, 3)
    assert [shards.view(chunk).tolist() for chunk in shards.chunks] == [[[3, 4, 5]], [[12, 13, 14]]]


def test_tensors_are_tied_when_they_are_the_same_memory_seen_the_same_way() -> None:
    weight = torch.rand(4, 4)
    assert tie_key(weight) == tie_key(weight.detach()) == tie_key(nn.Parameter(weight)) == tie_key(weight.view(4, 4))
    others = [weight, weight.clone(), weight.T, weight[1:], weight[:3], weight.view(16), weight.view(torch.int32)]
    assert len({tie_key(tensor) for tensor in others}) == len(others)


def test_a_conjugate_view_and_another_chunk_of_the_same_memory_are_not_ties() -> None:
    numbers = torch.ones(2, dtype=torch.complex64)
    assert tie_key(numbers) != tie_key(numbers.conj())
    first, second = marked((2,), (0,), (4,)), marked((2,), (2,), (4,))
    second.set_(first)  # type: ignore[call-overload]
    assert tie_key(first) != tie_key(second)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(3, 0), torch.empty(3, device="meta"), fake()])
def test_tensors_without_memory_are_tied_to_nothing(tensor: torch.Tensor) -> None:
    assert tie_key(tensor) is None


def test_the_advice_for_classes_without_memory_does_not_lead_to_shards_under_one_name() -> None:
    class Wraps(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
            raise AssertionError

    wraps = torch.Tensor._make_wrapper_subclass(Wraps, (2,))
    with pytest.raises(UnsupportedTypeError, match=r"^w: .*Wraps.*ChunkInfo"):
        local_shards(wraps, key="w")
