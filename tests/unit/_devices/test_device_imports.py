"""Nothing but the device modules names a kind of device or talks to torch about streams, events and page-locking."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"cuda", "npu", "xpu", "mps", "hpu", "mtia", "privateuseone"}
MODULES = {f"torch.{kind}" for kind in KINDS} | {"torch_npu", "torch.accelerator"}
NAMES = {"get_device_module", "pin_memory", "is_pinned", "non_blocking", "Stream", "record_stream", "cudart"}
ALLOWED = ROOT / "hpdcp/_devices"
SOURCES = sorted([*(ROOT / "hpdcp").rglob("*.py"), *(ROOT / "backends/hpdcp_backends").rglob("*.py")])


def uses(code: str) -> Iterator[str]:
    """What in the code only the device modules may use."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if _names_a_device(name.name))
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name for name in full if _names_a_device(name))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in MODULES or node.attr in NAMES or (node.attr in KINDS and isinstance(node.value, ast.Name)):
                yield name
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            yield node.arg
        elif isinstance(node, ast.Call):
            # `getattr(torch, "cuda")`, `import_module("torch_npu")`, `torch.device("cuda")`, `tensor.to("npu:0")`
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text for text in texts if text.partition(":")[0] in KINDS or text in MODULES)
            if isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
                yield ast.unparse(node.func)


def _names_a_device(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


@pytest.mark.parametrize(
    "code",
    [
        "import torch_npu",
        "import torch.cuda.amp as amp",
        "from torch import cuda",
        "from torch.npu import Stream",
        "import torch\ntorch.cuda.synchronize()",
        "getattr(torch, 'npu')",
        "importlib.import_module('torch_npu')",
        "tensor.cuda()",
        "tensor.to('cuda:0')",
        "torch.device('npu')",
        "torch.empty(3, pin_memory=True)",
        "tensor.copy_(other, non_blocking=True)",
        "tensor.pin_memory()",
        "torch.Stream(kind)",
        "torch.get_device_module(kind)",
        "torch.accelerator.synchronize()",
    ],
)
def test_each_way_to_a_device_is_found(code: str) -> None:
    assert list(uses(code))


@pytest.mark.parametrize("code", ["tensor.device.type == 'cpu'", "'''torch.cuda'''", "tensor.to('cpu')", "npu = 1"])
def test_what_is_no_way_to_a_device_is_not_found(code: str) -> None:
    assert not list(uses(code))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_device_modules_touch_devices(path: Path) -> None:
    if path.parent != ALLOWED:
        assert list(uses(path.read_text())) == []


def test_the_device_modules_are_there_and_do() -> None:
    found = {path.name for path in ALLOWED.glob("*.py") if list(uses(path.read_text()))}
    assert found == {"device.py", "buffers.py", "streams.py", "downloads.py", "uploads.py", "staging.py"}
