"""stored_runs: a folder of runs, or a journal's URL -> the runs that are kept there, opened from the configs they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.config.run_config import parse_config
from pipelines.run.run import Run
from stores.journal.journal import Journal, RunRow
from stores.journal.sqlite import sqlite_url
from stores.store_faults import UnreadableStore


def journals(root: str) -> list[Journal]:
    """The journals of the runs in a folder, or the one at a URL; they are only read."""
    if "://" in root:
        return [Journal(root, is_read_only=True)]
    files = sorted(Path(root).glob("*/journal.db"))
    return [Journal(sqlite_url(path.resolve()), is_read_only=True) for path in files]


def stored_run(name: str, root: str, *, is_read_only: bool = False) -> Run:
    """The run of this name, with the config that its journal keeps.

    Of copies of a run's folder the one that bears its name is the run. Raises ValueError where there is none, naming those there are, where
    only a folder of another name has it, or where it was moved and is not only read; UnreadableStore where its journal is damaged, or one
    that may be its.
    """
    own = Journal(sqlite_url((Path(root) / name / "journal.db").resolve()), is_read_only=True).shown_url
    rows: dict[str, tuple[Journal, RunRow]] = {}
    faults: list[Exception] = []
    for journal in sorted(journals(root), key=lambda journal: journal.shown_url == own):  # its own last, which counts
        try:
            rows |= {row.run_id: (journal, row) for row in journal.runs()}
        except (UnreadableStore, OSError) as error:  # the journals of other runs are no concern of this one's reader
            is_likely = f"/{name}/" in journal.shown_url
            faults.insert(0 if is_likely else len(faults), error)
    if name not in rows:
        _raise_missing(name, root, sorted(rows), faults)
    journal, row = rows[name]
    data = _parsed(row, journal)
    if "://" not in root:
        data["storage"]["root"] = root  # folders move
        if not data["storage"].get("journal") and journal.shown_url != own:
            raise ValueError(
                f"run {name!r} is kept in {journal.shown_url}: give that folder its name back, {root}/{name}"
            )
    place = f"the config of run {name!r} in {journal.shown_url}"
    run = Run(parse_config(data, place), is_read_only=is_read_only)
    if not is_read_only:
        run.check_folder(is_continued=False)
    return run


def _raise_missing(name: str, root: str, known: list[str], faults: list[Exception]) -> None:
    if faults:
        also = f" Other journals below {root} cannot be read either." if len(faults) > 1 else ""
        raise UnreadableStore(f"run {name!r} is in no journal below {root} that can be read. {faults[0]}.{also}")
    raise ValueError(f"no run {name!r} below {root}; there are: {', '.join(known) or 'none'} (or give its RUN.yaml)")


def _parsed(row: RunRow, journal: Journal) -> dict[str, Any]:
    try:
        return json.loads(row.config_json)
    except ValueError as error:
        raise UnreadableStore(
            f"the journal {journal.shown_url} is damaged: the config that it keeps of run {row.run_id!r} is no JSON ({error}); "
            "give its RUN.yaml instead of its name"
        ) from None
