"""servers: a real PostgreSQL and an S3 server on this machine, for tests and for trying Troupe past one machine.

    python -m tests.servers [--port N]    an S3 server on the loopback interface until Ctrl-C, and how to use it

S3 is moto's, with conditional writes made atomic: LanceDB commits a version by a PUT with `If-None-Match: *`, and moto
looks and writes in two steps, between which its other threads run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
BUCKET = "troupe"


@dataclass(frozen=True)
class Postgres:
    """A running server. Its password is in PGPASSWORD, where every client looks."""

    port: int
    password: str

    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database, without the password."""
        return f"postgresql+psycopg://troupe@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Makes an empty database; returns its URL."""
        import psycopg

        with psycopg.connect(f"postgresql://troupe@127.0.0.1:{self.port}/postgres", autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def takes_connections(self) -> bool:
        """Whether it does: its port is open earlier, while it starts up."""
        import psycopg

        try:
            psycopg.connect(f"postgresql://troupe:{self.password}@127.0.0.1:{self.port}/postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def environment(self) -> dict[str, str]:
        """What clients need in their environment."""
        return {"PGPASSWORD": self.password}


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL with a data folder of its own, gone at the end. The server refuses root: then it runs as `nobody`."""
    programs = _postgres_programs()
    user = "nobody" if os.geteuid() == 0 else None
    server = Postgres(free_port(), secrets.token_hex(8))
    folder = Path(tempfile.mkdtemp(prefix="postgres-for-tests-"))
    try:
        (folder / "password").write_text(server.password)
        if user is not None:
            owner = pwd.getpwnam(user)
            for path in (folder, folder / "password"):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        data, log = folder / "data", folder / "log"
        initdb = [programs / "initdb", "--username=troupe", "--auth=scram-sha-256", f"--pwfile={folder}/password"]
        made = subprocess.run(
            [*initdb, "--no-sync", "--encoding=UTF8", "--locale=C", data],
            user=user,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": server.port,
            "unix_socket_directories": folder,
            "fsync": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [programs / "postgres", "-D", data, *options],
                user=user,
                cwd=folder,
                stdout=out,
                stderr=out,
                preexec_fn=lambda: _end_with_parent(signal.SIGINT),
            )
        try:
            _wait(process, server.takes_connections, log)
            yield server
        finally:
            _end(process, signal.SIGINT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class S3:
    """A running server: one of ours with an empty bucket, or one that the environment leads to."""

    port: int = 0
    given_uri: str = ""
    """A bucket or folder on a server that is not ours."""

    @property
    def uri(self) -> str:
        """The bucket."""
        return self.given_uri or f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which LanceDB, pyarrow and boto3 find it."""
        if self.given_uri:
            return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "troupe",
            "AWS_SECRET_ACCESS_KEY": "troupe-secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3(port: int = 0) -> Iterator[S3]:
    """An S3 server in a process of its own; what it keeps is gone at the end."""
    server = S3(port or free_port())
    command = [sys.executable, __file__, "--serve", str(server.port)]
    with tempfile.TemporaryDirectory(prefix="s3-for-tests-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, preexec_fn=lambda: _end_with_parent(signal.SIGKILL)
            )
        try:
            _wait(process, lambda: _answers(server.port), log)
            _make_bucket(server.environment)
            yield server
        finally:
            _end(process, signal.SIGTERM)


def free_port() -> int:
    """A port that nobody listens on, above those that Ray gives to workers and below those that connections get.

    One of theirs may be taken again before a server that takes half a minute to start binds it.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _postgres_programs() -> Path:
    """The folder with initdb and postgres: Debian does not put them on the PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    assert folders, "PostgreSQL's server is not installed: make system"
    return folders[-1]


def _make_bucket(environment: Mapping[str, str]) -> None:
    import boto3

    boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    ).create_bucket(Bucket=BUCKET)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        assert process.poll() is None, f"{process.args} ended: {log.read_text()}"
        assert time.monotonic() < deadline, (
            f"{process.args} does not answer after {START_TIMEOUT_S:g} s: {log.read_text()}"
        )
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_with_parent(how: signal.Signals) -> None:
    """Runs in the child: a test run that is killed leaves no server behind (PR_SET_PDEATHSIG, Linux)."""
    ctypes.CDLL(None).prctl(1, how)


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def atomic(environ: dict[str, Any], start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ and "HTTP_IF_MATCH" not in environ:
            return app(environ, start_response)
        with one_at_a_time:
            return app(environ, start_response)

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *args: Any) -> None:
            """Says nothing: one line per request is a lot."""

    run_simple("127.0.0.1", port, atomic, threaded=True, request_handler=Quiet)


def main() -> None:
    """An S3 server for trying things out."""
    parser = argparse.ArgumentParser(description="An S3 server on this machine, empty at every start.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(arguments.serve)
        return
    with s3(arguments.port) as server:
        print("\n".join(f"export {name}={value}" for name, value in server.environment.items()))
        print(f"# bucket {server.uri}; Ctrl-C ends the server", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
