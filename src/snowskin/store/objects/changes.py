"""Changes of replica counts that are under way, and how they ended. Pure."""

from __future__ import annotations

from collections import OrderedDict

from snowskin.store.objects.catalog import Catalog, Output, Send
from snowskin.store.objects.entries import missing_message
from snowskin.store.objects.words import (
    ChangeReplica,
    Copy,
    Drop,
    Refusal,
    TransferState,
    TransferStatus,
)

TRANSFER_S = 60.0
"""How long a change may take, plus the time for its bytes at ``SLOWEST_BYTES_PER_S``."""
SLOWEST_BYTES_PER_S = 5e6
REMEMBERED_LIMIT = 10_000
"""Changes whose status can be asked for; the oldest are forgotten."""


class _Change:
    __slots__ = ("failure", "key", "until_s", "waiting", "wanted")

    def __init__(self, key: str, wanted: int, until_s: float) -> None:
        self.key = key
        self.wanted = wanted
        self.until_s = until_s
        self.waiting: dict[int, str] = {}
        self.failure: str | None = None


class ReplicaChanges:
    """Starts changes on the catalog's nodes and keeps what became of them."""

    def __init__(self, catalog: Catalog, *, prefix: str) -> None:
        self._catalog = catalog
        self._prefix = prefix
        self._changes: OrderedDict[str, _Change] = OrderedDict()
        self._change_of: dict[int, _Change] = {}

    def running(self) -> int:
        """How many are under way."""
        return sum(1 for change in self._changes.values() if change.waiting)

    def start(
        self, ask: ChangeReplica, *, now_s: float
    ) -> tuple[TransferStatus | Refusal, tuple[Output, ...]]:
        """Have nodes copy or drop an object, as far as it goes."""
        catalog = self._catalog
        held = catalog.readable.get(ask.key)
        if held is None:
            return Refusal("KeyMissing", missing_message(ask.key)), ()
        if ask.node is not None and ask.node not in catalog.nodes:
            known = ", ".join(catalog.nodes)
            message = f"no node {ask.node!r} is up; there are: {known}"
            return Refusal("StoreRefused", message), ()
        now = len(held.nodes)
        if ask.node is not None:
            wanted = now if ask.node in held.nodes else now + 1
        else:
            wanted = ask.replicas or now
        until_s = now_s + TRANSFER_S + held.size_bytes / SLOWEST_BYTES_PER_S
        change = _Change(ask.key, wanted, until_s)
        sends: list[Send] = []
        if wanted > now:
            targets = [ask.node] if ask.node else catalog.emptiest(0, avoid=held.nodes)
            targets = targets[: wanted - now]
            if len(targets) < wanted - now:
                change.failure = f"only {len(catalog.nodes)} nodes are up"
            sends = [catalog.copy_command(ask.key, target) for target in targets]
        else:
            fullest = sorted(held.nodes, key=lambda name: -catalog.nodes[name].fill_ratio(0))
            sends = [catalog.drop_replica(ask.key, name) for name in fullest[: now - wanted]]
        for send in sends:
            assert isinstance(send.message, Copy | Drop)
            number = send.message.number
            change.waiting[number] = send.node
            self._change_of[number] = change
        transfer = f"{self._prefix}-{catalog.next_number()}"
        self._changes[transfer] = change
        if len(self._changes) > REMEMBERED_LIMIT:
            _, oldest = self._changes.popitem(last=False)
            for number in oldest.waiting:
                del self._change_of[number]
        return self._status(transfer, change), tuple(sends)

    def status(self, transfer: str) -> TransferStatus | Refusal:
        """How far a change has come."""
        change = self._changes.get(transfer)
        if change is None:
            message = f"no transfer {transfer!r} is known; it is long over, or the master restarted"
            return Refusal("NoSuchTransfer", message)
        return self._status(transfer, change)

    def command_ended(self, number: int, failure: str | None) -> None:
        """A node has carried out its part of a change, or not."""
        change = self._change_of.pop(number, None)
        if change is None:
            return
        name = change.waiting.pop(number)
        if failure is not None:
            change.failure = f"{name}: {failure}"

    def lose(self, name: str) -> None:
        """A node died."""
        for number, change in list(self._change_of.items()):
            if change.waiting[number] == name:
                self.command_ended(number, "the node died")

    def expire(self, *, now_s: float) -> None:
        """Give up changes that take too long."""
        for number, change in list(self._change_of.items()):
            if change.until_s <= now_s:
                self.command_ended(number, "it took too long")

    def _status(self, transfer: str, change: _Change) -> TransferStatus:
        held = self._catalog.readable.get(change.key)
        replicas = 0 if held is None else len(held.nodes)
        failure = change.failure
        if change.waiting:
            state = TransferState.RUNNING
        elif replicas == change.wanted:
            state, failure = TransferState.DONE, None
        else:
            state = TransferState.FAILED
            failure = failure or "replicas came or went meanwhile"
        return TransferStatus(
            transfer=transfer,
            key=change.key,
            state=state,
            replicas=replicas,
            wanted=change.wanted,
            failure=failure,
        )
