"""Storage readers written for earlier versions go on working."""

from __future__ import annotations

import warnings

import pytest

from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.storage import StorageReader


class Reader(StorageReader):
    def load_metadata(self) -> Metadata:
        raise NotImplementedError

    def configure_reader(self, metadata: Metadata, context: PlannerContext) -> None:
        raise NotImplementedError

    def execute_read(self, plan: LoadPlan, targets: ReadTargets) -> None:
        raise NotImplementedError


class EarlierReader(Reader):
    reads_at_once = 3


def test_one_read_at_a_time_unless_the_reader_says_otherwise() -> None:
    assert Reader().max_concurrent_reads == 1


def test_the_earlier_name_of_concurrent_reads_works_and_warns_once() -> None:
    with pytest.warns(FutureWarning, match="EarlierReader.reads_at_once is an earlier name of max_concurrent_reads"):
        assert EarlierReader().max_concurrent_reads == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EarlierReader().max_concurrent_reads == 3
