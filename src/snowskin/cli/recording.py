"""Records what a server has served as a trace: while it serves, or from what it remembers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import StartId
from snowskin.terms.serving import ServedPage, ServedRequest
from snowskin.trace.record import TraceRecorder
from snowskin.trace.records import TraceRequest

log = logging.getLogger("snowskin.record")

INTERVAL_S = 0.5
"""A server that is killed loses at most so much of its recording."""


class Recording:
    """Writes each request that a server remembers into a trace, once.

    Args:
        served: gives the remembered requests after a number, page by page.
        start: of the server that is recorded; by default, that of the first answer.
    """

    def __init__(
        self,
        recorder: TraceRecorder,
        served: Callable[[int], ServedPage],
        *,
        start: StartId | None = None,
    ) -> None:
        self._recorder = recorder
        self._served = served
        self._start = start
        self._last = 0
        self.lost = 0
        """Requests that had been forgotten before they could be written."""

    def catch_up(self) -> None:
        """Write all that has ended since.

        Raises:
            OSError: the disk is full or broken; what was written before can be read.
            SnowskinError: another server answers than before; what was written is the first one's.
        """
        while page := self._page():
            self.lost += page[-1].number - self._last - len(page)
            self._last = page[-1].number
            self._recorder.write(
                TraceRequest(r.arrival_s, r.prompt_tokens, r.output_tokens, r.blocks) for r in page
            )

    def _page(self) -> tuple[ServedRequest, ...]:
        page = self._served(self._last)
        if self._start is None:
            self._start = page.start
        if page.start != self._start:
            raise SnowskinError(
                f"the server was started anew while it was recorded: {self._recorder.path} ends "
                f"with request {self._recorder.count}; record what it serves now into another file"
            )
        return page.requests

    async def keep(self) -> None:
        """Write what ends, a few times a second, until cancelled; then the rest.

        Serving is worth more than its recording: a full disk ends this alone.
        """
        recorder = self._recorder
        try:
            try:
                while True:
                    await asyncio.sleep(INTERVAL_S)
                    self.catch_up()
            except asyncio.CancelledError:
                self.catch_up()
                raise
            finally:
                recorder.close()
                log.info("the recording %s ends with request %d", recorder.path, recorder.count)
                if self.lost:
                    log.warning("%d requests went by too fast to be recorded", self.lost)
        except OSError as error:
            log.error("the recording %s ends here: %s", recorder.path, error.strerror)
