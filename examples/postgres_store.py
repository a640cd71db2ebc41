"""A store in PostgreSQL (13 or later): the books lie beside the data that a team has already, shared by every machine.

    from postgres_store import PostgresStore  # this file, copied beside yours; needs asyncpg

    store = PostgresStore("postgresql://budget@localhost/app")
    async with Router(policy, store) as router: ...

It is also how a store for another database is written: nothing here but public names of `stores`, and the proof is
`stores.conformance`. One call of one SQL function carries out a whole batch: it locks the row of the budget tree, ends the
leases that are over, carries out the operations in their order, and its statement is the transaction. So no lock ever waits
for this process, and a batch is carried out whole or not at all. What is sent twice changes nothing more: every operation is
known by its id.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

import asyncpg

from stores.base import (
    AHEAD,
    RETENTION,
    RETENTION_WINDOWLESS,
    Balance,
    Bucket,
    Charge,
    Health,
    Hold,
    LeaseEnd,
    Misfit,
    Settlement,
    Verdict,
    born,
    safe_name,
    tree_key,
)
from stores.batching import Batcher
from stores.errors import InvalidCharge, StoreRolledBack, StoreUnavailable, TooLate

_SQL = f"""
-- One row per budget tree: the lock, the store's time, and what tells a client that the books came back older than they were.
CREATE TABLE IF NOT EXISTS tree (
    tree text COLLATE "C" PRIMARY KEY, epoch text NOT NULL, accepted bigint NOT NULL, suspect boolean NOT NULL,
    writes bigint NOT NULL, now bigint NOT NULL, first_end bigint);  -- no lease ends before first_end; it may be too early
-- The number of each client's last batch. A client that knows of a later one has seen what is gone.
CREATE TABLE IF NOT EXISTS client (
    tree text COLLATE "C", client text COLLATE "C", writes bigint NOT NULL, now bigint NOT NULL, PRIMARY KEY (tree, client));
-- numeric, because a debt has no bound and an overflow would fail a whole batch.
CREATE TABLE IF NOT EXISTS bucket (
    key text COLLATE "C" PRIMARY KEY, tree text COLLATE "C" NOT NULL, held numeric NOT NULL, spent numeric NOT NULL,
    lost numeric NOT NULL, credited numeric NOT NULL, keep_until bigint NOT NULL);
CREATE INDEX IF NOT EXISTS bucket_keep ON bucket (tree, keep_until);
CREATE TABLE IF NOT EXISTS entry (
    id text COLLATE "C" PRIMARY KEY, tree text COLLATE "C" NOT NULL, born bigint NOT NULL, state text NOT NULL, charges jsonb,
    option int, step bigint, lease_ends bigint, on_lease_end text, keep_until bigint);
CREATE INDEX IF NOT EXISTS entry_open ON entry (tree, state, lease_ends) WHERE state <> 'closed';
CREATE INDEX IF NOT EXISTS entry_keep ON entry (tree, keep_until) WHERE keep_until IS NOT NULL;

CREATE OR REPLACE FUNCTION unpack(charges jsonb)
RETURNS TABLE (n bigint, key text, bucket text, amount numeric, line numeric, "limit" numeric, starts bigint, ends bigint)
LANGUAGE sql IMMUTABLE AS $$
    SELECT row_number() OVER (), c.* FROM jsonb_to_recordset(charges)
        AS c (key text, bucket text, amount numeric, line numeric, "limit" numeric, starts bigint, ends bigint)
$$;

CREATE OR REPLACE FUNCTION balances(book tree, charges jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT coalesce(jsonb_agg(jsonb_build_array(
            c.bucket, coalesce(b.held, 0), coalesce(b.spent, 0), coalesce(b.lost, 0), coalesce(b.credited, 0),
            CASE WHEN b.held > 0 THEN book.first_end END) ORDER BY c.n), '[]')
        FROM unpack(charges) c LEFT JOIN bucket b ON b.key = c.key);
END $$;

-- The balances of those charges that do not fit, of which `had` is held already.
CREATE OR REPLACE FUNCTION misfits(book tree, charges jsonb, had jsonb, bound text) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN balances(book, (
        SELECT coalesce(jsonb_agg(jsonb_build_object('key', c.key, 'bucket', c.bucket) ORDER BY c.n), '[]')
        FROM unpack(charges) c LEFT JOIN unpack(had) h ON h.key = c.key LEFT JOIN bucket b ON b.key = c.key
        WHERE c.amount > coalesce(h.amount, 0)
        AND coalesce(b.held + b.spent, 0) + c.amount - coalesce(h.amount, 0)
            > CASE bound WHEN 'line' THEN c.line ELSE c."limit" END));
END $$;

-- Add each charge's amount so many times to the sums of its bucket. It is kept at least as long as an id that counts in it;
-- in whole days, so that one more write seldom moves it in the index.
CREATE OR REPLACE FUNCTION add(book tree, born bigint, charges jsonb, held int, spent int, lost int, credited int)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO bucket AS b
    SELECT c.key, book.tree, c.amount * add.held, c.amount * add.spent, c.amount * add.lost, c.amount * add.credited,
        (greatest(c.ends, book.now, add.born) + CASE WHEN c.ends IS NULL THEN {RETENTION_WINDOWLESS} ELSE {RETENTION} END)
            / {RETENTION} * {RETENTION} + {RETENTION}
    FROM unpack(charges) c
    ON CONFLICT (key) DO UPDATE SET
        held = b.held + excluded.held, spent = b.spent + excluded.spent, lost = b.lost + excluded.lost,
        credited = b.credited + excluded.credited, keep_until = greatest(b.keep_until, excluded.keep_until);
END $$;

-- What the end of a lease does to the sums, or, with -1, undoes.
CREATE OR REPLACE FUNCTION lose(book tree, entry entry, times int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM add(book, entry.born, entry.charges, 0, CASE entry.on_lease_end WHEN 'charge' THEN times ELSE 0 END, times, 0);
END $$;

CREATE OR REPLACE FUNCTION close(book tree, op jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE born bigint := op->>'born';
BEGIN
    -- An id that a clock ahead of ours made is kept until it is too old to be taken for a new one.
    INSERT INTO entry (id, tree, born, state, keep_until)
    VALUES (op->>'id', book.tree, born, 'closed', greatest(book.now, born) + {RETENTION})
    ON CONFLICT (id) DO UPDATE SET state = 'closed', charges = NULL, lease_ends = NULL, keep_until = excluded.keep_until;
END $$;

CREATE OR REPLACE FUNCTION held(book tree, entry entry) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN jsonb_build_object('state', 'held', 'option', entry.option, 'balances', balances(book, entry.charges));
END $$;

CREATE OR REPLACE FUNCTION reserve(book tree, entry entry, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE charges jsonb; unfit jsonb; refused jsonb := '[]';
BEGIN
    IF book.suspect THEN
        RETURN '{{"error": "rolled back"}}';
    ELSIF entry.state = 'held' THEN
        RETURN held(book, entry);
    ELSIF entry.state IS NOT NULL OR book.now - (op->>'born')::bigint > {RETENTION} THEN
        RETURN '{{"state": "gone"}}';
    END IF;
    FOR charges IN SELECT value FROM jsonb_array_elements(op->'options') LOOP
        IF EXISTS (SELECT FROM unpack(charges) c WHERE c.ends <= book.now OR c.starts > book.now + {AHEAD}) THEN
            RETURN '{{"state": "stale"}}';
        END IF;
        unfit := misfits(book, charges, '[]', 'line');
        IF unfit = '[]' THEN
            INSERT INTO entry VALUES (
                op->>'id', book.tree, (op->>'born')::bigint, 'held', charges, jsonb_array_length(refused), 0,
                book.now + (op->>'lease')::bigint, op->>'on_lease_end', NULL) RETURNING * INTO entry;
            PERFORM add(book, entry.born, charges, 1, 0, 0, 0);
            RETURN held(book, entry);
        END IF;
        refused := refused || jsonb_build_array(unfit);
    END LOOP;
    RETURN jsonb_build_object('state', 'refused', 'misfits', refused);
END $$;

CREATE OR REPLACE FUNCTION extend(book tree, entry entry, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE wanted jsonb := op->'charges'; unfit jsonb;
BEGIN
    IF entry.state IS DISTINCT FROM 'held' THEN
        RETURN '{{"state": "gone"}}';
    ELSIF (op->>'step')::bigint > entry.step THEN
        unfit := misfits(book, wanted, entry.charges, 'limit');
        IF unfit <> '[]' THEN
            RETURN jsonb_build_object('state', 'refused', 'misfits', jsonb_build_array(unfit));
        END IF;
        PERFORM add(book, entry.born, entry.charges, -1, 0, 0, 0);
        PERFORM add(book, entry.born, wanted, 1, 0, 0, 0);
        UPDATE entry e SET charges = wanted, step = (op->>'step')::bigint WHERE e.id = entry.id RETURNING * INTO entry;
    END IF;
    RETURN held(book, entry);
END $$;

CREATE OR REPLACE FUNCTION settle(book tree, entry entry, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE paid jsonb := op->'charges'; late boolean := entry.state IS DISTINCT FROM 'held'; foreign_bucket text;
BEGIN
    IF entry.state = 'closed' THEN
        RETURN jsonb_build_object('counted', false, 'late', false, 'balances', balances(book, paid));
    ELSIF paid <> '[]' AND entry.state IS NULL AND book.now - (op->>'born')::bigint > {RETENTION} THEN
        RETURN '{{"error": "too late", "why": "the store keeps ids for 24 hours"}}';
    ELSIF late AND EXISTS (SELECT FROM unpack(paid) c WHERE c.ends + {RETENTION} <= book.now) THEN
        RETURN '{{"error": "too late", "why": "the window of a bucket ended more than 24 hours ago"}}';
    END IF;
    IF entry.state IS NOT NULL THEN
        SELECT c.bucket INTO foreign_bucket FROM unpack(paid) c
        WHERE NOT EXISTS (SELECT FROM unpack(entry.charges) h WHERE h.key = c.key) LIMIT 1;
        IF FOUND THEN
            RETURN jsonb_build_object('error', 'invalid', 'why', 'what it reserved has no bucket ' || foreign_bucket);
        ELSIF late THEN
            PERFORM lose(book, entry, -1);
        ELSE
            PERFORM add(book, entry.born, entry.charges, -1, 0, 0, 0);
        END IF;
    END IF;
    PERFORM add(book, (op->>'born')::bigint, paid, 0, 1, 0, 0);
    PERFORM close(book, op);
    RETURN jsonb_build_object('counted', true, 'late', late, 'balances', balances(book, paid));
END $$;

CREATE OR REPLACE FUNCTION renew(book tree, entry entry, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    IF entry.state IS NULL OR entry.state = 'closed' THEN
        RETURN 'false';
    ELSIF entry.state = 'expired' THEN
        -- What the lease's end counted as spent is what is taken again: that fits by itself.
        IF entry.on_lease_end = 'release' AND misfits(book, entry.charges, '[]', 'limit') <> '[]' THEN
            RETURN 'false';
        END IF;
        PERFORM lose(book, entry, -1);
        PERFORM add(book, entry.born, entry.charges, 1, 0, 0, 0);
    END IF;
    UPDATE entry e SET state = 'held', lease_ends = book.now + (op->>'lease')::bigint, keep_until = NULL WHERE e.id = entry.id;
    RETURN 'true';
END $$;

CREATE OR REPLACE FUNCTION credit(book tree, entry entry, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE short record;
BEGIN
    IF entry.state = 'closed' THEN
        RETURN jsonb_build_object('counted', false, 'late', false, 'balances', balances(book, op->'charges'));
    ELSIF entry.state IS NOT NULL THEN
        RETURN '{{"error": "invalid", "why": "that id is a reservation; write new_id(tree) for each credit"}}';
    ELSIF book.now - (op->>'born')::bigint > {RETENTION} THEN
        RETURN '{{"error": "too late", "why": "the store keeps ids for 24 hours"}}';
    END IF;
    SELECT c.bucket, coalesce(b.spent, 0) AS spent, c.amount INTO short
    FROM unpack(op->'charges') c LEFT JOIN bucket b ON b.key = c.key WHERE c.amount > coalesce(b.spent, 0) LIMIT 1;
    IF FOUND THEN
        RETURN jsonb_build_object('error', 'invalid', 'why',
            format('bucket %s has spent %s, which is less than %s', short.bucket, short.spent, short.amount));
    END IF;
    PERFORM add(book, (op->>'born')::bigint, op->'charges', 0, -1, 0, 1);
    PERFORM close(book, op);
    RETURN jsonb_build_object('counted', true, 'late', false, 'balances', balances(book, op->'charges'));
END $$;

CREATE OR REPLACE FUNCTION holds(book tree, op jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT coalesce(jsonb_agg(jsonb_build_array(e.id, e.state, e.charges, e.lease_ends, e.on_lease_end)
            ORDER BY e.lease_ends, e.id), '[]')
        FROM (
            SELECT * FROM entry o WHERE o.tree = book.tree AND o.state <> 'closed'
            AND (o.keep_until IS NULL OR o.keep_until >= book.now)
            ORDER BY o.lease_ends, o.id LIMIT (op->>'limit')::bigint) e);
END $$;

CREATE OR REPLACE FUNCTION wall_clock(request jsonb) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce((request->>'clock')::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
$$;

-- A plan that is made while the tables are empty must still be right when they are full: always by an index.
CREATE OR REPLACE FUNCTION carry_out(request jsonb) RETURNS jsonb LANGUAGE plpgsql SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    book tree; known jsonb := request->'known'; mark bigint; op jsonb; entry entry; more boolean;
    answers jsonb[] := ARRAY[]::jsonb[];
BEGIN
    -- The lock. Whoever had to wait for it reads the clock, and everything below, after it has it.
    INSERT INTO tree AS t VALUES (request->>'tree', gen_random_uuid(), 0, false, 1, wall_clock(request), NULL)
    ON CONFLICT (tree) DO UPDATE SET writes = t.writes + 1, now = greatest(t.now, wall_clock(request))
    RETURNING t.* INTO book;

    -- Did this client see more than is here? A mark is kept for a week; after that the count alone must do.
    SELECT c.writes INTO mark FROM client c WHERE c.tree = book.tree AND c.client = request->>'client';
    IF mark IS NULL AND (known->>'now')::bigint < book.now - {7 * RETENTION} THEN
        mark := book.writes - 1;
    END IF;
    IF (known->>'accepted')::bigint >= book.accepted
        AND (known->>'epoch' <> book.epoch OR coalesce(mark, 0) < (known->>'writes')::bigint)
    THEN
        book.suspect := true;
    END IF;

    IF book.first_end <= book.now THEN
        FOR entry IN
            UPDATE entry e SET state = 'expired', keep_until = greatest(book.now, e.born) + {RETENTION}
            WHERE e.id IN (
                SELECT h.id FROM entry h WHERE h.tree = book.tree AND h.state = 'held' AND h.lease_ends <= book.now
                ORDER BY h.lease_ends LIMIT 1000)
            RETURNING *
        LOOP
            PERFORM add(book, entry.born, entry.charges, -1, 0, 0, 0);
            PERFORM lose(book, entry, 1);
        END LOOP;
        SELECT min(h.lease_ends) INTO book.first_end FROM entry h WHERE h.tree = book.tree AND h.state = 'held';
    END IF;
    more := coalesce(book.first_end <= book.now, false);

    -- No operation meets a hold that is over: when there are more of them, the batch is sent again.
    IF NOT more THEN
        FOR op IN SELECT value FROM jsonb_array_elements(request->'ops') LOOP
            book.first_end := least(book.first_end, book.now + (op->>'lease')::bigint);
            SELECT * INTO entry FROM entry e WHERE e.id = op->>'id' AND (e.state = 'held' OR e.keep_until >= book.now);
            answers := array_append(answers, CASE op->>'op'
                WHEN 'reserve' THEN reserve(book, entry, op)
                WHEN 'extend' THEN extend(book, entry, op)
                WHEN 'settle' THEN settle(book, entry, op)
                WHEN 'renew' THEN renew(book, entry, op)
                WHEN 'credit' THEN credit(book, entry, op)
                WHEN 'balances' THEN balances(book, op->'buckets')
                WHEN 'holds' THEN holds(book, op)
                ELSE 'null' END);
            IF op->>'op' = 'accept' THEN
                -- Beyond whatever any client knows, or it would go on suspecting.
                book.suspect := false;
                book.accepted := greatest(book.accepted + 1, (known->>'accepted')::bigint + 1, book.now);
            END IF;
        END LOOP;
    END IF;

    UPDATE tree t SET suspect = book.suspect, accepted = book.accepted, first_end = book.first_end
    WHERE t.tree = book.tree AND (t.suspect, t.accepted, t.first_end)
        IS DISTINCT FROM (book.suspect, book.accepted, book.first_end);
    IF NOT book.suspect THEN
        INSERT INTO client VALUES (book.tree, request->>'client', book.writes, book.now)
        ON CONFLICT (tree, client) DO UPDATE SET writes = excluded.writes, now = excluded.now;
    END IF;
    IF mark IS NULL THEN
        DELETE FROM client c WHERE c.tree = book.tree AND c.now < book.now - {7 * RETENTION};
    END IF;
    DELETE FROM entry WHERE id IN (
        SELECT e.id FROM entry e WHERE e.tree = book.tree AND e.keep_until < book.now LIMIT 200);
    DELETE FROM bucket WHERE key IN (
        SELECT b.key FROM bucket b WHERE b.tree = book.tree AND b.held = 0 AND b.keep_until < book.now LIMIT 200);
    RETURN to_jsonb(book) || jsonb_build_object('more', more, 'answers', to_jsonb(answers));
END $$;
"""  # noqa: S608 (numbers of ours)

_LOST = (
    asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.InterfaceError, OSError,
)  # fmt: skip
_MISSING = (asyncpg.UndefinedFunctionError, asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError)
_FOREIGN = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


class _Op(NamedTuple):
    tree: str  # as safe_name writes it
    what: dict[str, Any]


class _Answer(NamedTuple):
    value: Any
    book: dict[str, Any]  # the tree's row, and whether there is more to do


class PostgresStore:
    """Count in the database at `dsn`, in tables of their own `schema`, which is made when it is not there.

    Every call is answered within `timeout` seconds. Time is the server's, or what `clock` returns, in milliseconds since the
    epoch. Keeps one connection, opened at the first call. Ids and balances are kept at least as long as the contract says. A
    change to the SQL that does not suit the tables and the programs that are there takes another `schema`. What was
    acknowledged outlives a crash of the server unless somebody turned `fsync` or `synchronous_commit` off.
    """

    def __init__(
        self, dsn: str, *, schema: str = "budget_v1", timeout: float = 5.0, clock: Callable[[], int] | None = None
    ) -> None:
        self._dsn = dsn
        self._schema = '"' + schema.replace('"', '""') + '"'
        self._timeout = timeout
        self._clock = clock
        self._client = secrets.token_hex(8)
        self._known: dict[str, dict[str, Any]] = {}  # by tree: the last answer, which is the most that we saw
        self._connection: asyncpg.Connection[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batcher: Batcher[_Op, _Answer] = Batcher(self._carry_out, store="postgres", timeout=timeout)

    def __repr__(self) -> str:
        return f"<PostgresStore schema={self._schema}>"

    # The contract.

    async def reserve(
        self, id: str, options: Sequence[Sequence[Charge]], *, lease: int, on_lease_end: LeaseEnd = "release"
    ) -> Verdict:
        """See `BudgetStore.reserve`."""
        if not options:
            raise InvalidCharge(f"reserve of {id}: give at least one option; one without charges is an empty sequence")
        if on_lease_end not in {"release", "charge"}:
            raise InvalidCharge(f"reserve of {id}: on_lease_end is 'release' or 'charge', not {on_lease_end!r}")
        _check_lease(lease)
        packed = [_pack(id, charges) for charges in options]
        try:
            answer = await self._put("reserve", id, options=packed, lease=lease, on_lease_end=on_lease_end)
        except asyncio.CancelledError:
            # Whether it was applied is unknown; a release closes the id whichever of the two arrives first.
            with suppress(StoreUnavailable):  # full or closed: the lease ends the hold
                self._put("settle", id, charges=[])
            raise
        return _verdict(answer, options)

    async def extend(self, id: str, step: int, charges: Sequence[Charge]) -> Verdict:
        """See `BudgetStore.extend`."""
        if type(step) is not int or not 0 < step <= 2**52:
            raise InvalidCharge(f"extend of {id}: the step must be a whole number from 1 to 2**52, not {step!r}")
        return _verdict(await self._put("extend", id, step=step, charges=_pack(id, charges)), [charges])

    async def settle(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.settle`."""
        return _settlement(await self._put("settle", id, charges=_pack(id, charges)))

    async def release(self, id: str) -> Settlement:
        """See `BudgetStore.release`."""
        return await self.settle(id, ())

    async def renew(self, ids: Collection[str], *, lease: int) -> frozenset[str]:
        """See `BudgetStore.renew`."""
        _check_lease(lease)
        asked = list(ids)
        for id in asked:
            tree_key(id)
        answers = await asyncio.gather(*(self._put("renew", id, lease=lease) for id in asked))
        return frozenset(id for id, answer in zip(asked, answers, strict=True) if answer.value)

    async def balances(self, buckets: Sequence[Bucket]) -> tuple[Balance, ...]:
        """See `BudgetStore.balances`."""
        trees: dict[str, list[dict[str, Any]]] = {}
        for bucket in buckets:
            trees.setdefault(safe_name(bucket.tree), []).append(_coded(bucket))
        answers = await asyncio.gather(*(self._send(tree, "balances", buckets=part) for tree, part in trees.items()))
        found = {balance.bucket.key: balance for answer in answers for balance in _balances(answer.value)}
        return tuple(found[bucket.key] for bucket in buckets)

    async def holds(self, *, tree: str = "", limit: int = 1000) -> tuple[Hold, ...]:
        """See `BudgetStore.holds`."""
        if type(limit) is not int or not 0 <= limit <= 1_000_000:
            raise InvalidCharge(f"the limit of a list of holds must be a whole number from 0 to 1,000,000, not {limit!r}")
        answer = await self._send(safe_name(tree), "holds", limit=limit)
        return tuple(Hold(id, state, _unpack(charges), *rest) for id, state, charges, *rest in answer.value)

    async def credit(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.credit`."""
        return _settlement(await self._put("credit", id, charges=_pack(id, charges)))

    async def check(self) -> Health:
        """See `BudgetStore.check`."""
        book = (await self._send("", "check")).book
        return Health("postgres", book["now"], book["epoch"], book["writes"], book["suspect"])

    async def accept(self, *, tree: str = "") -> None:
        """See `BudgetStore.accept`."""
        await self._send(safe_name(tree), "accept")

    async def aclose(self) -> None:
        """See `BudgetStore.aclose`."""
        await self._batcher.aclose()
        # In another loop, or behind a fork, the connection is not ours to touch: it would be closed under its owner.
        if self._connection is not None and self._loop is asyncio.get_running_loop():
            with suppress(*_FOREIGN):
                await self._connection.close(timeout=self._timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Many callers, one statement.

    def _put(self, name: str, id: str, **what: Any) -> asyncio.Future[_Answer]:
        return self._send(tree_key(id), name, id=id, born=born(id), **what)

    def _send(self, tree: str, name: str, **what: Any) -> asyncio.Future[_Answer]:
        return self._batcher.put(_Op(tree, {"op": name, **what}))

    async def _carry_out(self, ops: Sequence[_Op]) -> list[_Answer | Exception]:
        answers: list[_Answer | Exception] = [StoreUnavailable("postgres", "it gave no answer")] * len(ops)
        trees: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            trees.setdefault(op.tree, []).append(index)
        while trees:
            # In one order everywhere, so that no two batches wait for each other's trees.
            pending = sorted(trees)
            books = await self._call([self._request(tree, [ops[index].what for index in trees[tree]]) for tree in pending])
            for tree, book in zip(pending, books, strict=True):
                if not book["suspect"]:
                    self._known[tree] = {name: book[name] for name in ("epoch", "accepted", "writes", "now")}
                if not book["more"]:
                    for index, value in zip(trees.pop(tree), book["answers"], strict=True):
                        answers[index] = _failure(ops[index], value) or _Answer(value, book)
        return answers

    def _request(self, tree: str, ops: list[dict[str, Any]]) -> dict[str, Any]:
        clock = None if self._clock is None else self._clock()
        return {"tree": tree, "client": self._client, "known": self._known.get(tree), "clock": clock, "ops": ops}

    async def _call(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            try:
                return await self._query(requests)
            except _MISSING:
                await self._install()
            except _LOST:
                pass  # most often the server was restarted; whatever was carried out already is known by its id
            return await self._query(requests)
        except _FOREIGN as error:
            raise StoreUnavailable("postgres", f"{error} ({type(error).__name__})") from error

    async def _query(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The rows come in the order of the array, and so do the locks.
        query = f"SELECT {self._schema}.carry_out(request) FROM jsonb_array_elements($1::jsonb) AS request"  # noqa: S608
        async with self._connected() as connection:
            return [json.loads(row[0]) for row in await connection.fetch(query, json.dumps(requests))]

    async def _install(self) -> None:
        there = """SELECT to_regproc($1 || '.carry_out') IS NOT NULL AND NOT EXISTS (
            SELECT FROM unnest($2::text[]) AS name WHERE to_regclass($1 || '.' || name) IS NULL)"""
        async with self._connected() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", self._schema)
            # Somebody else may have been first, and is at work: what makes an index waits for writers, and they for it.
            if not await connection.fetchval(there, self._schema, ["tree", "client", "bucket", "entry"]):
                await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                await connection.execute(f"SET LOCAL search_path TO {self._schema}")
                await connection.execute(_SQL)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Lend the connection. One that failed, or whose caller is out of time, is in no known state: it is not used again."""
        if self._connection is None or self._connection.is_closed():
            # The server gives up a little before the batcher does: the caller hears why, and no session is left waiting.
            limit = str(max(1, int(900 * self._timeout)))
            settings = {"statement_timeout": limit, "default_transaction_isolation": "read committed"}
            self._connection = await asyncpg.connect(self._dsn, server_settings=settings)
            self._loop = asyncio.get_running_loop()
        connection = self._connection
        try:
            yield connection
        except BaseException:
            connection.terminate()
            raise


# Values to JSON and back.


@lru_cache(maxsize=4096)
def _coded(bucket: Bucket) -> dict[str, Any]:
    # Names may hold what PostgreSQL's text cannot: NUL, lone surrogates, 10 kB in an index. The key is safe_name's, and the
    # names themselves travel as a text of JSON within the JSON.
    text = json.dumps([bucket.name, bucket.tree, bucket.starts, bucket.ends])
    key = f"{safe_name(bucket.tree)}:{safe_name(bucket.name)}"
    return {"key": key, "bucket": text, "starts": bucket.starts, "ends": bucket.ends}


@lru_cache(maxsize=4096)
def _bucket(text: str) -> Bucket:
    return Bucket(*json.loads(text))


def _pack(id: str, charges: Sequence[Charge]) -> list[dict[str, Any]]:
    tree = tree_key(id)
    packed = []
    for charge in charges:
        if safe_name(charge.bucket.tree) != tree:
            raise InvalidCharge(f"{id}: bucket {charge.bucket.name!r} lies in another tree than the id names")
        packed.append({**_coded(charge.bucket), "amount": charge.amount, "line": charge.line, "limit": charge.limit})
    if len({charge["key"] for charge in packed}) != len(packed):
        raise InvalidCharge(f"{id}: a bucket stands twice among its charges; add the amounts up")
    return packed


def _unpack(charges: list[dict[str, Any]]) -> tuple[Charge, ...]:
    return tuple(Charge(_bucket(c["bucket"]), c["amount"], c["line"], c["limit"]) for c in charges)


def _check_lease(lease: int) -> None:
    if type(lease) is not int or not 0 < lease <= RETENTION_WINDOWLESS:
        raise InvalidCharge(f"a lease must be a whole number of milliseconds from 1 to 30 days, not {lease!r}")


def _balances(rows: list[list[Any]]) -> tuple[Balance, ...]:
    return tuple(Balance(_bucket(text), *figures) for text, *figures in rows)


def _verdict(answer: _Answer, options: Sequence[Sequence[Charge]]) -> Verdict:
    value = answer.value
    misfits = []
    for charges, rows in zip(options, value.get("misfits", ()), strict=False):
        of = {charge.bucket.key: charge for charge in charges}
        misfits.append(tuple(Misfit(of[balance.bucket.key], balance) for balance in _balances(rows)))
    balances = _balances(value.get("balances", []))
    return Verdict(value["state"], value.get("option"), balances, tuple(misfits), answer.book["now"])


def _settlement(answer: _Answer) -> Settlement:
    return Settlement(answer.value["counted"], answer.value["late"], _balances(answer.value["balances"]))


def _failure(op: _Op, value: Any) -> Exception | None:
    match value:
        case {"error": "rolled back"}:
            return StoreRolledBack("postgres", unquote(op.tree, errors="surrogatepass"))
        case {"error": "too late", "why": why}:
            return TooLate(op.what["id"], why)
        case {"error": "invalid", "why": why}:
            return InvalidCharge(f"{op.what['op']} of {op.what['id']}: {why}")
    return None
