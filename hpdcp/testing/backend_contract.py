"""What every backend must do, as tests: the class to inherit."""

from __future__ import annotations

from functools import partial

from hpdcp._base.backend import Backend, ByteRange
from hpdcp.testing._backend.base import BackendFixtures, put, run_together
from hpdcp.testing._backend.deleting import DeletingContract
from hpdcp.testing._backend.names import NamesContract
from hpdcp.testing._backend.publishing import PublishingContract
from hpdcp.testing._backend.reading import ReadingContract
from hpdcp.testing._backend.writing import WritingContract


class BackendContract(
    NamesContract, WritingContract, PublishingContract, ReadingContract, DeletingContract, BackendFixtures
):
    """Inherit, override the fixture `backend` and `reopen`, and name the class `Test...`.

    `backend` gives an instance on a root that is prepared, empty and the test's own. `reopen` gives a second instance
    on the same root, as another process would open it.
    """

    def test_its_declared_facts_make_sense(self, backend: Backend) -> None:
        assert backend.name
        assert backend.url
        assert backend.coalesce_gap >= 0
        assert backend.max_read_bytes > 0
        assert backend.max_concurrent_reads > 0
        assert backend.write_window is None or backend.write_window > 0

    def test_preparing_twice_changes_nothing(self, backend: Backend) -> None:
        put(backend, "key", b"here")
        backend.prepare()
        assert backend.read("key") == b"here"

    def test_closing_twice_is_fine(self, backend: Backend) -> None:
        put(backend, "key", b"bytes")
        backend.read("key")
        backend.close()
        backend.close()

    def test_one_instance_serves_several_threads(self, backend: Backend) -> None:
        def work(number: int) -> None:
            data = bytes([number]) * (10_000 + number)
            for turn in range(5):
                key = f"{number}-{turn}"
                put(backend, key, data)
                target = bytearray(len(data))
                backend.read_ranges(key, [ByteRange(0, len(data))], [memoryview(target)])
                assert target == data
                assert backend.read(key) == data

        run_together([partial(work, number) for number in range(4)])
        assert len(backend.list_keys()) == 20
