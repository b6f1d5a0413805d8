"""Long work is told of, on a terminal and in a log."""

from __future__ import annotations

import io
import time

from rich.console import Console

from snowskin.engine.telling import telling


def test_a_log_gets_a_line_for_each_piece_of_work_and_more_while_it_lasts() -> None:
    log = io.StringIO()
    with telling(Console(file=log), interval_s=0.05) as say:
        say("Fetching a model with [bold] parts")
        say("Converting it")
        deadline_s = time.monotonic() + 10
        while "so far" not in log.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    told = log.getvalue().splitlines()
    assert told[:2] == ["Fetching a model with [bold] parts", "Converting it"]
    assert told[2].startswith("Converting it: ")
    assert told[2].endswith(" s so far")
    time.sleep(0.1)
    assert log.getvalue().splitlines() == told, "nothing is said after the end"


def test_a_terminal_shows_what_is_done_now() -> None:
    log = io.StringIO()
    with telling(Console(file=log, force_terminal=True, width=80)) as say:
        say("Converting it")
    assert "Converting it" in log.getvalue()
    assert "so far" not in log.getvalue()
