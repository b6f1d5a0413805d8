"""A client that puts and gets without rest, and tells what was wrong. It is killed in mid-work."""

import random
import sys
import time
import zlib

from snowskin.store import KeyMissing, StoreClient, StoreError

from .running import content

HANG_S = 30.0


def value_of(key):
    """What the key's object must hold; its size too follows from the key."""
    seed = zlib.crc32(key.encode())
    return content((1, 700, 4096, 70_000, 300_000, 1_500_000)[seed % 6] + seed % 97, seed)


def main(address, transport, seed):
    rng = random.Random(int(seed))
    client = StoreClient(address, transport=transport, timeout_s=5.0)
    recent = []
    while True:
        begin_s = time.monotonic()
        key = f"restless/{rng.randrange(400)}"
        try:
            if rng.random() < 0.4 or not recent:
                client.put(key, value_of(key), replicas=rng.choice((1, 2)))
                recent = [*recent[-50:], key]
            elif rng.random() < 0.1:
                client.remove(key)
            elif client.get(rng.choice(recent) if rng.random() < 0.8 else key) is None:
                print("NONE", flush=True)
            else:
                asked = rng.choice(recent)
                if bytes(client.get(asked)) != value_of(asked):
                    print("WRONG", asked, flush=True)
        except KeyMissing:
            pass
        except StoreError as error:
            print("refused", type(error).__name__, error, flush=True)
        except Exception as error:
            print("UNTYPED", repr(error), flush=True)
        if time.monotonic() - begin_s > HANG_S:
            print("HANG", key, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
