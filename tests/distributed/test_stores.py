"""What ranks do together on S3, seen from outside, by what is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.proxy import Proxy
from tests.support.rank_group import started
from tests.support.rank_items import run_test
from tests.support.s3 import S3Server
from tests.support.stores import LOADED_ONCE, LOADED_ONCE_BYTES, s3_environment

MATRIX = Path(__file__).with_name("dcp_stores.py")


def test_what_all_ranks_want_is_served_once_by_s3(
    request: pytest.FixtureRequest, s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    place = s3_server.new_prefix()
    environment = s3_environment(s3_server, place) | {"HPDCP_TEST_STORE_METER": s3_proxy.url}
    case = "tests/distributed/dcp_stores.py::test_a_replicated_model_loaded_once_where_requests_are_counted[given]"
    with started(MATRIX, 4, environment, tmp_path / "ranks") as group:
        run_test(request.config, group, case)
    served = s3_proxy.served("GetObject", rf"/{LOADED_ONCE}/_rank")
    # What each rank writes of it is sent in parts.
    assert s3_proxy.received("UploadPart", rf"/{LOADED_ONCE}/_rank") >= LOADED_ONCE_BYTES
    # One copy; beside it the heads of the files, by which ranks recognise what they read.
    assert LOADED_ONCE_BYTES <= served < 1.02 * LOADED_ONCE_BYTES
    assert s3_server.open_uploads(place) == []
