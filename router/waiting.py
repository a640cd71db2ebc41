"""Waiting: a line for each bucket that refuses, in which tasks stand until budget comes back or their time is over.

Nothing here awaits, asks a store or reads a clock: what the router learns of buckets goes in, and who may try comes out. A line
belongs to a cap and a scope, so it outlives the windows of its buckets. Each waiter stands *active* in one line, that of the
bucket which keeps it longest, and goes on to the next one that has no room for it when that one has; so it never holds up a
task whose own buckets have room. Amounts are in the caps' units, instants (`now`) in milliseconds since the epoch, and times
(`time`) in seconds of the router's monotonic clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, TypeAlias

from router.charges import Amounts, Metered, Slot, Slots
from router.classes import TaskClass
from stores import Balance, Bucket, safe_name

__all__ = ["Line", "LineKey", "Lines", "Need", "Waiter", "Wake", "drain_of", "needs_of"]

LineKey: TypeAlias = tuple[str, str, tuple[str, ...]]
"""The tree, the cap and the values of its scope."""

Wake = Literal["try", "expired", "policy", "closed"]
"""What a waiter is told: to reserve now, that its time is over, that the policy changed, that the router was closed."""

LOOK_EVERY = 1.0
"""Seconds between two looks at the balances of all lines: when budget that another process gave back is seen at the latest."""

JITTER = 1.0
"""Seconds over which processes spread their first try after a window has turned."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a task needs of one bucket of a hard cap."""

    key: LineKey
    slot: Slot
    amount: int


def needs_of(slots: Slots, metered: Metered, amounts: Amounts) -> tuple[Need, ...]:
    """Return what an option needs of the buckets that may refuse it."""
    return tuple(
        Need(_key_of(slot), slot, amounts.of(slot.cap.unit)) for slot in slots if not slot.cap.soft and slot.counts(metered)
    )


def _key_of(slot: Slot) -> LineKey:
    return slot.bucket.tree, slot.cap.name, tuple(slot.scope.values())


def drain_of(bucket: Bucket) -> Bucket:
    """Return the bucket that counts what came out of the line of `bucket`, in the same window."""
    return Bucket(f"drain|{bucket.name}", tree=bucket.tree, starts=bucket.starts, ends=bucket.ends)


class Waiter:
    """One task that waits for one option. It ends by `Lines.leave`, whatever happened."""

    __slots__ = (
        "age",
        "deadline",
        "future",
        "group",
        "line",
        "needs",
        "since",
        "size",
        "state",
        "stood",
        "task_class",
        "tries",
    )

    def __init__(
        self, task_class: TaskClass, needs: Sequence[Need], *, since: float, deadline: float | None, size: int
    ) -> None:
        self.task_class = task_class
        self.needs = tuple(needs)
        self.since = since
        self.deadline = deadline
        self.size = size
        self.age = -1
        self.state: Literal["new", "standing", "trying", "gone"] = "new"
        self.stood: dict[LineKey, Line] = {}
        """The lines it has stood in: what it takes of their buckets is paced."""
        self.tries: tuple[tuple[Line, int], ...] = ()
        self.line: Line | None = None
        self.group: _Group | None = None
        self.future: asyncio.Future[Wake]

    def rank(self, time: float) -> tuple[float, int]:
        """Return its place: priority, raised by one for each time that its class ages, then age."""
        priority, ages_after = self.task_class.priority, self.task_class.ages_after
        return priority - (0 if ages_after is None else (time - self.since) // ages_after), self.age


class _Group:
    """The waiters of one line that have the same class and the same place where they stop being admitted, by age."""

    __slots__ = ("heap", "stops", "trying")

    def __init__(self, stops: int) -> None:
        self.stops = stops
        self.heap: list[tuple[int, Waiter]] = []
        self.trying: set[Waiter] = set()

    def head(self) -> Waiter | None:
        """Return the oldest that stands here."""
        while self.heap:
            waiter = self.heap[0][1]
            if waiter.state == "standing" and waiter.group is self:
                return waiter
            heappop(self.heap)
        return None

    def first(self) -> Waiter | None:
        """Return the oldest that stands or tries."""
        head = self.head()
        return min((*self.trying, *((head,) if head is not None else ())), key=lambda waiter: waiter.age, default=None)

    def tidy(self) -> None:
        """Let go of those that left from the middle."""
        kept = {age: waiter for age, waiter in self.heap if waiter.state == "standing" and waiter.group is self}
        self.heap = list(kept.items())
        heapify(self.heap)


class Line:
    """What this process knows of one bucket, and who waits for it."""

    def __init__(self, key: LineKey, slot: Slot) -> None:
        self.key = key
        self.groups: dict[tuple[str, int], _Group] = {}
        self.members = 0  # who waits for it, here or first in another line
        self.standing = 0
        self.left = 0  # from the middle, since the last tidying
        self.opens = 0  # not looked at before this instant
        self.look: int | None = None  # when to look at it next
        self.pending = 0  # what those that try will hold
        self.turn(slot)

    def turn(self, slot: Slot) -> None:
        """Begin with a bucket of which nothing is known."""
        self.slot = slot
        self.bucket = slot.bucket
        self.drain = drain_of(slot.bucket)
        self.held = self.spent = self.drained = 0

    def room_for(self, need: Need) -> bool:
        """Say whether the bucket would admit it, as far as this process knows."""
        return not need.amount or self.held + self.spent + self.pending + need.amount <= need.slot.line

    def pace(self, stops: int, now: int) -> int | None:
        """Return what may have come out of the line by now; None where a bucket without a window sets no pace.

        What the cap sustains is what is left ÷ the time left. Kept up from the start of the window that is, at each moment, the
        share of the window that is over, of all that others did not use. The first one may come out at once.
        """
        starts, ends = self.bucket.starts, self.bucket.ends
        if starts is None or ends is None:
            return None
        others = self.held + self.spent - self.drained
        return max(1, max(0, stops - others) * (min(now, ends) - starts) // (ends - starts))

    def in_pace(self, need: Need, now: int) -> bool:
        """Say whether the pace lets one more out: by at most one task is it ever ahead."""
        pace = self.pace(need.slot.line, now)
        return pace is None or not need.amount or self.drained + self.pending < pace

    def in_pace_at(self, stops: int) -> int | None:
        """Return when the pace lets the next one out, or None where it will not in this window."""
        starts, ends = self.bucket.starts, self.bucket.ends
        ours = max(0, stops - (self.held + self.spent - self.drained))
        ahead = self.drained + self.pending + 1
        if starts is None or ends is None or ahead > ours:
            return None
        return starts + -(-ahead * (ends - starts) // ours)

    def expected(self, stops: int, wanted: int, now: int) -> float | None:
        """Return in how many seconds what is wanted will have come out, at the pace that the cap sustains; None if unknown."""
        starts, ends = self.bucket.starts, self.bucket.ends
        if starts is None or ends is None or not stops:
            return None
        left, over = max(0, stops - self.held - self.spent), max(1, ends - now)
        if wanted <= left:
            return over * wanted / left / 1000 if left else 0.0
        # The rest comes out of the windows that follow, each at its own even pace.
        return (over + (wanted - left) * (ends - starts) / stops) / 1000

    def tidy(self) -> None:
        """Let go of those that left from the middle, when they are many."""
        if self.left > 100 and self.left > self.standing:
            self.left = 0
            for group in self.groups.values():
                group.tidy()

    def find(self, waiter: Waiter, stops: int) -> _Group:
        """Return the group that a waiter belongs to here."""
        key = waiter.task_class.name, stops
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(stops)
        return group


class Lines:
    """All lines of one router. `jitter` returns a number from 0 to 1."""

    def __init__(self, *, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._lines: dict[LineKey, Line] = {}
        self._buckets: dict[str, Line] = {}
        self._ages = itertools.count()
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._looks: list[tuple[int, int, Line]] = []
        self._numbers = itertools.count()
        self.waiters: dict[int, Waiter] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self.waiters)

    def blocks(self, needs: Iterable[Need], priority: int, time: float) -> Line | None:
        """Return a line in which somebody stands ahead of a newcomer that needs these: it may not overtake."""
        if not self._lines:
            return None
        for need in needs:
            line = self._lines.get(need.key)
            if line is None:
                continue
            for group in line.groups.values():
                first = group.first() if group.stops >= need.slot.line else None
                if first is not None and first.rank(time)[0] <= priority:
                    return line
        return None

    def enter(self, waiter: Waiter, refused: Mapping[LineKey, Balance], now: int, time: float) -> None:
        """Take a place in the line of every bucket that refused, and keep it until the waiter leaves."""
        freed = [line for line, _ in waiter.tries]
        self._stop(waiter)
        if waiter.age < 0:
            waiter.age = next(self._ages)
            self.waiters[waiter.age] = waiter
            self.size += waiter.size
            if waiter.deadline is not None:
                heappush(self._deadlines, (waiter.deadline, waiter.age, waiter))
        waiter.future = asyncio.get_running_loop().create_future()
        needs = [need for need in waiter.needs if need.key in refused]
        for need in needs:
            self._learn(self._join(waiter, need, now), refused[need.key])
        # The one that opens last: what is spent opens when its window turns, what is held may come back at any time.
        last = max(needs, key=lambda need: self._opens(need, waiter.stood[need.key]))
        self._stand(waiter, last, now)
        if waiter.deadline is not None and waiter.deadline <= time:
            self._stop(waiter)
            _tell(waiter, "expired")
        self._dispatch((waiter.stood[last.key], *freed), now, time)

    def leave(self, waiter: Waiter, now: int, time: float) -> None:
        """Give up the place, at once; what it would have held is free for others."""
        if waiter.state == "gone":
            return
        touched = [line for line, _ in waiter.tries]
        if waiter.line is not None:
            touched.append(waiter.line)
        self._stop(waiter)
        waiter.state = "gone"
        if self.waiters.pop(waiter.age, None) is not None:
            self.size -= waiter.size
            self._tidy()
        for stood in waiter.stood.values():
            stood.members -= 1
            if not stood.members:
                self._close(stood)
        for found in touched:
            found.tidy()
        self._dispatch([found for found in touched if found.members], now, time)

    def saw(self, balances: Iterable[Balance], now: int, time: float) -> None:
        """Learn how buckets stand, and let those try that fit now."""
        if not self._lines:
            return
        changed = {}
        for balance in balances:
            line = self._buckets.get(balance.bucket.key)
            if line is not None:
                self._learn(line, balance)
                changed[line.key] = line
        self._dispatch(changed.values(), now, time)

    def advance(self, now: int, time: float) -> None:
        """Tell those whose time is over, and look at every line whose window has turned or whose pace lets one out."""
        while self._deadlines and self._deadlines[0][0] <= time:
            waiter = heappop(self._deadlines)[2]
            if waiter.state == "standing":
                self._stop(waiter)
                _tell(waiter, "expired")
        while self._looks and self._looks[0][0] <= now:
            instant, _, line = heappop(self._looks)
            if line.look != instant or not line.members:
                continue
            line.look = None
            if line.bucket.ends is not None and line.bucket.ends <= now:
                self._turn(line, now)
            self._look_at(line, line.bucket.ends)
            self._dispatch((line,), now, time)

    def due(self, now: int, time: float) -> float | None:
        """Return when `advance` is to be called next, by the monotonic clock; None where nothing is due by itself."""
        while self._deadlines and self._deadlines[0][2].state == "gone":
            heappop(self._deadlines)
        while self._looks and self._looks[0][2].look != self._looks[0][0]:
            heappop(self._looks)
        moments = [entry[0] for entry in self._deadlines[:1]]
        moments += (time + (entry[0] - now) / 1000 for entry in self._looks[:1])
        return max(time, min(moments)) if moments else None

    def tell(self, waiter: Waiter, word: Wake) -> None:
        """Wake one who stands, whatever the buckets say; it keeps its place meanwhile, and nobody overtakes it."""
        if waiter.state == "standing":
            _tell(waiter, word)

    def pause(self, waiter: Waiter, now: int) -> None:
        """Let nobody try for a while who stands where a waiter stood: whoever tries would fail for another reason than room."""
        for line in waiter.stood.values():
            line.opens = max(line.opens, now + round(1000 * LOOK_EVERY))
            self._look_at(line, line.opens)

    def tell_all(self, word: Wake) -> None:
        """Wake everybody who stands, whatever the buckets say."""
        for waiter in tuple(self.waiters.values()):
            self.tell(waiter, word)

    def buckets(self, most: int) -> list[tuple[Bucket, ...]]:
        """Return the buckets to look at, at most so many at a time."""
        found = [bucket for line in self._lines.values() for bucket in (line.bucket, line.drain)]
        return [tuple(found[at : at + most]) for at in range(0, len(found), most)]

    def paces(self, waiter: Waiter, now: int) -> dict[LineKey, int]:
        """Return, per line that a waiter stood in, what may have come out of it by now."""
        found = {}
        for need in waiter.needs:
            line = waiter.stood.get(need.key)
            pace = None if line is None else line.pace(need.slot.line, now)
            if pace is not None:
                found[need.key] = pace
        return found

    def lines(self) -> tuple[Line, ...]:
        """Return every line in which somebody waits."""
        return tuple(self._lines.values())

    def line(self, key: LineKey) -> Line | None:
        """Return one line, if somebody waits in it."""
        return self._lines.get(key)

    # Inside.

    def _join(self, waiter: Waiter, need: Need, now: int) -> Line:
        """Return the line of a bucket, as one that the waiter has stood in."""
        line = self._lines.get(need.key)
        if line is None:
            line = self._lines[need.key] = Line(need.key, need.slot)
            self._name(line)
            self._look_at(line, line.bucket.ends)
        elif line.bucket.key != need.slot.bucket.key and (
            line.slot.cap.period != need.slot.cap.period or (line.bucket.ends or 0) < (need.slot.bucket.ends or 0)
        ):
            self._forget_names(line)
            line.turn(need.slot)
            self._name(line)
            line.opens, line.look = 0, None
            self._look_at(line, line.bucket.ends)
        if need.key not in waiter.stood:
            waiter.stood[need.key] = line
            line.members += 1
        return line

    def _look_at(self, line: Line, instant: int | None) -> None:
        """See that a line is looked at at an instant, if it is not before."""
        if instant is not None and (line.look is None or instant < line.look):
            line.look = instant
            heappush(self._looks, (instant, next(self._numbers), line))
            if len(self._looks) > 100 and len(self._looks) > 4 * len(self._lines):
                self._looks = [entry for entry in self._looks if entry[2].look == entry[0]]
                heapify(self._looks)

    def _tidy(self) -> None:
        """Let go of the deadlines of those that left, when they are many or all."""
        if not self.waiters:
            self._deadlines.clear()
            self._looks.clear()
        elif len(self._deadlines) > 100 and len(self._deadlines) > 2 * len(self.waiters):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state != "gone"]
            heapify(self._deadlines)

    def _name(self, line: Line) -> None:
        self._buckets[line.bucket.key] = self._buckets[line.drain.key] = line

    def _forget_names(self, line: Line) -> None:
        self._buckets.pop(line.bucket.key, None)
        self._buckets.pop(line.drain.key, None)

    def _turn(self, line: Line, now: int) -> None:
        """Go on with the bucket of the window that has begun."""
        slot = line.slot
        window = slot.cap.period.at(now)
        name = "|".join((safe_name(slot.cap.name), *map(safe_name, slot.scope.values()), window.name))
        self._forget_names(line)
        bucket = Bucket(name, tree=slot.bucket.tree, starts=window.starts, ends=window.ends)
        line.turn(Slot(slot.cap, bucket, slot.limit, slot.line, slot.scope, window.name))
        self._name(line)
        line.opens = (window.starts or now) + round(1000 * JITTER * self._jitter())
        self._look_at(line, line.opens)

    def _learn(self, line: Line, balance: Balance) -> None:
        if balance.bucket.key == line.bucket.key:
            line.held, line.spent = balance.held, balance.spent
        elif balance.bucket.key == line.drain.key:
            line.drained = balance.held + balance.spent

    def _opens(self, need: Need, line: Line) -> float:
        if line.spent + need.amount <= need.slot.line or line.bucket.ends is None:
            return 0
        return line.bucket.ends

    def _stand(self, waiter: Waiter, need: Need, now: int) -> None:
        line = self._join(waiter, need, now)
        group = line.find(waiter, need.slot.line)
        waiter.line, waiter.group, waiter.state = line, group, "standing"
        line.standing += 1
        heappush(group.heap, (waiter.age, waiter))

    def _stop(self, waiter: Waiter) -> None:
        """Take it out of the line that it stands in, or from among those that try."""
        if waiter.state == "standing" and waiter.line is not None:
            waiter.line.standing -= 1
            waiter.line.left += 1
        elif waiter.state == "trying":
            if waiter.group is not None:
                waiter.group.trying.discard(waiter)
            for line, amount in waiter.tries:
                line.pending -= amount
            waiter.tries = ()
        waiter.state = "new"

    def _close(self, line: Line) -> None:
        if self._lines.get(line.key) is line:
            del self._lines[line.key]
        self._forget_names(line)
        line.groups.clear()
        line.look = None

    def _dispatch(self, lines: Iterable[Line], now: int, time: float) -> None:
        """Let those try that fit, in their order; one that does not fit holds up those whose line is no higher than its own."""
        stopped: dict[Line, int] = {}
        heads: list[tuple[tuple[float, int], int, Line, _Group]] = []
        for line in lines:
            if line.bucket.ends is not None and line.bucket.ends <= now:
                self._turn(line, now)
            if line in stopped or now < line.opens:
                continue
            stopped[line] = -1
            for key, group in tuple(line.groups.items()):
                head = group.head()
                if head is not None:
                    heads.append((head.rank(time), next(self._numbers), line, group))
                elif not group.trying:
                    del line.groups[key]
        heapify(heads)
        while heads:
            _, _, line, group = heappop(heads)
            waiter = group.head()
            if waiter is None or group.stops <= stopped[line]:
                continue
            need = next(need for need in waiter.needs if need.key == line.key)
            fits, in_pace = line.room_for(need), line.in_pace(need, now)
            elsewhere = self._held_up(waiter, line, now, time)
            # On to the line that keeps it longest, and never back and forth between two that both have no room.
            if elsewhere is not None and (
                (fits and in_pace) or self._opens(elsewhere, self._lines[elsewhere.key]) > self._opens(need, line)
            ):
                line.standing -= 1
                heappop(group.heap)
                self._stand(waiter, elsewhere, now)
            elif not fits:
                if line.bucket.ends is None and line.spent + need.amount > need.slot.line:
                    self._stop(waiter)
                    _tell(waiter, "expired")  # nothing that anybody gives back would make it fit
                else:
                    stopped[line] = group.stops
            elif not in_pace:
                self._look_at(line, line.in_pace_at(need.slot.line))
                stopped[line] = group.stops
            else:
                heappop(group.heap)
                line.standing -= 1
                self._let_try(waiter, group)
            following = group.head()
            if following is not None and group.stops > stopped[line]:
                heappush(heads, (following.rank(time), next(self._numbers), line, group))

    def _held_up(self, waiter: Waiter, line: Line, now: int, time: float) -> Need | None:
        """Return what it needs of another line, where that has no room for it or somebody stands ahead of it."""
        for need in waiter.needs:
            other = self._lines.get(need.key)
            if other is None or other is line:
                continue
            if not other.room_for(need) or (need.key in waiter.stood and not other.in_pace(need, now)):
                return need
            rank = waiter.rank(time)
            for group in other.groups.values():
                first = group.first() if group.stops >= need.slot.line else None
                if first is not None and first.rank(time) < rank:
                    return need
        return None

    def _let_try(self, waiter: Waiter, group: _Group) -> None:
        waiter.state = "trying"
        group.trying.add(waiter)
        found = ((self._lines.get(need.key), need.amount) for need in waiter.needs)
        waiter.tries = tuple((line, amount) for line, amount in found if line is not None)
        for line, amount in waiter.tries:
            line.pending += amount
        _tell(waiter, "try")


def _tell(waiter: Waiter, word: Wake) -> None:
    if not waiter.future.done():
        waiter.future.set_result(word)
