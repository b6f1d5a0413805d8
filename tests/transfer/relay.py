"""A network path that can be harmed: a TCP relay on an address of its own."""

import contextlib
import socket
import struct
import threading
import time


class Relay:
    """Passes connections on to a Messenger, until told otherwise.

    Args:
        host: the address to listen on, as a NIC's.
        target: address and port of the Messenger.
        harm_after_bytes: of what the Messenger sends, on all connections together; None: never.
        harm: "cut" resets every connection and refuses new ones; "stall" passes nothing more;
            "trickle" passes a byte now and then; "damage" flips a bit in every chunk.
    """

    def __init__(self, host, target, harm=None, harm_after_bytes=None):
        self.harm = harm
        self._harm_after_bytes = harm_after_bytes
        self._target = target
        self._passed_bytes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sockets = []
        self._threads = []
        self._listening = socket.create_server((host, 0))
        self.address = self._listening.getsockname()
        self._start(self._accept)

    @property
    def is_harmed(self):
        return self._harm_after_bytes is not None and self._passed_bytes >= self._harm_after_bytes

    def harm_now(self, harm):
        self.harm, self._harm_after_bytes = harm, 0
        if harm == "cut":
            self._cut()

    def heal(self):
        self._harm_after_bytes = None

    def _start(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.is_harmed and self.harm == "cut":
                    _reset(client)
                    continue
                server = socket.create_connection(self._target, 5)
                with self._lock:
                    self._sockets += [client, server]
                self._start(self._pump, client, server, False)
                self._start(self._pump, server, client, True)

    def _pump(self, source, target, harmed):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                with self._lock:
                    self._passed_bytes += len(chunk) if harmed else 0
                if self.is_harmed:
                    chunk = self._do_harm(bytearray(chunk), target)
                target.sendall(chunk)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _do_harm(self, chunk, target):
        if self.harm == "cut":
            self._cut()
        elif self.harm == "stall":
            while self.is_harmed and not self._ended.wait(0.01):
                pass
        elif self.harm == "trickle":
            for at in range(len(chunk)):
                if not self.is_harmed or self._ended.is_set():
                    return chunk[at:]
                target.sendall(chunk[at : at + 1])
                time.sleep(0.02)
            return b""
        elif self.harm == "damage" and len(chunk) > 1000:
            chunk[777] ^= 1
        return chunk

    def _cut(self):
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            _reset(one)

    def close(self):
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for one in sockets:
            one.close()


def _reset(connection):
    """Close with a reset, as a path that is cut does it where anybody is there to tell."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
