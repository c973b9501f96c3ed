"""The store of responses: what it keeps, for whom, how much, and what happens to a file that is not its own."""
from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from isthmus.core.errors import ConfigError
from isthmus.core.server.responses.store import ResponseStore, Row

COST = 3  # seconds


def row(id: str, size: int = 10, status: str = "completed", previous: str | None = None) -> Row:
    return Row(id, previous, status, b"r" * size, b"[]")


def test_a_file_is_its_owners_alone_and_used_by_one_server(tmp_path):
    path = tmp_path / "responses.db"
    store = ResponseStore(str(path), 10, 10**6)
    store.put("a", row("1"))
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in tmp_path.iterdir())
    with pytest.raises(ConfigError, match="locked; does another server use it"):
        ResponseStore(str(path), 10, 10**6)
    store.close()
    again = ResponseStore(str(path), 10, 10**6)
    assert again.get("a", "1") == row("1") and again.secret == store.secret
    assert (again.count, again.bytes) == (1, row("1").size)
    again.close()


@pytest.mark.parametrize("content", [b"not a database, but long enough to be one" * 40, None], ids=["text", "other"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "mine.db"
    if content is None:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE photos (id)")
        other.close()
    else:
        path.write_bytes(content)
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="mine.db'?: (this is a database of something else|file is not a database)"):
        ResponseStore(str(path), 10, 10**6)
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files")
def test_a_file_that_others_can_read_or_a_link_is_no_place(tmp_path):
    public, link, pipe = tmp_path / "public.db", tmp_path / "link.db", tmp_path / "pipe.db"
    public.touch()
    public.chmod(0o644)
    link.symlink_to(tmp_path / "elsewhere.db")
    os.mkfifo(pipe)
    left = tmp_path / "mine.db-wal"
    left.touch()
    left.chmod(0o640)
    for path in (public, link, pipe, tmp_path / "mine.db", Path("/dev/null")):
        with pytest.raises(ConfigError, match="--response-store .*(others can read it|is a symbolic link)"):
            ResponseStore(str(path), 10, 10**6)
    assert not public.stat().st_size and not (tmp_path / "elsewhere.db").exists()


def test_a_name_with_a_meaning_for_sqlite_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ResponseStore(":memory:", 10, 10**6).close()
    assert (tmp_path / ":memory:").stat().st_size


@pytest.mark.parametrize("path", ["", "no/such/folder/x.db", "a\0b.db", "a" * 5000])
def test_a_path_that_cannot_be_one(tmp_path, path):
    with pytest.raises(ConfigError, match="--response-store"):
        ResponseStore(str(tmp_path / path), 10, 10**6)


def test_what_fails_is_not_counted(tmp_path):
    store = ResponseStore(None, 10, 10**6)
    store.put("a", row("1"))
    with pytest.raises(sqlite3.IntegrityError):
        store.put("b", row("1"))  # ids are nobody's twice
    assert (store.count, store.get("b", "1")) == (1, None) and store.get("a", "1")


def test_one_who_stores_much_does_not_drive_out_others():
    store = ResponseStore(None, 100, 1000)
    store.put("quiet", row("q", 50))
    for i in range(100):
        store.put("loud", row(str(i), 90))
    assert store.get("quiet", "q") and store.bytes <= 1000 and store.get("loud", "99")
    assert not store.put("loud", row("99", 2000)) and store.get("loud", "99") is None, "larger than all there may be"


def test_many_threads_and_the_event_loop():
    store = ResponseStore(None, 50, 10**6)

    def work(owner: str) -> None:
        for i in range(40):
            store.put(owner, row(f"{owner}{i}"))
            assert store.get(owner, f"{owner}{i}") in (row(f"{owner}{i}"), None)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    assert asyncio.run(store.run(lambda: threading.current_thread().name)).startswith("responses")
    for thread in threads:
        thread.join()
    assert store.count == 50
    store.close()


OWNERS, IDS = st.sampled_from("ab"), st.integers(0, 12)


class StoreMachine(RuleBasedStateMachine):
    """Against a list of (owner, row), oldest first."""

    def __init__(self):
        super().__init__()
        self.store, self.model = ResponseStore(None, 6, 120), []

    def _drop(self, owner: str, id: str) -> None:
        self.model = [(o, r) for o, r in self.model if (o, r.id) != (owner, id)]

    @rule(owner=OWNERS, number=IDS, size=st.integers(0, 130))
    def put(self, owner, number, size):
        new = row(f"{owner}{number}", size)
        self._drop(owner, new.id)
        assert self.store.put(owner, new) == (new.size <= 120)
        if new.size > 120:
            return
        while len(self.model) >= 6 or sum(r.size for _, r in self.model) + new.size > 120:
            held = {o: (sum(r.size for p, r in self.model if p == o), sum(p == o for p, _ in self.model))
                    for o, _ in self.model}
            most = max(held.values())
            oldest = [next(i for i, (o, _) in enumerate(self.model) if o == owner)
                      for owner, amount in held.items() if amount == most]
            gone = [i for i in oldest if self.store.get(self.model[i][0], self.model[i][1].id) is None]
            del self.model[gone[0]]
        self.model.append((owner, new))

    @rule(owner=OWNERS, number=IDS)
    def delete(self, owner, number):
        id = f"{owner}{number}"
        assert self.store.delete(owner, id) == any((o, r.id) == (owner, id) for o, r in self.model)
        self._drop(owner, id)

    @rule(owner=OWNERS, number=IDS)
    def ask_for_another_owners(self, owner, number):
        assert self.store.get("ba"["ab".index(owner)], f"{owner}{number}") is None

    @invariant()
    def all_is_there_and_no_more(self):
        assert all(self.store.get(owner, each.id) == each for owner, each in self.model)
        assert (self.store.count, self.store.bytes) == (len(self.model), sum(r.size for _, r in self.model))

    def teardown(self):
        self.store.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
