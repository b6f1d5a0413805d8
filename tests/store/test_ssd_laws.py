"""Laws of the whole tier on real files, against a plain dictionary, over closings and crashes."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from snowskin.store.ssd import SsdTier, Value, WriteOutcome
from tests.store.ssd_tiers import KIB, small_config, value, write

KEYS = st.integers(0, 12).map(lambda number: b"key %d" % number)
SIZES = st.one_of(st.integers(0, 60 * KIB), st.sampled_from([0, 4096, 8192, 110 * KIB]))
CAPACITY_BYTES = 6 * 128 * KIB


class TierLaws(RuleBasedStateMachine):
    @initialize(eviction=st.sampled_from(["lru", "lfu", "length-aware"]), direct=st.booleans())
    def start(self, eviction, direct):
        self.config = small_config(
            capacity_bytes=CAPACITY_BYTES,
            segment_bytes=128 * KIB,
            write_queue_bytes=256 * KIB,
            batch_bytes=64 * KIB,
            eviction=eviction,
            direct_io=direct,
        )
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.folder = self.root / "0"
        self.tier = SsdTier(self.folder, self.config)
        self.right = {}  # Key -> the bytes that it has, unless it was evicted.
        self.known = set()
        self.count = 0
        self.evicted_count = 0

    @rule(key=KEYS, size=SIZES)
    def put(self, key, size):
        self.count += 1
        data = value(self.count, size)
        held = self.tier.read(key)
        outcome = write(self.tier, key, data)
        if outcome is WriteOutcome.QUEUED:
            self.right[key] = data
            return
        same = isinstance(held, Value) and held.data.tobytes() == data
        assert outcome is (WriteOutcome.HELD if same else WriteOutcome.CONFLICT)

    @rule(key=KEYS)
    def remove(self, key):
        found = self.tier.remove(key)
        assert key in self.right or not found
        self.right.pop(key, None)
        assert not self.tier.contains(key)

    @rule(key=KEYS)
    def read(self, key):
        answer = self.tier.read(key)
        if isinstance(answer, Value):
            assert answer.data.tobytes() == self.right[key]

    @rule()
    def report(self):
        self.tier.flush()
        stored, dropped = self.tier.drain_changes()
        held = {item.key for item in self.tier.held()}
        assert set(stored) == held - self.known
        assert set(dropped) == self.known - held
        self.known = held

    @rule()
    def close_and_open(self):
        self.tier.flush()
        held = set(self.tier.held())
        self.tier.close()
        self.tier = SsdTier(self.folder, self.config)
        self.check_same(held)

    @rule()
    def crash_and_open(self):
        """What a kill leaves: the files as they are, without what closing adds."""
        self.tier.flush()
        held = set(self.tier.held())
        copy = self.root / str(int(self.folder.name) + 1)
        shutil.copytree(self.folder, copy)
        self.tier.close()
        shutil.rmtree(self.folder)
        self.folder = copy
        self.tier = SsdTier(self.folder, self.config)
        self.check_same(held)

    def check_same(self, held):
        self.evicted_count = 0
        assert set(self.tier.held()) == held
        self.known = {item.key for item in held}
        assert self.tier.stat().lost_at_start_total == 0
        for item in held:
            assert self.tier.read(item.key).data.tobytes() == self.right[item.key]

    @invariant()
    def nothing_is_lost_that_was_not_evicted(self):
        if not hasattr(self, "tier"):
            return
        self.tier.flush()
        stat = self.tier.stat()
        held = {item.key for item in self.tier.held()}
        assert held <= set(self.right)
        evicted_count = stat.evicted_total - self.evicted_count
        assert len(self.right) - len(held) == evicted_count
        self.evicted_count = stat.evicted_total
        for key in set(self.right) - held:
            assert not self.tier.contains(key)
            del self.right[key]
        sizes = [path.stat().st_size for path in self.folder.glob("segment-*")]
        assert sum(sizes) == stat.segment_count * stat.segment_bytes <= CAPACITY_BYTES
        assert stat.corrupt_total == stat.disk_error_total == stat.failed_write_total == 0

    def teardown(self):
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.root)


TestTierLaws = TierLaws.TestCase
TestTierLaws.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
