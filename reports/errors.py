"""The one error of the store: what was found, what was expected, what to do next."""

from __future__ import annotations

import errno
import sqlite3


class StoreError(Exception):
    """`found`, `expected` and `advice` are sentences without a full stop; `path` is the file or folder."""

    def __init__(self, path: object, found: str, expected: str, advice: str) -> None:
        super().__init__(f"{path}: {found}, but expected {expected}: {advice}")
        self.path, self.found, self.expected, self.advice = str(path), found, expected, advice


def from_os_error(path: object, problem: OSError) -> StoreError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(path, "the disk is full", "room for the store", "free some space and go on; nothing reported so far is lost")
    if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreError(path, "not writable", "a writable folder", "change its permissions, or give another --store")
    reason = problem.strerror or str(problem)
    return StoreError(path, reason, "a file system that stores files", "check the path and the disk, or give another --store")


def from_sqlite_error(path: object, problem: sqlite3.Error) -> StoreError:
    text = str(problem)
    if "full" in text:
        return StoreError(path, "the disk is full", "room for the store", "free some space and go on; nothing reported so far is lost")
    if "readonly" in text or "read-only" in text:
        return StoreError(path, "not writable", "a writable store", "change its permissions, or open it with readonly=True")
    if "locked" in text or "busy" in text:
        return StoreError(path, "locked by another process for 30 s", "short transactions", "end the process that holds it, then try again")
    if "unable to open" in text:
        return StoreError(path, "cannot be opened", "a readable database", "check the path and its permissions")
    advice = "move campaign.sqlite away to start fresh state (parts/ and findings/ stay readable), or rescue it with `sqlite3 campaign.sqlite .recover`"
    return StoreError(path, f"damaged ({text})", "a sound SQLite database", advice)
