"""forward: connections to a port of this machine's loopback -> a Unix socket. `python3 forward.py PORT SOCKET`.

It runs in the network of a program's container, where nothing else is in reach: see `serve_apps.program.container`. It says
`ready` when it listens, and ends with its standard input. Standard library only, Python 3.7 or newer: the image is not ours.
"""

import asyncio
import sys

BLOCK = 65536


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copies bytes until the source ends, and then ends what the target receives; the other direction goes on."""
    try:
        while True:
            block = await source.read(BLOCK)
            if not block:
                break
            target.write(block)
            await target.drain()
        target.write_eof()
    except OSError:
        target.close()


async def main(port: int, path: str) -> None:
    """Forwards until standard input ends."""
    # The event loop refers to tasks and readers only weakly: a connection that waits would be garbage to the collector.
    connections: set[asyncio.Task[None] | None] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        connections.add(task)
        try:
            await forward(reader, writer)
        finally:
            connections.discard(task)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        far_writer.close()
        writer.close()

    await asyncio.start_server(connect, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
