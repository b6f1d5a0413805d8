"""A node's owner as a process of its own: run as a program; ``Owner`` is the tests' handle.

It makes a segment and its Messenger, then obeys one-line commands on standard input. The bytes
of a slot are a function of slot and generation, so that a reader can tell right from wrong.
"""

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np

from snowskin.terms.ids import NodeId
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess, Peer
from snowskin.transfer.topology import LocalNic

KEY = b"the cluster key of these tests.."


def content(slot, generation, layout):
    """``[part_count, part_bytes]``: what a slot of this generation holds."""
    rng = np.random.default_rng((slot, generation))
    return rng.integers(0, 256, (layout.part_count, layout.part_bytes), dtype=np.uint8)


class Owner:
    """Starts the program below and talks to it. Everything it started ends with it."""

    def __init__(self, layout, hosts=("127.0.0.1",), within=(), nixl=False):
        """``hosts`` are what its Messenger listens on; ``within`` a command that runs another."""
        self.layout = layout
        self._process = subprocess.Popen(
            [
                *within,
                sys.executable,
                __file__,
                msgspec.json.encode(layout).decode(),
                json.dumps([hosts, nixl]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = json.loads(self._process.stdout.readline())
        self.peer = msgspec.convert(ready["peer"], Peer)
        self.messenger_pid = ready["messenger_pid"]
        self.is_whole = True
        self._unread = 0

    def tell(self, *words):
        """Have a command carried out; its answer."""
        self.start(*words)
        while True:
            answer = json.loads(self._process.stdout.readline())
            self._unread -= 1
            if not self._unread:
                return answer

    def start(self, *words):
        """Have a command carried out without waiting for it."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        self._unread += 1

    def kill(self):
        self.is_whole = False
        self._process.kill()
        self._process.wait()

    def kill_messenger(self):
        self.is_whole = False
        os.kill(self.messenger_pid, signal.SIGKILL)

    def close(self):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


class _Program:
    def __init__(self, layout, hosts, nixl):
        self.layout = layout
        self.segment = Segment.create(layout)
        self.messenger = MessengerProcess.start(
            self.segment,
            node=NodeId("owner"),
            host=hosts[0],
            cluster_key=KEY,
            nics=[LocalNic(host) for host in hosts],
            nixl=nixl,
        )

    def write(self, slot):
        """Take a slot into use and fill it, unpublished; its generation."""
        if self.segment.generation[slot] % 2:
            self.segment.retire(slot)
        generation = self.segment.begin(slot, None)
        self.segment.data[slot] = content(slot, generation, self.layout)
        return generation

    def clear(self):
        """Free every slot."""
        for slot in range(self.layout.slot_count):
            if self.segment.generation[slot] % 2:
                self.segment.retire(slot)

    def fill(self, count):
        """Seal the first ``count`` slots."""
        generations = [self.write(slot) for slot in range(count)]
        for slot in range(count):
            self.segment.seal(slot)
        return generations

    def begin(self, count):
        return [self.write(slot) for slot in range(count)]

    def publish(self, count, parts):
        self.segment.publish(np.arange(count), parts)

    def seal(self, count):
        for slot in range(count):
            self.segment.seal(slot)

    def retire(self, slot):
        self.segment.retire(slot)

    def corrupt(self, slot):
        """Flip a bit behind the table's back, as broken memory would."""
        self.segment.data[slot, -1, -1] ^= 1

    def drip(self, count, pause_s):
        """Publish one part after the other."""
        for parts in range(1, self.layout.part_count + 1):
            time.sleep(pause_s)
            self.segment.publish(np.arange(count), parts)

    def churn(self, duration_s):
        """Rewrite all slots over and over, as fast as possible; how often."""
        until_s = time.monotonic() + duration_s
        rounds = 0
        while time.monotonic() < until_s:
            for slot in range(self.layout.slot_count):
                self.write(slot)
                if (slot + rounds) % 2:
                    self.segment.seal(slot)
                else:
                    self.segment.publish(slot, self.layout.part_count)
            rounds += 1
        return rounds

    def stat(self):
        return msgspec.to_builtins(self.messenger.stat())


def main():
    layout = msgspec.json.decode(sys.argv[1], type=SegmentLayout)
    program = _Program(layout, *json.loads(sys.argv[2]))
    ready = {
        "peer": msgspec.to_builtins(program.messenger.peer),
        "messenger_pid": program.messenger.pid,
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(program, verb)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
