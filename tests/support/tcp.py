"""A TCP relay in front of a real server, for tests that lose bytes on purpose."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

#: Gets what one side sends, a chunk at a time, and returns what the other is to see of it.
Filter = Callable[[bytes], bytes]


def _all(data: bytes) -> bytes:
    return data


@contextlib.asynccontextmanager
async def between(
    host: str, port: int, to_client: Filter = _all, *, to_server: Filter = _all
) -> AsyncIterator[int]:
    """Listen on a free port and pass everything on; yields the port."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Filter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(change(data))
                    await writer.drain()
        finally:
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection(host, port)
        writers.append(up_writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, up_writer, to_server))
            group.create_task(pump(up_reader, writer, to_client))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
