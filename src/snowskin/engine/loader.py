"""Moves stored KV from a node's DRAM to its device, layer by layer, beside the computation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from snowskin.engine.kv import BlockSlots, SequenceKv


class LoadGate:
    """How far one load is. The computation waits at it for each layer in turn."""

    def __init__(self, layers: int, device: Any) -> None:
        self._layers = layers
        self._device = device
        self._ready_layers = 0
        self._events: list[Any] = []
        self._changed = threading.Condition()
        self._cancelled = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the KV could not be loaded; what the layers hold is then undefined."""
        return self._failure

    @property
    def finished(self) -> bool:
        """Nothing more is going to happen: all layers are there, or the load failed."""
        return self._ready_layers == self._layers

    @property
    def cancelled(self) -> bool:
        """Nobody wants the KV any more."""
        return self._cancelled

    def cancel(self) -> None:
        """Let the loader leave out what it has not yet copied."""
        self._cancelled = True

    def open_layer(self, event: Any) -> None:
        """The next layer is copied, or is so once ``event`` (of a CUDA stream) has passed."""
        with self._changed:
            self._events.append(event)
            self._ready_layers += 1
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Open all layers: who waits shall go on and look at ``failure``."""
        with self._changed:
            self._failure = reason
            self._ready_layers = self._layers
            self._changed.notify_all()

    def wait_for_layer(self, layer: int) -> None:
        """Return when the layer's KV may be read by what is queued on the device after."""
        if self._ready_layers <= layer:
            with self._changed:
                self._changed.wait_for(lambda: self._ready_layers > layer)
        if layer < len(self._events) and self._events[layer] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._events[layer])


@dataclass(frozen=True, slots=True)
class _Load:
    kv: SequenceKv
    slots: Any
    tokens: int
    gate: LoadGate
    after: Any


class KvLoader:
    """One thread that copies stored KV to the device, first come, first served.

    The engine that owns it bounds what is queued: one load for each admitted sequence.

    Args:
        on_finished: called on the loader's thread after each load.
    """

    def __init__(
        self, blocks: BlockSlots, *, layers: int, device: Any, on_finished: Callable[[], None]
    ) -> None:
        self._blocks = blocks
        self._layers = layers
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_finished = on_finished
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-loader", daemon=True)
        self._thread.start()

    def load(self, kv: SequenceKv, slots: Any, tokens: int) -> LoadGate:
        """Begin to copy the KV of the first ``tokens`` tokens from ``slots``.

        The slots must stay pinned until the gate is finished.
        """
        gate = LoadGate(self._layers, self._device)
        after = None
        if self._stream is not None:
            # The memory may have belonged to work that is still queued on the engine's stream.
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._device))
            kv.data.record_stream(self._stream)
        self._queue.put(_Load(kv, slots, tokens, gate, after))
        return gate

    def close(self) -> None:
        """End the thread after the load at hand."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            try:
                with torch.inference_mode(), torch.cuda.stream(self._stream):
                    self._copy(load)
            except Exception as error:
                load.gate.fail(f"its KV could not be loaded to the device: {error}")
            self._on_finished()

    def _copy(self, load: _Load) -> None:
        if self._stream is not None:
            self._stream.wait_event(load.after)
        for layer in range(self._layers):
            if load.gate.cancelled:
                load.gate.fail("cancelled")
                return
            self._blocks.load(layer, load.slots, load.kv, load.tokens)
            event = None
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
            load.gate.open_layer(event)
