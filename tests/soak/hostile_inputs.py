"""Feed damaged and hostile files to hpdcp: each is read, or refused by an error of hpdcp, in bounded memory and time.

    python -m tests.soak.hostile_inputs --inputs 20000 --seed 7
    python -m tests.soak.hostile_inputs --seed 7 --only 4211        that input alone, with its traceback

Inputs are checkpoints whose files were mutated, metadata with forged columns, Hugging Face folders, typed JSON, paths
and pickles that were made up. An audit hook watches: no file outside the input's folder is opened for writing, no
module that an input names is imported, no process is started. What is found is printed with the number of its input.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpdcp
from hpdcp import config
from hpdcp._format.container import TensorEntry, build_header, pack_columns, unpack_columns
from hpdcp._state.objects import decode
from hpdcp._state.paths import decode_path
from hpdcp.errors import HpdcpError
from hpdcp.inspect import inspect_checkpoint
from hpdcp.verify import verify_checkpoint

BAIT = "hostile_bait"
"""A module that inputs name, and nothing imports."""
SECONDS = 20.0
"""That one input may take, on a machine that is busy with other things."""
NBYTES = 1 << 30
"""Of address space that the inputs of one process may take beyond what it began with."""
PER_PROCESS = 250
_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "ctypes.dlopen"}

Chance = random.Random
LONG = {"$range": [0, 10**12, 1]}


class FindingError(Exception):
    """Something that must not happen."""


class Watch:
    """The audit hook: hooks cannot be removed, so it is told which folder is meant."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _STARTS or (event == "import" and str(arguments[0]).startswith(BAIT)):
            self.seen.append(f"{event} {arguments[:1]!r}")
        elif event == "open" and isinstance(arguments[0], str) and self._writes(*arguments[1:]):
            inside = os.path.abspath(arguments[0]).startswith((self.folder, "/dev/"))
            self.seen += [] if inside else [f"opened {arguments[0]!r} for writing"]

    @staticmethod
    def _writes(mode: object, flags: object) -> bool:
        how = int(flags) if isinstance(flags, int) else 0
        return bool(how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or (isinstance(mode, str) and set(mode) & set("wax+"))


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}}, "param_groups": [{}]},
        "step": 3,
        "values": {"array": np.arange(5), "set": {1, 2}, "tuple": (1, "x"), "bytes": b"\x00" * 400},
    }


def make_templates(folder: Path) -> int:
    """Sound folders, of every kind that is read; 0, as a status."""
    warnings.simplefilter("ignore")
    hpdcp.save(state(), checkpoint_id=folder / "together")
    hpdcp.save(state(), checkpoint_id=folder / "alone", no_dist=True)
    with contextlib.suppress(HpdcpError), config.using(layout="zarr", layouts={"zarr": {"compressor": "zstd"}}):
        hpdcp.save(state(), checkpoint_id=folder / "zarr")
    from hpdcp.offline_transform import save_state_dict_as_huggingface_format

    tensors = {f"model.{number}.w": torch.full((8, 8), float(number)) for number in range(6)}
    save_state_dict_as_huggingface_format(folder / "weights", tensors, max_shard_size=600)
    return 0


def run_folder(folder: Path) -> None:
    """Everything that reads a folder; each may refuse it by an error of hpdcp."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3, 4))])
    for question in (
        lambda: hpdcp.load(state(), checkpoint_id=folder),
        lambda: hpdcp.load({f"model.{n}.w": torch.zeros(8, 8) for n in range(6)}, checkpoint_id=folder),
        lambda: hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=folder),
        lambda: inspect_checkpoint(folder),
        lambda: verify_checkpoint(folder),
    ):
        with contextlib.suppress(HpdcpError):
            question()


def mutated(data: bytes, chance: Chance) -> bytes:
    """The bytes with a few of them changed, cut off, repeated or replaced by what means something elsewhere."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(found) + 1)
        stop = min(len(found), at + chance.choice([1, 4, 8, 64]))
        match chance.randrange(7):
            case 0:
                found[at:stop] = chance.randbytes(stop - at)
            case 1:
                del found[at:stop]
            case 2:
                found[at:at] = found[at:stop]
            case 3:
                del found[at:]
            case 4:
                found[at:stop] = chance.choice([b"\xff", b"\x00", b"\x7f"]) * (stop - at)
            case 5:
                found[at:stop] = chance.choice(WORDS)
            case 6 if stop > at:
                found[at] ^= 1 << chance.randrange(8)
    return bytes(found)


WORDS = [
    b'"$deque":[{"$range":[0,1000000000000,1]},null]', b"99999999999999999999", b"-1", b'"../../x"', b"null", b"[]",
    b"1e400", b'{"$tuple":[]}', b"\x80\x02", b"PK\x03\x04", b'"' + BAIT.encode() + b':X"', b"9223372036854775807",
]  # fmt: skip


def mutate_folder(template: Path, folder: Path, chance: Chance) -> None:
    shutil.copytree(template, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in chance.sample(files, k=min(len(files), chance.choice([1, 1, 1, 2]))):
        path.write_bytes(mutated(path.read_bytes(), chance))


def forge_metadata(template: Path, folder: Path, chance: Chance) -> None:
    """Sound as a container, with columns and settings that contradict one another."""
    shutil.copytree(template, folder)
    for path in folder.glob("*.metadata"):
        columns, settings = unpack_columns(path.read_bytes(), where="template")
        forged = {name: values.copy() for name, values in columns.items()}
        for name in chance.sample(sorted(forged), k=chance.choice([1, 1, 2, 4])):
            values = forged[name]
            if len(values) and values.dtype.kind in "iu":
                info = np.iinfo(values.dtype)
                extreme = [info.min, info.max, 0, 1, info.max // 2, 1 << 33, int(values[0]) + 1]
                wanted = chance.choice([each for each in extreme if info.min <= each <= info.max])
                values.reshape(-1)[chance.randrange(values.size)] = wanted
            if chance.random() < 0.1:
                forged[name] = values[: len(values) // 2] if values.ndim else values
            elif chance.random() < 0.05:
                del forged[name]
        told = dict(settings)
        if chance.random() < 0.5:
            key = chance.choice([*told, "origin", "listed_in", "layout", "zarr.level", "zarr.compressor", "rank"])
            told[key] = chance.choice(["", "-1", "9" * 5000, "zarr", "huggingface", "none", BAIT, "\ud800", "1.0", "x"])
        with contextlib.suppress(HpdcpError, UnicodeError):
            path.write_bytes(pack_columns(forged, told))


KINDS = [
    "int", "float", "str", "set", "frozenset", "tuple", "dict", "OrderedDict", "defaultdict", "Counter", "deque",
    "bytes", "bytearray", "BytesIO", "complex", "range", "slice", "datetime", "date", "time", "timedelta", "timezone",
    "PosixPath", "UUID", "Decimal", "Fraction", "numpy.str", "numpy.bytes", "torch.Size", "torch.dtype", "torch.device",
    "array", "scalar", "tensor", "enum", "namedtuple", "unknown",
]  # fmt: skip


def made_up(chance: Chance, depth: int = 0) -> Any:
    """A tree of typed JSON: kinds that exist, over parts that may belong to others."""
    if depth > 4 or chance.random() < 0.3:
        return chance.choice([
            None, True, 0, -1, 1, 7, 2**62, -(2**63), 10**18, 0.5, 1e308, "", "x", "<f8", "|u1", "C", "float32", "list",
            "1e999999999", "0x" + "f" * 50, "7ff8000000000000", "AAAA", f"{BAIT}:X", "collections:Counter", "\ud800",
            LONG, {"$int": ["0x" + "f" * 5000]}, {"$bytes": ["AAAA"]}, {"$Decimal": ["1e999999999"]},
        ])  # fmt: skip
    match chance.randrange(4):
        case 0:
            return [made_up(chance, depth + 1) for _ in range(chance.randrange(5))]
        case 1:
            return {chance.choice("abc"): made_up(chance, depth + 1) for _ in range(chance.randrange(3))}
        case _:
            parts: Any = [made_up(chance, depth + 1) for _ in range(chance.choice([0, 1, 1, 2, 3, 4, 5, 9]))]
            return {f"${chance.choice(KINDS)}": parts if chance.random() < 0.95 else made_up(chance, depth + 1)}


def run_typed(chance: Chance) -> None:
    text = json.dumps(made_up(chance))
    data = text.encode()
    if chance.random() < 0.3:
        with contextlib.suppress(HpdcpError):
            entries = [TensorEntry(str(at), "U8", (8,), 8) for at in range(3)]
            data = build_header(entries, {"hpdcp.object": text}, align=256)[0] + bytes(24)
    if chance.random() < 0.3:
        data = mutated(data, chance)
    with contextlib.suppress(HpdcpError):
        decode(data, key="k")
    with contextlib.suppress(HpdcpError):
        decode_path(text if chance.random() < 0.5 else json.dumps([json.loads(text)]))


_OPCODES = (
    b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"(", b"t", b"\x85", b"\x86", b"\x87", b"R", b"\x81", b"b", b"Q", b"a",
    b"e", b"s", b"u", b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"K\x05", b"\x8a\x06" + bytes(5) + b"\x01",
    b"G" + bytes(8), b"X\x01\x00\x00\x00x", b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00cpu",
    b"U\x02ab",
    b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n", b"c_codecs\nencode\n", b"ccollections\nOrderedDict\n",
    b"ctorch\nFloatStorage\n", b"ctorch.storage\nUntypedStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_qtensor\n", b"ctorch\nFloatTensor\n", b"ctorch\nSize\n", b"cbuiltins\nset\n",
    b"c" + BAIT.encode() + b"\nX\n", b"cos\nsystem\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"\x8d", b"0", b"2",
)  # fmt: skip


def run_pickle(chance: Chance, templates: list[bytes]) -> None:
    if chance.random() < 0.4:
        data = mutated(chance.choice(templates), chance)
    else:
        import zipfile

        pickled = b"\x80\x02" + b"".join(chance.choices(_OPCODES, k=chance.randrange(1, 40))) + b"."
        out = io.BytesIO()
        packing = chance.choice([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(out, "w", packing) as file:
            file.writestr("archive/data.pkl", pickled)
            file.writestr("archive/data/0", bytes(chance.choice([0, 4, 64])))
            file.writestr("archive/version", b"3\n")
        data = out.getvalue()
    with contextlib.suppress(HpdcpError):
        decode(data, key="k")


def run_input(folder: Path, chance: Chance, templates: list[Path], pickles: list[bytes]) -> str:
    """One input; the name of its kind."""
    kind = chance.choice(["mutated folder", "forged metadata", "typed JSON", "typed JSON", "pickle", "pickle"])
    if kind == "typed JSON":
        run_typed(chance)
    elif kind == "pickle":
        run_pickle(chance, pickles)
    elif kind == "mutated folder":
        mutate_folder(chance.choice(templates), folder / "input", chance)
        run_folder(folder / "input")
    else:
        forge_metadata(chance.choice([at for at in templates if at.name != "weights"]), folder / "input", chance)
        run_folder(folder / "input")
    return kind


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """A block that may take so much time; the system refuses it memory beyond the limit of its process."""

    def ring(number: int, frame: object) -> None:
        raise FindingError(f"it takes more than {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def why_it_is_a_finding(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def run_inputs(numbers: range, seed: int, templates: list[Path], watch: Watch, *, verbose: bool) -> int:
    """The inputs of one process; findings are lines of its output, and their number is returned."""
    found = 0
    pickles = []
    for value in (torch.eye(3).to_sparse(), [torch.eye(2).to_sparse(), bytearray(b"abc"), {1, 2}]):
        out = io.BytesIO()
        torch.save(value, out)
        pickles.append(out.getvalue())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + NBYTES, resource.RLIM_INFINITY))
    kinds: Counter[str] = Counter()
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="hpdcp-hostile-"))
        watch.folder = str(folder)
        watch.seen.clear()
        try:
            with limits():
                kinds[run_input(folder, random.Random(f"{seed} {number}"), templates, pickles)] += 1
        except BaseException as error:  # noqa: BLE001  # whatever it is that is not hpdcp's
            found += 1
            print(f"FOUND input {number}: {why_it_is_a_finding(error)}", flush=True)
            if verbose:
                traceback.print_exc()
        finally:
            watch.folder = None
            shutil.rmtree(folder, ignore_errors=True)
        found += len(watch.seen)
        for seen in watch.seen:
            print(f"FOUND input {number}: {seen}", flush=True)
    return found


def in_child(work: Callable[[], int]) -> int:
    """What it returns, 100 at most; a signal's number as its negative where one ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 101
        try:
            status = min(work(), 100)
        except BaseException:  # noqa: BLE001  # of a child nobody else would hear
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=int)
    chosen = parser.parse_args()
    os.environ["HPDCP_CONFIG"] = ""
    torch.set_num_threads(1)
    numbers = range(chosen.inputs) if chosen.only is None else range(chosen.only, chosen.only + 1)
    print(f"seed {chosen.seed}", flush=True)
    watch = Watch()
    began = time.monotonic()
    findings = 0
    with tempfile.TemporaryDirectory(prefix="hpdcp-templates-") as at:
        made = in_child(lambda: make_templates(Path(at)))
        templates = sorted(Path(at).iterdir())
        assert made == 0 and len(templates) >= 3, templates
        warnings.simplefilter("ignore")
        for start in range(numbers.start, numbers.stop, PER_PROCESS):
            batch = range(start, min(start + PER_PROCESS, numbers.stop))
            status = in_child(
                lambda batch=batch: run_inputs(batch, chosen.seed, templates, watch, verbose=chosen.only is not None)
            )
            findings += status if status >= 0 else 1
            if not 0 <= status <= 100:
                print(f"FOUND inputs {batch.start} to {batch.stop - 1}: the process ended with status {status}")
    seconds = time.monotonic() - began
    print(f"done: {len(numbers)} inputs, seed {chosen.seed}, {seconds:.0f} s, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
