"""A judge on this machine that gives every reply a grade, some seconds after it was asked."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Grade: 1"}}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def serve_judge(wait_s: float) -> Iterator[str]:
    """Serves until the block ends; gives its address, up to `/v1`."""
    loop = asyncio.new_event_loop()

    async def answer_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(size.partition(b":")[2]))
            await asyncio.sleep(wait_s)
            writer.write(HEAD % len(ANSWER) + ANSWER)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):  # who asked is gone
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(answer_request, "127.0.0.1", 0, backlog=1024))
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="judge")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        waiting = asyncio.all_tasks(loop)
        for task in waiting:
            task.cancel()
        if waiting:
            loop.run_until_complete(asyncio.wait(waiting))
        loop.close()
