"""`ReplyCache`: what a judge replied, on disk, by everything that it was asked. Processes may share one file."""

import os
import sqlite3
import threading
import time
from pathlib import Path

from agentrl.threads import in_thread

_WAIT = 30.0  # seconds for another process that writes


def default_path() -> Path:
    """`judge.sqlite` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "judge.sqlite"


class ReplyCache:
    """Opened when it is first used. Raises OSError or sqlite3.Error where the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: sqlite3.Connection | None = None

    async def get(self, key: str) -> str | None:
        return await in_thread(self._get, key)

    async def put(self, key: str, reply: str) -> None:
        await in_thread(self._put, key, reply)

    def _get(self, key: str) -> str | None:
        with self._lock:
            row = self._connection().execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _put(self, key: str, reply: str) -> None:
        with self._lock, self._connection() as connection:
            connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=_WAIT, check_same_thread=False)
            _keep_a_journal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            self._open = connection
        return self._open

    def check(self) -> None:
        """Open it now. Raises OSError or sqlite3.Error."""
        with self._lock:
            self._connection()

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None


def _keep_a_journal(connection: sqlite3.Connection) -> None:
    """Another process may be about to do the same, and sqlite does not wait for that by itself."""
    until = time.monotonic() + _WAIT
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
