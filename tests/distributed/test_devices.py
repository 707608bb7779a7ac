"""One job of three ranks on devices that are not the CPU, whose process groups carry their tensors only."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_state_on_devices_is_saved_and_broadcast() -> None:
    environment = {
        "HYPER_PARALLEL_TEST_DEVICE_TYPE": "npu",
        "HPDCP_TEST_GROUP_BACKEND": "npu:fakeccl",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # a real torch_npu would take the fake device's place
    }
    run_ranks(3, Path(__file__).with_name("dcp_devices.py"), timeout=200, environment=environment)
