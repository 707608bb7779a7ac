"""One job of ranks per store, for everything that ranks do together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.background import BackgroundRun
from tests.support.proxy import Proxy
from tests.support.ranks import run_ranks
from tests.support.s3 import S3Server
from tests.support.stores import LOADED_ONCE, LOADED_ONCE_BYTES

MATRIX = Path(__file__).with_name("dcp_stores.py")


def test_four_ranks_on_a_folder(tmp_path: Path) -> None:
    environment = {"HPDCP_TEST_STORE_URL": str(tmp_path), "HPDCP_TEST_STORE_BROADCASTS": "0"}
    run_ranks(4, MATRIX, environment=environment, timeout=180)


def test_four_ranks_on_s3_and_what_all_want_is_served_once(s3_server: S3Server, s3_proxy: Proxy) -> None:
    place = s3_server.new_prefix()
    environment = s3_server.environment() | {
        "HPDCP_TEST_STORE_URL": place,
        "HPDCP_TEST_STORE_BROADCASTS": "1",
        "HPDCP_TEST_STORE_METER": s3_proxy.url,
        # As small as S3 takes them: what each rank writes of the larger checkpoint is sent in parts.
        "HPDCP_BACKENDS__S3__PART_BYTES": "5MiB",
        "HPDCP_BACKENDS__S3__PUT_BELOW": "5MiB",
    }
    run_ranks(4, MATRIX, environment=environment, timeout=300)
    served = s3_proxy.served("GetObject", rf"/{LOADED_ONCE}/_rank")
    assert s3_proxy.received("UploadPart", rf"/{LOADED_ONCE}/_rank") >= LOADED_ONCE_BYTES
    # One copy; beside it the heads of the files, by which ranks recognise what they read.
    assert LOADED_ONCE_BYTES <= served < 1.02 * LOADED_ONCE_BYTES
    assert s3_server.open_uploads(place) == []


# 2 minutes on two free cores, the guest's start among them.
@pytest.mark.in_background("tests/services/nfs_run", "--timeout=600", "--", "tests/nfs/matrix.sh", sys.executable,
                           timeout=620)  # fmt: skip
def test_two_ranks_on_two_nfs_clients(background: BackgroundRun) -> None:
    assert " passed" in background.output()
