import hypothesis.strategies as st
import pytest
from hypothesis import given

from snowskin.store.ssd.record import (
    KEY_LIMIT_BYTES,
    RecordHeader,
    RecordKind,
    SegmentHeader,
    pack_record,
    pack_segment,
    parse_record,
    parse_segment,
)
from snowskin.terms.errors import InvalidInput

U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    RecordHeader,
    kind=st.sampled_from(RecordKind),
    key=st.binary(min_size=1, max_size=KEY_LIMIT_BYTES),
    value_bytes=U64,
    value_checksum=U64,
    depth=st.integers(0, 2**32 - 1),
)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(header=HEADERS, seed=U64, filling=st.binary(max_size=64))
def test_a_record_header_is_read_back_whatever_follows_it(header, seed, filling):
    assert parse_record(pack_record(header, seed) + filling, seed) == header


@given(header=HEADERS, seed=U64, data=st.data())
def test_a_record_header_with_any_flipped_bit_is_none(header, seed, data):
    packed = pack_record(header, seed)
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    assert parse_record(flipped(packed, bit), seed) is None


@given(header=HEADERS, seed=U64, other=U64)
def test_a_record_of_another_place_or_use_of_the_file_is_none(header, seed, other):
    found = parse_record(pack_record(header, seed), other)
    assert found == (header if seed == other else None)


def test_a_page_cut_off_or_empty_is_no_record():
    packed = pack_record(RecordHeader(RecordKind.VALUE, b"key", 5, 6, 7), 1)
    for length in range(len(packed)):
        assert parse_record(packed[:length], 1) is None


@given(header=st.builds(SegmentHeader, epoch=U64, nonce=U64, segment_bytes=U64), data=st.data())
def test_a_segment_header_is_read_back_unless_a_bit_flips(header, data):
    packed = pack_segment(header)
    assert parse_segment(packed) == header
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    assert parse_segment(flipped(packed, bit)) is None


def test_another_version_of_the_layout_is_refused(monkeypatch):
    monkeypatch.setattr("snowskin.store.ssd.record._VERSION", 2)
    packed = pack_segment(SegmentHeader(1, 2, 3))
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="version 2"):
        parse_segment(packed)
