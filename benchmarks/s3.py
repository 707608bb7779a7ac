"""How fast are a save to S3 and a load from it, beside raw clients, torch's own checkpoints and AWS's connector?

    python benchmarks/s3.py [--mib 1024] [--ranks 2] [--repetitions 3] [--contestants obstore,s3fs,torch,hpdcp]
    python benchmarks/s3.py --eighth [--mib 1024] [--contestants hpdcp,hpdcp-botocore]

Server: SeaweedFS on this machine, data in memory, a new one for each contestant and repetition (`make services`). It
works on the same cores as the ranks, so read the ratios, not the rates. State: tensors sharded by rows over all ranks
(bfloat16 weights, float32 moments) and 256 small replicated ones. Every load is compared with what was saved.

obstore, s3fs: each rank stores its bytes, joined beforehand, as one object in parts of `--part-mib`, `--in-flight` at
once, and fetches ranges of that size, as many at once, into the tensors. torch: `FsspecWriter` and `FsspecReader` over
s3fs. s3torchconnector: its DCP writer and reader, where that package is installed. hpdcp, hpdcp-botocore: reading with
the engine that hpdcp chooses, and with botocore's.

`--eighth` counts, in a proxy before the server, what travels when one process loads an eighth of the rows of every
sharded tensor, without the checkpoint's metadata; 1.00 is an eighth of their bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT))

from tests.services import s3 as service
from tests.support.proxy import proxied

ROWS = 2048
LAYER_BYTES = ROWS * ROWS * 10
SMALL = 256
Verb = Callable[[Any], None]


def layers(mib: int) -> int:
    return max(1, (mib << 20) // LAYER_BYTES)


def build(options: argparse.Namespace, ranks: int, rank: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(rank)
    state: dict[str, Any] = {}
    for layer in range(layers(options.mib)):
        for name, dtype in (("w", torch.bfloat16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)):
            local = torch.empty(ROWS // ranks, ROWS, dtype=dtype).uniform_(generator=generator)
            state[f"layers.{layer:03d}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    for number in range(SMALL):
        local = torch.full((1024,), float(number))
        state[f"norm.{number:04d}.weight"] = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor

    return {
        key: DTensor.from_local(torch.zeros_like(t.to_local()), t.device_mesh, t.placements, run_check=False)
        for key, t in state.items()
    }


def views(state: dict[str, Any]) -> list[memoryview]:
    import torch

    return [memoryview(t.to_local().view(torch.uint8).numpy()).cast("B") for t in state.values()]


def scatter(data: list[memoryview], into: list[memoryview]) -> None:
    """Copy consecutive bytes into consecutive buffers."""
    targets = iter(into)
    room = next(targets)
    for piece in data:
        while len(piece):
            if not len(room):
                room = next(targets)
            size = min(len(piece), len(room))
            room[:size] = piece[:size]
            piece, room = piece[size:], room[size:]


def ranges(total: int, part: int) -> list[tuple[int, int]]:
    return [(start, min(start + part, total)) for start in range(0, total, part)]


def with_obstore(options: argparse.Namespace, key: str, joined: bytes) -> tuple[Verb, Verb]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        service.BUCKET,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "300s"},
    )
    part = options.part_mib << 20

    def save(_: Any) -> None:
        obstore.put(store, key, joined, chunk_size=part, max_concurrency=options.in_flight)

    def load(state: Any) -> None:
        def fetch(span: tuple[int, int]) -> memoryview:
            return memoryview(obstore.get_range(store, key, start=span[0], end=span[1]))

        with ThreadPoolExecutor(options.in_flight) as pool:
            scatter(list(pool.map(fetch, ranges(len(joined), part))), views(state))

    return save, load


def with_s3fs(options: argparse.Namespace, key: str, joined: bytes) -> tuple[Verb, Verb]:
    import s3fs

    store = s3fs.S3FileSystem()
    path = f"{service.BUCKET}/{key}"
    part = options.part_mib << 20

    def save(_: Any) -> None:
        store.pipe_file(path, joined, chunksize=part, max_concurrency=options.in_flight)

    def load(state: Any) -> None:
        spans = ranges(len(joined), part)
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        found = store.cat_ranges([path] * len(spans), starts, ends, on_error="raise", batch_size=options.in_flight)
        scatter([memoryview(piece) for piece in found], views(state))

    return save, load


def with_torch(url: str) -> tuple[Verb, Verb]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save(state: Any) -> None:
        dcp.save(state, storage_writer=FsspecWriter(url))

    def load(state: Any) -> None:
        dcp.load(state, storage_reader=FsspecReader(url))

    return save, load


def with_connector(url: str) -> tuple[Verb, Verb]:
    import torch.distributed.checkpoint as dcp
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)

    def save(state: Any) -> None:
        dcp.save(state, storage_writer=S3StorageWriter(service.REGION, url, s3client_config=config))

    def load(state: Any) -> None:
        dcp.load(state, storage_reader=S3StorageReader(service.REGION, url, s3client_config=config))

    return save, load


@contextmanager
def configured(contestant: str) -> Iterator[None]:
    """hpdcp with the engine that the contestant's name says."""
    import hpdcp

    _, dash, engine = contestant.partition("-")
    with hpdcp.config.using(backends={"s3": {"engine": engine}}) if dash else contextlib.nullcontext():
        yield


def with_hpdcp(contestant: str, url: str) -> tuple[Verb, Verb]:
    import hpdcp

    def save(state: Any) -> None:
        with configured(contestant):
            hpdcp.save(state, checkpoint_id=url)

    def load(state: Any) -> None:
        with configured(contestant):
            hpdcp.load(state, checkpoint_id=url)

    return save, load


def verbs(options: argparse.Namespace, state: dict[str, Any], rank: int) -> tuple[Verb, Verb]:
    """(save, load) of the contestant."""
    url = f"s3://{service.BUCKET}/{options.prefix}"
    if options.contestant == "torch":
        return with_torch(url)
    if options.contestant == "s3torchconnector":
        return with_connector(url)
    if options.contestant.startswith("hpdcp"):
        return with_hpdcp(options.contestant, url)
    joined = b"".join(views(state))
    raw = {"obstore": with_obstore, "s3fs": with_s3fs}[options.contestant]
    return raw(options, f"{options.prefix}/rank{rank}", joined)


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = build(options, ranks, rank)
    save, load = verbs(options, state, rank)
    figures: dict[str, float] = {}

    def timed(name: str, action: Callable[[], None]) -> None:
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        figures[name] = time.perf_counter() - start

    timed("save", lambda: save(state))
    if not options.eighth:
        for name in ("load", "load, again"):
            target = emptied(state)
            timed(name, lambda target=target: load(target))  # type: ignore[misc]
            same = all(torch.equal(state[key].to_local(), target[key].to_local()) for key in state)
            assert same, "what was loaded is not what was saved"
    if rank == 0:
        print("RESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def load_an_eighth(options: argparse.Namespace) -> None:
    """In a process of its own: the rows from 3/8 to 4/8 of every sharded tensor."""
    import torch

    import hpdcp

    state: dict[str, Any] = {}
    rows = ROWS // 8
    for layer in range(layers(options.mib)):
        for name, dtype in (("w", torch.bfloat16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)):
            part = torch.zeros(rows, ROWS, dtype=dtype)
            chunk = hpdcp.ChunkStorageMetadata((3 * rows, 0), (rows, ROWS))
            setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(chunk, (ROWS, ROWS)))
            state[f"layers.{layer:03d}.{name}"] = part
    with configured(options.contestant):
        hpdcp.load(state, checkpoint_id=f"s3://{service.BUCKET}/{options.prefix}", no_dist=True)
    assert all(bool(part.any()) for part in state.values()), "a part was not filled"
    print('RESULT {"loaded": 1}', flush=True)


def passed_on(options: argparse.Namespace, contestant: str, prefix: str) -> list[str]:
    sizes = {"--mib": options.mib, "--part-mib": options.part_mib, "--in-flight": options.in_flight}
    pairs = {**sizes, "--contestant": contestant, "--prefix": prefix}
    return [word for name, value in pairs.items() for word in (name, str(value))]


def compare_speed(options: argparse.Namespace) -> None:
    contestants = {
        name: harness.torchrun(options.ranks, __file__, *passed_on(options, name, uuid.uuid4().hex))
        for name in options.contestants.split(",")
    }
    with contextlib.ExitStack() as running:

        def new_server(_: str) -> None:
            running.close()
            server = running.enter_context(service.running(memory=True))
            os.environ.update(service.settings(server.address))

        found = harness.compare(contestants, repetitions=options.repetitions, before_each=new_server)
    amount = float(layers(options.mib) * LAYER_BYTES + options.ranks * SMALL * 4096)
    harness.print_table(found, base=next(iter(contestants)), rates=dict.fromkeys(found, amount))


def count_an_eighth(options: argparse.Namespace) -> None:
    print("| engine | MiB fetched | requests | of an eighth |")
    print("|---|---|---|---|")
    wanted = layers(options.mib) * LAYER_BYTES / 8
    for name in options.contestants.split(","):
        with service.running(memory=True) as server, proxied(server.address.url) as proxy:
            os.environ.update(service.settings(server.address))
            words = passed_on(options, name, uuid.uuid4().hex)
            harness.run(harness.torchrun(options.ranks, __file__, "--eighth", *words))
            os.environ["AWS_ENDPOINT_URL"] = proxy.url
            harness.run([sys.executable, __file__, "--load-an-eighth", *words])
            fetched = proxy.find("GetObject", r"/[^.][^/]*$")
            served = sum(request.served for request in fetched)
            print(f"| {name} | {served / 2**20:.1f} | {len(fetched)} | {served / wanted:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--contestants", help="the first is what the others are compared with")
    parser.add_argument("--part-mib", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8, help="parts at once in each rank of a raw client")
    parser.add_argument("--eighth", action="store_true", help="count bytes instead of seconds")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    parser.add_argument("--load-an-eighth", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load_an_eighth:
        load_an_eighth(options)
    elif options.contestant:
        worker(options)
    elif options.eighth:
        options.contestants = options.contestants or "hpdcp,hpdcp-botocore"
        count_an_eighth(options)
    else:
        options.contestants = options.contestants or "obstore,s3fs,torch,hpdcp,hpdcp-botocore"
        compare_speed(options)


if __name__ == "__main__":
    main()
