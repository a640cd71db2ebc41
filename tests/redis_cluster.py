"""Several Redis or Valkey servers that belong together, for the tests: a cluster with replicas, a primary with its Sentinel."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from tests.redis_server import Server, free_port, programs, running

SLOTS = 16_384
SERVICE = "budgets"
"""The name by which Sentinel knows the primary."""


def until(condition: Callable[..., Any], *args: Any) -> None:
    """Wait until a condition holds that other processes work at. Raises TimeoutError after half a minute."""
    end = time.monotonic() + 30
    while not condition(*args):
        if time.monotonic() > end:
            raise TimeoutError("it never came to be")
        time.sleep(0.01)  # lets the other processes have their turn


def has_all(replica: Server, primary: Server) -> bool:
    """Tell whether a replica has all that its primary wrote."""
    with primary.client() as above, replica.client() as below:
        info = below.info("replication")
        written: int = above.info("replication")["master_repl_offset"]
        return bool(info.get("master_link_status") == "up" and info["slave_repl_offset"] >= written)


def cut_off(replica: Server, primary: Server) -> None:
    """Part a replica from its primary, which goes on: what that writes from here on, the replica will never have."""
    until(has_all, replica, primary)
    with primary.client() as above, replica.client() as below:
        below.config_set("masteruser", "nobody")  # it will not be let in again
        below.config_set("masterauth", "wrong")
        above.execute_command("CLIENT", "KILL", "TYPE", "replica")
        until(lambda: below.info("replication")["master_link_status"] == "down")


@dataclass
class Cluster:
    """Primaries that share the slots, and a replica of each: `replicas[i]` is that of `primaries[i]`, as they began."""

    primaries: list[Server]
    replicas: list[Server]

    def start(self, buses: dict[int, int]) -> None:
        """Let the servers meet, share the slots out and wait until all agree. `buses` has the port of each one's bus."""
        first = self.primaries[0]
        share = -(-SLOTS // len(self.primaries))
        for number, primary in enumerate(self.primaries):
            with primary.client() as client:
                # Epochs of their own from the start, or they first have to find out that they are the same.
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, min((number + 1) * share, SLOTS) - 1)
        servers = [*self.primaries, *self.replicas]
        for server in servers[1:]:
            with server.client() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", first.port, buses[first.port])
        for server in servers:
            until(self.knows, server, len(servers))
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            with replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", self.id(primary))
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            until(has_all, replica, primary)
        for server in servers:
            until(self.agrees, server)

    @property
    def alive(self) -> list[Server]:
        """The servers that were not killed."""
        return [server for server in [*self.primaries, *self.replicas] if server.process is not None]

    def nodes(self, server: Server) -> dict[int, str]:
        """Return the flags of the nodes that a server knows, by port."""
        with server.client() as client:
            found = client.execute_command("CLUSTER NODES")
        return {int(address.rsplit(":", 1)[1]): node["flags"] for address, node in found.items()}

    def knows(self, server: Server, many: int) -> bool:
        """Tell whether a server knows so many nodes."""
        return len(self.nodes(server)) == many

    def agrees(self, server: Server) -> bool:
        """Tell whether a server finds that all is well and knows who is a replica."""
        with server.client() as client:
            well = client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
        nodes = self.nodes(server)
        return well and all("slave" in nodes[replica.port] for replica in self.replicas)

    def id(self, server: Server) -> str:
        """Return the name that a server has in the cluster."""
        with server.client() as client:
            return str(client.execute_command("CLUSTER MYID"))

    def slot(self, key: str) -> int:
        """Return the slot of a key."""
        with self.alive[0].client() as client:
            return int(client.execute_command("CLUSTER KEYSLOT", key))

    def other(self, server: Server) -> Server:
        """Return the server that stands by for another, or that the other stands by for."""
        servers = [*self.primaries, *self.replicas]
        return servers[(servers.index(server) + len(self.primaries)) % len(servers)]

    def owner(self, slot: int) -> Server:
        """Return who serves a slot, as all who are alive see it; while they do not agree, wait."""
        owners: set[int] = set()

        def one() -> bool:
            owners.clear()
            for server in self.alive:
                with server.client() as client:
                    for low, high, (_, port, *_), *_ in client.execute_command("CLUSTER SLOTS"):
                        if low <= slot <= high:
                            owners.add(port)
            return len(owners) == 1 and bool(owners & {server.port for server in self.alive})

        until(one)
        return next(server for server in self.alive if server.port in owners)

    def move(self, slot: int, source: Server, target: Server) -> Iterator[str]:
        """Move a slot key by key, as `--cluster reshard` does; yields "begun", each key that has moved, and "moved"."""
        with source.client() as at, target.client() as to:
            to.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id(source))
            at.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.id(target))
            yield "begun"
            while True:
                keys = at.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
                for key in sorted(keys, key=_order):
                    at.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
                    yield key
                if not keys:
                    break
            for client in (to, at):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", self.id(target))
            yield "moved"


def _order(key: str) -> tuple[bool, str]:
    """Put the records of ids last: what leads to them is there, and they are not."""
    return ":i:" in key, key


@contextlib.contextmanager
def cluster(program: str | None = None, *, size: int = 3) -> Iterator[Cluster]:
    """Run a cluster of so many primaries with a replica each until the block ends."""
    buses: dict[int, int] = {}
    with ExitStack() as stack:
        servers = []
        for _ in range(2 * size):
            bus = free_port()  # a port of its own: the default, 10,000 above the first, may not exist
            server = stack.enter_context(
                running(
                    *("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "1000"),
                    *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
                    *("--cluster-require-full-coverage", "no"),  # a server that is gone is no reason for the others to stop
                    program=program,
                )
            )
            buses[server.port] = bus
            servers.append(server)
        found = Cluster(servers[:size], servers[size:])
        found.start(buses)
        yield found


@dataclass
class Watched:
    """A primary with a replica, and the port of the Sentinel that puts the one in the place of the other."""

    primary: Server
    replica: Server
    sentinel: int

    def ask(self) -> Redis:
        """Return a client of the Sentinel."""
        return Redis(port=self.sentinel, decode_responses=True)

    def leads(self, server: Server) -> bool:
        """Tell whether Sentinel names that server as the primary, and it is one."""
        with self.ask() as sentinel, server.client() as client:
            _, port = sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(port) == server.port and client.info("replication")["role"] == "master"


@contextlib.contextmanager
def watched(program: str | None = None) -> Iterator[Watched]:
    """Run a primary, its replica and one Sentinel until the block ends."""
    fast = ("--repl-diskless-sync-delay", "0")
    with ExitStack() as stack:
        primary = stack.enter_context(running(*fast, program=program))
        replica = stack.enter_context(running(*fast, "--replicaof", f"127.0.0.1 {primary.port}", program=program))
        until(has_all, replica, primary)
        sentinel = stack.enter_context(_sentinel(primary, program or programs()["valkey"]))
        found = Watched(primary, replica, sentinel.port)
        with found.ask() as client:
            until(client.execute_command, "SENTINEL REPLICAS", SERVICE)
        yield found


@contextlib.contextmanager
def _sentinel(primary: Server, program: str) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    rules = folder / "sentinel.conf"  # it writes into it what it finds out
    rules.write_text(
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 300\n"
        f"sentinel failover-timeout {SERVICE} 2000\n",
        "utf-8",
    )
    server = Server(program, folder, rules=rules)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
