import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import BlockKey
from snowskin.transfer.available import available_bytes
from snowskin.transfer.memory import Segment, SegmentLayout, SlotState

LAYOUT = SegmentLayout(slot_count=5, slot_bytes=3 * 1001, part_count=3)


@pytest.fixture
def segment():
    made = Segment.create(LAYOUT)
    yield made
    made.close()


def test_a_reader_sees_what_the_owner_wrote_with_odd_sizes_too(segment):
    reader = Segment.attach(os.dup(segment.fd), LAYOUT)
    generation = segment.begin(4, BlockKey(b"k" * 16))
    segment.data[4] = np.arange(3003, dtype=np.uint16).astype(np.uint8).reshape(3, 1001)
    segment.publish(np.array([4]), 2)
    assert (int(reader.generation[4]), int(reader.parts_ready[4])) == (generation, 2)
    assert bytes(reader.key[4]) == b"k" * 16
    checksum = segment.seal(4)
    assert reader.state[4] == SlotState.SEALED
    assert int(reader.checksum[4]) == checksum == reader.compute_checksum(4)
    assert checksum == xxhash.xxh3_64_intdigest(reader.data[4].tobytes())
    reader.close()


def test_generations_never_repeat_and_tell_use_from_free(segment):
    seen = []
    for _ in range(3):
        seen.append(segment.begin(1, None))
        segment.retire(1)
        seen.append(int(segment.generation[1]))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_slot_is_neither_begun_nor_retired_twice(segment):
    segment.begin(0, None)
    with pytest.raises(AssertionError, match="slot 0 is in use already"):
        segment.begin(0, None)
    segment.retire(0)
    with pytest.raises(AssertionError, match="slot 0 is free already"):
        segment.retire(0)


def test_a_reader_cannot_write(segment):
    reader = Segment.attach(os.dup(segment.fd), LAYOUT)
    with pytest.raises(ValueError, match="read-only"):
        reader.data[0] = 1
    reader.close()


def test_the_kernel_refuses_a_second_writer(segment):
    with pytest.raises(PermissionError):
        Segment(os.dup(segment.fd), LAYOUT, owner=True)


def test_a_view_outlives_the_segment_that_it_was_taken_from():
    segment = Segment.create(LAYOUT)
    segment.data[2] = 7
    view = segment.data[2]
    segment.close()
    segment.close()
    assert view.sum() == 7 * 3003
    assert segment.data.size == 0


def test_a_segment_beyond_the_available_memory_is_refused_with_what_would_fit():
    available = available_bytes()
    assert available is not None
    layout = SegmentLayout(slot_count=2 * available // 4096, slot_bytes=4096, part_count=1)
    with pytest.raises(InvalidInput, match=r"are available; choose fewer blocks \(at most \d+\)"):
        Segment.create(layout)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"slot_count": 0, "slot_bytes": 1, "part_count": 1}, "slot_count is 0"),
        ({"slot_count": 1, "slot_bytes": -1, "part_count": 1}, "slot_bytes is -1"),
        ({"slot_count": 1, "slot_bytes": 10, "part_count": 3}, "slot_bytes 10 does not split"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout, message):
    with pytest.raises(InvalidInput, match=message):
        SegmentLayout(**layout)


def test_a_segment_of_another_size_is_not_attached(segment):
    other = SegmentLayout(slot_count=500, slot_bytes=3003, part_count=3)
    with pytest.raises(InvalidInput, match="its layout says"):
        Segment.attach(os.dup(segment.fd), other)


def test_another_process_reads_the_segment(segment):
    segment.begin(3, None)
    segment.data[3] = 9
    segment.seal(3)
    code = (
        "import sys\n"
        "from snowskin.transfer.memory import Segment, SegmentLayout\n"
        "reader = Segment.attach(int(sys.argv[1]), SegmentLayout(5, 3003, 3))\n"
        "assert reader.compute_checksum(3) == reader.checksum[3]\n"
        "print(int(reader.data[3].sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(segment.fd)],
        pass_fds=(segment.fd,),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) == 9 * 3003
