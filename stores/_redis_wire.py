"""What travels to the script in `_redis.lua` and back: operations as one flat JSON array, answers as values of the contract."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import unquote

from stores._ops import Accept, Balances, Check, Credit, Extend, Holds, Op, Outcome, Renew, Reserve, Settle
from stores.base import Balance, Bucket, Charge, Health, Hold, Misfit, Settlement, Verdict, safe_name
from stores.errors import InvalidCharge, StoreRolledBack, TooLate

_GRANTED, _SETTLED = 1, 2
"""What stands before the answers that are numbers; see `_redis.lua`."""

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its own constructor takes."""


class Run(NamedTuple):
    """Operations on one tree that the script carries out in one run. `indexes` are their places in the batch."""

    tree: str
    ops: tuple[Op, ...]
    indexes: tuple[int, ...]
    ids: tuple[str, ...]  # keys
    buckets: tuple[str, ...]  # keys
    body: str


class Header(NamedTuple):
    """What every run says beside its answers."""

    epoch: str
    writes: int
    accepted: int
    suspect: bool
    now: int
    first_end: int | None
    more: bool


_FaceKey: TypeAlias = tuple[str, int | None, int | None]
"""A bucket's key and its bounds."""


class _Face(NamedTuple):
    """A bucket as one call names it."""

    name: str
    text: str  # when it starts, when it ends and who it is, as the script takes them


class Wire:
    """Write runs and read replies, for one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = safe_name(namespace)
        self._faces: dict[_FaceKey, _Face] = {}

    def prefix(self, tree: str) -> str:
        """Return what every key of a tree begins with: its hash tag, so that they lie in one slot of a cluster."""
        return f"{{{self._namespace}:{tree}}}:"

    def runs(self, ops: Sequence[Op]) -> list[Run]:
        """Sort a batch by tree, in its order. A listing stands alone: the script lists what it has written."""
        if len(ops) == 1:
            return [self._run(tree_of(ops[0]), tuple(ops), (0,))]
        trees: dict[str, list[int]] = {}
        alone: list[Run] = []
        for index, op in enumerate(ops):
            tree = tree_of(op)
            if isinstance(op, Holds):
                alone.append(self._run(tree, (op,), (index,)))
            else:
                trees.setdefault(tree, []).append(index)
        together = [self._run(tree, tuple(ops[i] for i in at), tuple(at)) for tree, at in trees.items()]
        return together + alone

    def _run(self, tree: str, ops: tuple[Op, ...], indexes: tuple[int, ...]) -> Run:
        prefix = self.prefix(tree)
        writer = _Writer(self._face)
        for op in ops:
            writer.write(op)
        return Run(
            tree,
            ops,
            indexes,
            tuple(f"{prefix}i:{id[-32:]}" for id in writer.ids),
            tuple(f"{prefix}b:{face.name}" for face in writer.faces),
            ",".join([face.text for face in writer.faces] + writer.parts),
        )

    def _face(self, key: _FaceKey, bucket: Bucket) -> _Face:
        face = self._faces.get(key)
        if face is None:
            if len(self._faces) >= 1000:  # names come from outside: they must not pile up here
                self._faces.clear()
            meta = f"{_or(bucket.starts, '-')} {_or(bucket.ends, '-')} {json.dumps((bucket.tree, bucket.name))}"
            text = f"{_or(bucket.starts, 'false')},{_or(bucket.ends, 'false')},{json.dumps(meta)}"
            # A record is split at blanks, so no name may be empty; safe_name never writes a lone "=".
            face = self._faces[key] = _Face(safe_name(bucket.name) or "=", text)
        return face

    def header(self, reply: Sequence[Any]) -> Header:
        """Read what every run says."""
        epoch, writes, accepted, suspect, now, first_end, more = reply[:7]
        return Header(_text(epoch), writes, accepted, suspect == 1, now, None if first_end < 0 else first_end, more == 1)

    def outcomes(self, ops: Sequence[Op], reply: Sequence[Any], header: Header) -> list[Outcome]:
        """Read the answer to each operation; a refusal to carry it out is the exception that its caller gets."""
        numbers = struct.unpack(f">{len(reply[7]) // 8}q", reply[7])
        others = iter(reply[8])
        outcomes: list[Outcome] = []
        at = 0
        for op in ops:
            kind = numbers[at]
            if kind == _GRANTED:
                option = numbers[at + 1]
                at += 2
                balances = []
                for charge in cast(Reserve, op).options[option]:
                    balances.append(_new(Balance, (charge.bucket, *numbers[at : at + 4], None)))
                    at += 4
                outcomes.append(_new(Verdict, ("held", option, tuple(balances), (), header.now)))
            elif kind == _SETTLED:
                counted, late = numbers[at + 1] == 1, numbers[at + 2] == 1
                at += 3
                balances = []
                for charge in cast(Settle, op).charges:
                    lease_ends = header.first_end if numbers[at] else None
                    balances.append(_new(Balance, (charge.bucket, *numbers[at : at + 4], lease_ends)))
                    at += 4
                outcomes.append(_new(Settlement, (counted, late, tuple(balances))))
            else:
                at += 1
                outcomes.append(_outcome(op, next(others), header))
        return outcomes


class _Writer:
    """Write the operations of one run one after another: as JSON, but by hand, since this is what a batch costs.

    Nothing in it needs to be escaped: they are numbers and what `safe_name` writes.
    """

    def __init__(self, face: Callable[[_FaceKey, Bucket], _Face]) -> None:
        self.parts: list[str] = []
        self.ids: dict[str, int] = {}
        self.faces: list[_Face] = []
        self._face = face
        self._numbers: dict[_FaceKey, int] = {}
        self._seen: dict[int, int] = {}  # by identity: the operations keep their buckets alive

    def write(self, op: Op) -> None:
        match op:
            case Reserve():
                on_lease_end, size, text = int(op.on_lease_end == "charge"), 3, ""
                for option, charges in enumerate(op.options):
                    record, numbers = self._bounded(charges, line=True)
                    text += f',{len(charges)},"{option},0,{on_lease_end},0{record}"{numbers}'
                    size += 2 + 3 * len(charges)
                self.parts.append(f'"reserve",{size},{self._id(op.id)},{op.lease},{len(op.options)}{text}')
            case Settle():
                self.parts.append(f'"settle",{self._amounts(op.id, op.charges)}')
            case Extend():
                record, numbers = self._bounded(op.charges, line=False)
                size = len(op.charges)
                self.parts.append(f'"extend",{4 + 3 * size},{self._id(op.id)},{op.step},{size},"{record}"{numbers}')
            case Credit():
                self.parts.append(f'"credit",{self._amounts(op.id, op.charges)}')
            case Renew():
                self._numbers_of("renew", [op.lease, len(op.ids), *map(self._id, op.ids)])
            case Balances():
                self._numbers_of("balances", [len(op.buckets), *map(self._number, op.buckets)])
            case Holds():
                self._numbers_of("holds", [op.limit])
            case Check():
                self._numbers_of("check", [])
            case Accept():
                self._numbers_of("accept", [])

    def _numbers_of(self, word: str, numbers: Sequence[int]) -> None:
        self.parts.append(",".join([f'"{word}"', str(len(numbers)), *map(str, numbers)]))

    def _amounts(self, id: str, charges: Sequence[Charge]) -> str:
        text = f"{2 + 2 * len(charges)},{self._id(id)},{len(charges)}"
        for charge in charges:
            text += f",{self._number(charge.bucket)},{charge.amount}"
        return text

    def _bounded(self, charges: Sequence[Charge], *, line: bool) -> tuple[str, str]:
        """Write charges twice: as the record that is kept of them, and as numbers with the bound that holds now."""
        record = numbers = ""
        for charge in charges:
            number, amount = self._number(charge.bucket), charge.amount
            at, limit = charge.line, charge.limit
            bound = at if line else limit
            numbers += f",{number},{amount},{'false' if bound is None else bound}"
            name = self.faces[number - 1].name
            record += f" {name} {amount} {'-' if at is None else at} {'-' if limit is None else limit}"
        return record, numbers

    def _id(self, id: str) -> int:
        return self.ids.setdefault(id, len(self.ids) + 5)

    def _number(self, bucket: Bucket) -> int:
        """Return the number of a bucket as it is named here: one bucket may be named with other bounds by another call."""
        number = self._seen.get(id(bucket))
        if number is None:
            key = (bucket.key, bucket.starts, bucket.ends)
            number = self._numbers.get(key)
            if number is None:
                self.faces.append(self._face(key, bucket))
                number = self._numbers[key] = len(self.faces)
            self._seen[id(bucket)] = number
        return number


def tree_of(op: Op) -> str:
    if isinstance(op, Reserve | Extend | Settle | Credit):
        return op.id[:-33]
    if isinstance(op, Renew):
        return op.ids[0][:-33]
    if isinstance(op, Balances):
        key = op.buckets[0].key
        return key[: key.index(":")]  # safe_name writes no colon
    return op.tree


def _name_of(tree: str) -> str:
    return unquote(tree, errors="surrogatepass")


def _or(number: int | None, word: str) -> int | str:
    return word if number is None else number


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _outcome(op: Op, answer: Sequence[Any], header: Header) -> Outcome:
    word = _text(answer[0])
    if word == "rolled back":
        return StoreRolledBack("redis", _name_of(tree_of(op)))
    match op:
        case Reserve():
            return _verdict(word, op.id, op.options, answer, header)
        case Extend():
            return _verdict(word, op.id, (op.charges,), answer, header)
        case Settle() | Credit():
            return _settlement(word, op, answer, header)
        case Renew():
            return frozenset(op.ids[i] for i in answer[1:])
        case Balances():
            return _balances(op.buckets, answer, 1, header.first_end)
        case Holds():
            return tuple(_hold(op.tree, fields) for fields in answer[1:])
        case Check():
            return Health("redis", header.now, header.epoch, header.writes, header.suspect)
        case Accept():
            return None


def _balance(bucket: Bucket, sums: Sequence[Any], first_end: int | None) -> Balance:
    return _balances((bucket,), sums, 0, first_end)[0]


def _balances(buckets: Iterable[Bucket], answer: Sequence[Any], at: int, first_end: int | None) -> tuple[Balance, ...]:
    """Read four sums for each bucket; of one past 2**53 the script answers parts, which it could not add up exactly."""
    found = []
    for bucket in buckets:
        held, spent, lost, credited = answer[at : at + 4]
        if type(held) is not int:
            held, spent, lost, credited = (sum(map(int, _text(parts).split("+"))) for parts in answer[at : at + 4])
        found.append(_new(Balance, (bucket, held, spent, lost, credited, first_end if held else None)))
        at += 4
    return tuple(found)


def _verdict(word: str, id: str, options: Sequence[Sequence[Charge]], answer: Sequence[Any], header: Header) -> Verdict:
    if word == "held":
        option = answer[1]
        return _new(
            Verdict, ("held", option, _balances([charge.bucket for charge in options[option]], answer, 2, None), (), header.now)
        )
    if word == "again":
        balances = tuple(
            _balance(_bucket(answer[i], id[:-33]), answer[i + 1 : i + 5], header.first_end) for i in range(2, len(answer), 5)
        )
        return Verdict("held", answer[1], balances, (), header.now)
    if word == "refused":
        misfits = tuple(
            tuple(Misfit(charges[at], _balance(charges[at].bucket, sums, header.first_end)) for at, *sums in found)
            for charges, found in zip(options, answer[1:], strict=True)
        )
        return Verdict("refused", None, (), misfits, header.now)
    return Verdict("gone" if word == "gone" else "stale", None, (), (), header.now)


def _settlement(word: str, op: Settle | Credit, answer: Sequence[Any], header: Header) -> Settlement | InvalidCharge | TooLate:
    if word == "settled":
        balances = _balances([charge.bucket for charge in op.charges], answer, 3, header.first_end)
        return _new(Settlement, (answer[1] == 1, answer[2] == 1, balances))
    if word == "id forgotten":
        return TooLate(op.id, "the store keeps ids for 24 hours")
    if word == "a reservation":
        return InvalidCharge(f"credit {op.id}: that id is a reservation; write new_id(tree) for each credit")
    charge = op.charges[answer[1]]
    name, what = charge.bucket.name, type(op).__name__.lower()
    if word == "window forgotten":
        return TooLate(op.id, f"the window of {name!r} ended more than 24 hours ago")
    if word == "not held":
        return InvalidCharge(f"settle of {op.id}: what it reserved has no bucket {name!r}")
    if word == "no room":
        return InvalidCharge(f"{what} of {op.id}: bucket {name!r} cannot count past 2**61; charge a bucket of a later window")
    spent = _balance(charge.bucket, answer[2:], None).spent
    return InvalidCharge(f"credit {op.id}: bucket {name!r} has spent {spent}, which is less than {charge.amount}")


def _bucket(meta: Any, tree: str) -> Bucket:
    """Read who a bucket is; when somebody deleted its key, only its name is left of it."""
    text = _text(meta)
    if " " not in text:
        return Bucket("" if text == "=" else unquote(text, errors="surrogatepass"), tree=_name_of(tree))
    starts, ends, names = text.split(" ", 2)
    of_tree, name = json.loads(names)
    return Bucket(name, tree=of_tree, starts=_number(starts), ends=_number(ends))


def _hold(tree: str, fields: Sequence[Any]) -> Hold:
    id, ended, lease_ends, charge, record, metas = fields
    words = _text(record).split(" ")[1:]
    charges = []
    for i, meta in enumerate(metas):
        _, amount, line, limit = words[4 * i : 4 * i + 4]
        charges.append(Charge(_bucket(meta, tree), int(amount), _number(line), _number(limit)))
    state, on_lease_end = "expired" if ended else "held", "charge" if charge else "release"
    return Hold(f"{tree}:{_text(id)}", state, tuple(charges), lease_ends, on_lease_end)  # type: ignore[arg-type]


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)
