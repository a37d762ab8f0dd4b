"""Whole small files: what writers and readers of one place see."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stores.files import read_file, write_file

pytestmark = pytest.mark.fast


def test_threads_that_write_one_file_leave_the_content_of_one(tmp_path: Path) -> None:
    place, failed, seen = str(tmp_path / "x.json"), [], set()
    contents = (b"a" * 300_000, b"b" * 200_000)

    def write(data: bytes) -> None:
        try:
            for _ in range(50):
                write_file(place, data)
                seen.add(read_file(place))
        except OSError as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failed == [] and seen <= set(contents) and [p.name for p in tmp_path.iterdir()] == ["x.json"]
