"""Computes items, several at once, and writes what they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from snowskin.reproduce.drawing import draw
from snowskin.reproduce.items import ITEMS, Item
from snowskin.reproduce.report import Report, report_json
from snowskin.reproduce.workloads import Scale
from snowskin.terms.errors import InvalidInput


def run_items(
    items: Sequence[Item], *, folder: Path, scale: Scale, jobs: int
) -> Iterator[tuple[Item, Report]]:
    """Compute each item and write ``NAME.json`` and ``NAME.png``; gives each as it is done.

    Raises:
        InvalidInput: ``jobs`` is no count, or the folder cannot be written.
    """
    if jobs < 1:
        raise InvalidInput(f"jobs must be at least 1, not {jobs}", parameter="jobs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write {folder}: {error.strerror}", parameter="out") from error
    ordered = sorted(items, key=lambda item: -item.work_s)
    if jobs == 1 or len(ordered) < 2:
        for item in ordered:
            yield item, run_item(item.name, folder, scale)
        return
    with ProcessPoolExecutor(min(jobs, len(ordered))) as pool:
        futures = {pool.submit(run_item, item.name, folder, scale): item for item in ordered}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_item(name: str, folder: Path, scale: Scale) -> Report:
    """Compute one item and write its two files."""
    item = ITEMS[name]
    result = item.compute(scale)
    (folder / f"{name}.json").write_bytes(report_json(result.report))
    draw(result, folder / f"{name}.png", title=item.title)
    return result.report
