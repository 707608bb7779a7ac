"""However a script ends, and however it was started: the save in flight lands, and nobody runs the script again."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import hpdcp
from tests.support.ranks import ROOT

BESIDE = """
from pathlib import Path

import hpdcp

class BesidePlanner(hpdcp.StandardSavePlanner):
    def build_global_plan(self, plans):
        print("planned beside the script", flush=True)
        return super().build_global_plan(plans)
"""


def run(folder: Path, code: str, *arguments: str, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """The script in a folder of its own, as one starts a script: by name, or from standard input."""
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text(BESIDE)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, "-W", "error", "-" if stdin else str(script), *arguments],
        input=script.read_text() if stdin else "",
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}",
            "OMP_NUM_THREADS": "1",
            "HPDCP_CONFIG": "",
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def check(folder: Path) -> None:
    target = {"w": torch.zeros(1000)}
    hpdcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["w"], torch.arange(1000.0))


def test_a_script_without_a_guard_that_returns_waits_for_its_checkpoint(tmp_path: Path) -> None:
    """With a planner of a module beside it; and the worker imports that module, not the script."""
    done = run(
        tmp_path / "job",
        """
        import sys, torch, hpdcp
        from beside import BesidePlanner
        print("the script runs", flush=True)
        state = {"w": torch.arange(1000.0)}
        hpdcp.async_save(
            state, checkpoint_id=sys.argv[1], planner=BesidePlanner(), callback=lambda: print("landed", flush=True)
        )
        state["w"].zero_()
        print("the script ends", flush=True)
        """,
        str(tmp_path / "ckpt"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "the script ends", "planned beside the script", "landed"]
    assert done.stderr == ""
    check(tmp_path / "ckpt")


def test_a_script_from_standard_input_that_calls_exit_waits_too(tmp_path: Path) -> None:
    """With classes of its own: one that the worker need not have arrives, one that it needs is refused by name."""
    done = run(
        tmp_path / "job",
        """
        import sys, torch, hpdcp
        from hpdcp._base.errors import InvalidArgumentError

        class Here(hpdcp.StandardSavePlanner):
            def build_global_plan(self, plans):
                return super().build_global_plan(plans)

        class OwnPart(hpdcp.StandardSavePlanner):
            def build_local_plan(self):
                print("planned here", flush=True)
                return super().build_local_plan()

        @hpdcp.DataCopier.register(bytearray)
        def copy_bytes(value):
            print("copied here", flush=True)
            return bytes(value)

        state = {"w": torch.arange(1000.0), "data": bytearray(b"abc")}
        try:
            hpdcp.async_save(state, checkpoint_id=sys.argv[1], planner=Here())
        except InvalidArgumentError as error:
            print(error, flush=True)
        hpdcp.async_save(state, checkpoint_id=sys.argv[1], planner=OwnPart())
        state["w"].zero_()
        sys.exit(3)
        """,
        str(tmp_path / "ckpt"),
        stdin=True,
    )
    assert done.returncode == 3, done.stderr
    refused, *rest = done.stdout.splitlines()
    assert "Here defined in the script itself" in refused
    assert "module of its own" in refused
    assert rest == ["copied here", "planned here"]
    check(tmp_path / "ckpt")


def test_a_script_that_fails_waits_and_says_which_save_failed_that_nobody_asked_about(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(
        tmp_path / "job",
        """
        import sys, torch, hpdcp
        hpdcp.async_save({"w": torch.arange(1000.0)}, checkpoint_id=sys.argv[1]).get_result()
        hpdcp.async_save({"w": torch.zeros(1000)}, checkpoint_id=sys.argv[2])
        raise RuntimeError("the loss is nan")
        """,
        str(tmp_path / "ckpt"),
        str(tmp_path / "file" / "ckpt"),
    )
    assert done.returncode == 1
    assert "the loss is nan" in done.stderr
    assert f"the save to {tmp_path / 'file' / 'ckpt'} failed and nobody asked" in done.stderr
    check(tmp_path / "ckpt")


def test_a_script_whose_peers_are_gone_ends_after_the_deadline_and_publishes_nothing(tmp_path: Path) -> None:
    done = run(
        tmp_path / "job",
        """
        import os, sys, time, torch, torch.distributed as dist, hpdcp
        from torch.testing._internal.distributed.fake_pg import FakeStore
        # One of two ranks; the other never comes.
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        hpdcp.start_async_worker()
        with hpdcp.config.using(exit_timeout=1.0):
            hpdcp.async_save({"w": torch.arange(1000.0)}, checkpoint_id=sys.argv[1])
        """,
        str(tmp_path / "ckpt"),
    )
    assert done.returncode == 0, done.stderr
    assert "did not complete within 1 s of the script's end; it is given up" in done.stderr
    assert not (tmp_path / "ckpt" / ".metadata").exists()
    assert not list((tmp_path / "ckpt").glob("_rank*"))
