"""Sends a server requests of all kinds, of which many leave early: `python -m benchmarks.soak`.

Requests of all routes, streamed or not, right or wrong, come from many connections at once; 30 %
close theirs at a random moment: while they wait, in their prompt, or in the middle of the answer.
Starts `jax-q4k serve`, sends requests for `--seconds`, and reports the server's memory, threads and
open files as they go. Memory that grows is a leak; pages or places that stay taken show in
`/metrics` at the end.

Writes `benchmarks/results/soak.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.results import write_results

from .common import RESULTS
from .http_servers import OurServer

#: Connections at a time, and the part of the requests that leave early.
CONNECTIONS, LEAVING = 32, 0.3
#: Seconds within which each answer must come.
PATIENCE = 120.0

PROMPTS = tuple(
    f"{beginning}{' ' * spaces}{end}"
    for beginning in ("The sea", "It was", "A little girl", "Where is the moon?", "Once")
    for spaces in range(3)
    for end in ("", "went home", "said no")
)


@dataclasses.dataclass
class Report:
    """Counts of a storm.

    Attributes:
      statuses: number of responses by status; 0 for requests that left before one came.
      left: requests that closed their connection.
      finished: answers that were read to the end.
      wrong: what was wrong with answers.
    """

    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    left: int = 0
    finished: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Ask:
    """A request.

    Attributes:
      body: its JSON.
      leaves: bytes of the response after which the client leaves, 0 before the response begins;
        None if it stays.
      pause: seconds before it leaves.
    """

    path: str
    body: dict[str, Any]
    leaves: int | None
    pause: float

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_wrong(self) -> bool:
        return "temperature" in self.body and self.body["temperature"] < 0


def ask_of(draw: random.Random) -> Ask:
    """Returns a random request."""
    text = draw.choice(PROMPTS)
    count = draw.choice([1, 3, 10, 40])
    body: dict[str, Any] = {"max_tokens": count, "temperature": 0, "stream": draw.random() < 0.6}
    path = draw.choice(["chat/completions", "completions", "completions", "messages", "responses"])
    if path == "completions":
        body |= {"prompt": text, "ignore_eos": True}
        body |= {"n": 2} if draw.random() < 0.1 else {}
    elif path == "responses":
        body |= {"input": text}
        body["max_output_tokens"] = body.pop("max_tokens")
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
    if draw.random() < 0.05:
        body["temperature"] = -1
    leaves = draw.choice([0, 0, 1, 400, 1500]) if draw.random() < LEAVING else None
    return Ask(f"/v1/{path}", body, leaves, draw.choice([0.0, 0.005, 0.05]))


async def storm(
    port: int,
    *,
    seed: int,
    goes_on: Callable[[int], bool],
    check: Callable[[Ask, bytes], str | None] = lambda ask, body: None,
    connections: int = CONNECTIONS,
    further: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> Report:
    """Sends random requests to a server on this machine, as long as `goes_on(number)` is true.

    check: returns what is wrong with the body of an answer of status 200; None if nothing is.
    further: path -> fields that bodies of this route have, too.
    """
    report, numbers = Report(), iter(range(sys.maxsize))

    async def client() -> None:
        while goes_on(number := next(numbers)):
            ask = ask_of(random.Random(f"{seed} {number}"))
            ask.body |= further.get(ask.path, {})
            try:
                async with asyncio.timeout(PATIENCE):
                    await _send(port, ask, report, check)
            except TimeoutError:
                report.wrong.append(f"{number}: no answer in {PATIENCE} s: {ask}")
            except OSError as error:
                report.wrong.append(f"{number}: {error!r}: {ask}")

    await asyncio.gather(*(client() for _ in range(connections)))
    return report


async def _send(
    port: int, ask: Ask, report: Report, check: Callable[[Ask, bytes], str | None]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(ask.body).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if ask.leaves is not None:
            found = await reader.read(ask.leaves) if ask.leaves else b""
            await asyncio.sleep(ask.pause)
            report.left += 1
            report.statuses[_status(found) if len(found) > 12 else 0] += 1
            return
        found = await reader.read()
        while not reader.at_eof():
            found += await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    status = _status(found)
    report.statuses[status] += 1
    headers, _, rest = found.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in headers.lower():
        rest = b"".join(_chunks(rest))
    problem = None
    if status == 200:
        report.finished += 1
        problem = check(ask, rest)
    elif status == 429:
        await asyncio.sleep(0.1)
    elif status != 400 or not ask.is_wrong:
        problem = f"status {status}, {rest[:200]!r}"
    if problem is not None:
        report.wrong.append(f"{ask}: {problem}")


def _status(response: bytes) -> int:
    return int(response[9:12] or 0)


def _chunks(body: bytes) -> Iterator[bytes]:
    """Yields the chunks of a body; raises ValueError if the last is not there."""
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return
        yield body[:count]
        body = body[count + 2 :]


def is_whole(ask: Ask, body: bytes) -> str | None:
    """Returns what is wrong with an answer: a stream without its end, or JSON that is none."""
    if not ask.streams:
        return None if json.loads(body) else "empty"
    last = body.strip().rsplit(b"\n\n", 1)[-1]
    ends = {"/v1/messages": b"event: message_stop", "/v1/responses": b"event: response."}
    begins = ends.get(ask.path, b"data: [DONE]")
    return None if last.startswith(begins) else f"the stream ends with {last[:200]!r}"


def soak(model: str, seconds: float, *, sample: float = 10.0) -> dict[str, Any]:
    """Returns the counts of a storm, and the server's resources every `sample` seconds."""
    with OurServer(model, "--rows", "8", "--context", "256", "--queue", "20") as server:
        began, sent = time.monotonic(), 0
        samples: list[dict[str, float]] = []

        def goes_on(number: int) -> bool:
            nonlocal sent
            sent, now = number, time.monotonic() - began
            if now >= sample * len(samples):
                samples.append({"seconds": round(now), "requests": number, **server.resources()})
                print(samples[-1], flush=True)
            return now < seconds

        report = asyncio.run(storm(server.port, seed=0, goes_on=goes_on, check=is_whole))
        deadline = time.monotonic() + 10
        while (left := _left(server)) != (0, 0, 0) and time.monotonic() < deadline:
            time.sleep(0.1)
        samples.append({"seconds": round(seconds), "requests": sent, **server.resources()})
    steady = [one for one in samples if one["requests"] >= sent / 10]
    grown = (steady[-1]["rss_mb"] - steady[0]["rss_mb"]) if len(steady) > 1 else 0.0
    return {
        "seconds": seconds,
        "requests": sent,
        "statuses": {str(status): count for status, count in sorted(report.statuses.items())},
        "left_early": report.left,
        "finished": report.finished,
        "wrong": report.wrong[:10],
        "running_waiting_pages_at_end": left,
        "rss_mb_per_1000_requests": round(1000 * grown / max(sent, 1), 3),
        "samples": samples,
    }


def _left(server: OurServer) -> tuple[float, ...]:
    """Returns the running and the waiting requests, and the part of the pages they hold."""
    found = server.metrics()
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    return tuple(found[f"jax_q4k:{name}"] for name in names)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--model", default="demo", help="GGUF file; default: the demo model")
    parser.add_argument("--seconds", type=float, default=3600, help="default: %(default)s")
    options = parser.parse_args(arguments)
    results = soak(options.model, options.seconds)
    print(write_results(options.file, results))
    return 1 if results["wrong"] or any(results["running_waiting_pages_at_end"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
