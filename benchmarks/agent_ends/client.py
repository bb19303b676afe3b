"""Streams chats from many sessions at once, over bare sockets: costs as little as a client can.

Reads one line of JSON from its standard input, {"urls": [...], "max_tokens": n}; streams one chat
per URL at the same time; writes {"tokens": n, "seconds": s, "cpu_s": s}.
"""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit


async def stream(url: str, prompt: str, max_tokens: int) -> int:
    """Return the tokens that the server counted."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    body = json.dumps(
        {
            "model": "policy",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    writer.write(
        f"POST {target.path}/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            last = line
    writer.close()
    return int(json.loads(last[6:])["usage"]["completion_tokens"])


async def main() -> None:
    """Serve one round after the other."""
    for line in sys.stdin:
        asked = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(
            *(
                stream(url, prompt, asked["max_tokens"])
                for url, prompt in zip(asked["urls"], asked["prompts"], strict=True)
            )
        )
        spent = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        sys.stdout.write(json.dumps({"tokens": sum(counts), **spent}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
