"""A mark is read as it was written, and takes no memory."""

from __future__ import annotations

import pytest

from lowtide.aot.mark import Mark


@pytest.mark.parametrize("mark", [Mark(None, 0), Mark(None, 3), Mark(0, 0), Mark(0, 5), Mark(7, 2)])
def test_a_mark_is_read_as_it_was_written(mark: Mark) -> None:
    written = mark.write()
    assert Mark.read(written) == mark
    assert written.untyped_storage().nbytes() == 0
