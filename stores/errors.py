"""What a store raises. Every error of a database or of a client library becomes one of these, at one place per store."""

from __future__ import annotations


class StoreError(Exception):
    """The root of everything that a store raises on purpose."""


class InvalidCharge(StoreError, ValueError):
    """A value that a store cannot take: an amount, a bucket, an id, or a combination of them. Nothing was changed."""


class StoreUnavailable(StoreError):
    """The store did not take the call in time, or could not. Whether it was applied is unknown."""

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"the {store} store is unavailable: {why}")
        self.store = store
        self.why = why

    def __reduce__(self) -> tuple[type[StoreUnavailable], tuple[str, str]]:
        return type(self), (self.store, self.why)


class StoreRolledBack(StoreUnavailable):
    """The store came back empty or older than it was. Settles still count; reserves wait for `accept()`."""

    def __init__(self, store: str, tree: str = "") -> None:
        where = f" in tree {tree!r}" if tree else ""
        super().__init__(
            store,
            f"it came back empty or older than it was{where}, so spend may be missing from it; "
            "correct it, then call accept() on the store to admit again",
        )
        self.tree = tree

    def __reduce__(self) -> tuple[type[StoreRolledBack], tuple[str, str]]:
        return type(self), (self.store, self.tree)


class TooLate(StoreError):
    """A settle came after the store had forgotten its id or its bucket: it was not counted. For the audit."""

    def __init__(self, id: str, why: str) -> None:
        super().__init__(f"settle of {id} came too late and was not counted: {why}")
        self.id = id
        self.why = why

    def __reduce__(self) -> tuple[type[TooLate], tuple[str, str]]:
        return type(self), (self.id, self.why)
