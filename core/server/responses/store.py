"""Responses that can be asked for again: one SQLite file, bounded in rows and bytes, each row one tenant's.

Source of the settings: SQLite's documentation of its pragmas.
"""
from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from ...errors import ConfigError
from ...files import open_private

T = TypeVar("T")

TEMPORARY, OFF = "temporary", "off"  # values of --response-store that are no paths
APPLICATION, VERSION = 0x49537468, 1  # "ISth" in the header of the file, and the form of its tables
WAL_BYTES = 2**24  # of the log of changes, once it has been taken over
BESIDE = ("-wal", "-journal", "-shm")  # ends of the names of SQLite's own files
TABLES = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE responses (
    n INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL UNIQUE, previous TEXT, status TEXT NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL, events BLOB, size INTEGER NOT NULL);
CREATE INDEX of_owner ON responses (owner, n);
CREATE TABLE secret (value BLOB NOT NULL);
"""


def _check_private(path: str) -> None:
    """Make the file, and refuse it, or what an earlier server left beside it, where others can read it."""
    for suffix in ("", *BESIDE):
        if not suffix or os.path.lexists(path + suffix):
            os.close(open_private(path + suffix, "--response-store", os.O_RDWR))


class Row(NamedTuple):
    """One response. previous: id of the one before it in its conversation. response: the response object as JSON.
    input: its own input items as a JSON list. events: its stream, where that may be asked for again."""

    id: str
    previous: str | None
    status: str
    response: bytes
    input: bytes
    events: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.events or b"")


class ResponseStore:
    """Rows of all tenants. Methods may be called in any thread; each is one transaction. On the event loop: `run`.

    path: the file, created for its owner alone, or one that nobody else can read; None = a nameless one that ends with
    the process. rows, size: how much is kept, size in bytes; beyond that the oldest of the tenant that holds most goes.
    secret: random, as old as the file.
    Raises `ConfigError` for a file that cannot be used.
    """

    def __init__(self, path: str | None, rows: int, size: int):
        self.path, self.rows, self.size = path, rows, size
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._open()
        self._recount()
        self.secret: bytes = self._db.execute("SELECT value FROM secret").fetchone()[0]

    def _open(self) -> None:
        try:
            if self.path is not None:
                _check_private(self.path)
            # A whole path: SQLite has meanings of its own for some names.
            place = os.path.abspath(self.path) if self.path is not None else ""
            self._db = sqlite3.connect(place, timeout=1.0, check_same_thread=False)
            kind, tables = (self._db.execute(query).fetchone()[0] for query in (
                "PRAGMA application_id", "SELECT COUNT(*) FROM sqlite_master"))
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if tables and (kind, version) != (APPLICATION, VERSION):
                raise ConfigError(f"--response-store {self.path}: this is a database of something else, or of another "
                                  "version; name a new file")
            # Alone: what it holds is counted once. Deleted rows are overwritten.
            self._db.executescript(f"PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; "
                                   f"PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON; "
                                   f"PRAGMA journal_size_limit = {WAL_BYTES}; BEGIN EXCLUSIVE; COMMIT;")
            if not tables:
                self._db.executescript(TABLES)
                with self._db:
                    self._db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
        except (OSError, sqlite3.Error) as error:
            busy = "locked" in str(error) and "; does another server use it?"
            raise ConfigError(f"--response-store {self.path}: {getattr(error, 'strerror', None) or error}"
                              f"{busy or ''}") from None

    def _recount(self) -> None:
        held = self._db.execute("SELECT owner, COUNT(*), SUM(size) FROM responses GROUP BY owner").fetchall()
        self._count: Counter[str] = Counter({owner: count for owner, count, _ in held})
        self._bytes: Counter[str] = Counter({owner: size for owner, _, size in held})

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction; what it counted is counted anew when it fails."""
        with self._lock:
            try:
                with self._db:
                    yield
            except BaseException:
                self._recount()
                raise

    @property
    def count(self) -> int:
        """Rows that are kept."""
        return self._count.total()

    @property
    def bytes(self) -> int:
        """Bytes of their contents."""
        return self._bytes.total()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, done in the store's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def put(self, owner: str, row: Row) -> bool:
        """Keep a row, in the place of an earlier one of that id and owner. False: it is larger than the whole store."""
        if row.size > self.size:
            self.delete(owner, row.id)
            return False
        with self._change():
            self._forget(owner, row.id)
            while self.count >= self.rows or self.bytes + row.size > self.size:
                self._evict()
            self._db.execute("INSERT INTO responses (owner, id, previous, status, response, input, events, size) "
                             "VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (owner, *row, row.size))
            self._add(owner, 1, row.size)
        return True

    def get(self, owner: str, id: str) -> Row | None:
        """The row with that id, if it is this owner's."""
        with self._lock:
            found = self._db.execute("SELECT id, previous, status, response, input, events FROM responses "
                                     "WHERE owner = ? AND id = ?", (owner, id)).fetchone()
        return found and Row(*found)

    def delete(self, owner: str, id: str) -> bool:
        """Was there such a row of this owner? There is none now."""
        with self._change():
            return self._forget(owner, id)

    def unfinished(self) -> list[tuple[str, Row]]:
        """Owner and row of all that were being answered: after a start, what an earlier server left."""
        with self._lock:
            found = self._db.execute("SELECT owner, id, previous, status, response, input, events FROM responses "
                                     "WHERE status IN ('queued', 'in_progress')").fetchall()
        return [(owner, Row(*row)) for owner, *row in found]

    def close(self) -> None:
        """Write out what has been handed over, and end."""
        self._pool.shutdown()
        with self._lock:
            self._db.close()

    def _forget(self, owner: str, id: str) -> bool:
        found = self._db.execute("DELETE FROM responses WHERE owner = ? AND id = ? RETURNING size",
                                 (owner, id)).fetchall()
        for (size,) in found:
            self._add(owner, -1, -size)
        return bool(found)

    def _evict(self) -> None:
        owner = max(self._count, key=lambda each: (self._bytes[each], self._count[each]))
        (id,) = self._db.execute("SELECT id FROM responses WHERE owner = ? ORDER BY n LIMIT 1", (owner,)).fetchone()
        self._forget(owner, id)

    def _add(self, owner: str, rows: int, size: int) -> None:
        self._count[owner] += rows
        self._bytes[owner] += size
        if not self._count[owner]:
            del self._count[owner], self._bytes[owner]
