"""``python -m benchmarks.real_kv GATEWAY_URL``: whether what the gateway knows of real engines' caches is so.

By hand, against engines that run already: two or more of one kind with KV events on, that report cached tokens
(SGLang ``--enable-cache-report``, vLLM ``--enable-prompt-tokens-details``), as all the workers of one gateway.
Groups of requests share a prefix. Each but the first of a group should go where the first went, and the engine's
``cached_tokens`` should be ``x-forebay-overlap-blocks`` times the page size, give or take a page. Prints a table in
Markdown; exits with 1 if a cache was assumed that was not there.

``--kill CMD --start CMD``: shell commands that kill and start the worker of ``--victim``; checks only what follows.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchmarks.real_engines import Answer, fetch

# Ids that every tokenizer has, and that are no special ones.
_IDS: Final = range(10, 300)
_PREFIX_TOKENS: Final = 256
_WORDS: Final = ("gateway", "engine", "fox", "dog", "Paris", "world", "hello", "brown", "quick", "lazy", "France")
_GIVE_UP_S: Final = 150.0

Body = dict[str, Any]
# Makes the next request of a group: its route and its body.
Ask = Callable[[], tuple[str, Body]]


@dataclass(slots=True)
class Row:
    """What the requests of one part gave.

    Attributes:
        warm: Requests that followed another with the same prefix.
        followed: Those of them that went where it went.
        differences: The engine's cached tokens less what the gateway expected, of all requests.
        false_hits: Requests of which the engine had cached less than expected by more than a page.
    """

    name: str
    warm: int = 0
    followed: int = 0
    differences: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    false_hits: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, expected_tokens: int, cached_tokens: int, page: int) -> None:
        """Note one answer."""
        self.expected.append(expected_tokens)
        self.differences.append(cached_tokens - expected_tokens)
        self.false_hits += cached_tokens < expected_tokens - page

    def line(self, page: int) -> str:
        """One line of the table."""
        near = sum(abs(difference) <= page for difference in self.differences)
        spread = f"{min(self.differences)} to {max(self.differences)}" if self.differences else "–"
        typical = f"{statistics.median(self.expected):.0f}" if self.expected else "–"
        counts = f"{len(self.differences)} | {self.followed} of {self.warm} | {near} | {typical} | {spread}"
        return f"| {self.name} | {counts} | {self.false_hits} | {'; '.join(self.wrong) or 'none'} |"


class Bench:
    """The gateway, its workers, and the tries.

    Args:
        gateway: Its URL.
        groups: Prefixes of each part.
        repeats: Requests with each.
        seed: Of the prompts.
    """

    def __init__(self, gateway: str, *, groups: int, repeats: int, seed: int) -> None:
        self.gateway = gateway
        self.groups = groups
        self.repeats = repeats
        self.random = random.Random(seed)
        self.rows: list[Row] = []
        self.page = 0
        self.model = ""
        self.sglang = False

    async def learn(self) -> None:
        """Read what the gateway knows of its workers."""
        workers = await self.workers()
        self.page, self.model = workers[0]["page_size"], workers[0]["model_id"]
        self.sglang = workers[0]["engine"] == "sglang"
        for worker in workers:
            print(f"{worker['id']}: {worker['engine']} {worker['engine_version']}, kv {worker['kv']}")

    async def workers(self) -> list[Any]:
        """The gateway's workers."""
        found: list[Any] = (await fetch(self.gateway, "/workers")).json()["workers"]
        return found

    async def send(self, path: str, body: Body) -> tuple[str, int, int]:
        """One request: the worker, the tokens expected to be cached, and those that were."""
        answer = await fetch(self.gateway, path, body)
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.body[:200]!r}")
        overlap = int(answer.headers.get("x-forebay-overlap-blocks", "0"))
        return answer.headers["x-forebay-worker"], overlap * self.page, cached_tokens(answer)

    async def overlaps(self, path: str, body: Body) -> dict[str, int]:
        """What the gateway says each worker has of a prompt, in blocks; sends nothing to an engine."""
        answer = await fetch(self.gateway, f"/route/explain?path={path}", body)
        return {one["worker_id"]: one.get("overlap_blocks") or 0 for one in answer.json()["candidates"]}

    def ids(self, length: int) -> list[int]:
        """Token ids at random."""
        return [self.random.choice(_IDS) for _ in range(length)]

    def text(self, words: int) -> str:
        """A text at random."""
        return " ".join(self.random.choice(_WORDS) for _ in range(words))

    def in_ids(self, prefix: list[int], *, salt: str = "") -> tuple[str, Body]:
        """A request with token ids, which begins with the prefix."""
        ids = prefix + self.ids(self.random.randrange(8, 40))
        if self.sglang:
            return "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, **_salt(salt)}
        return "/v1/completions", {"model": self.model, "prompt": ids, "max_tokens": 4, **_salt(salt)}

    def in_text(self, prefix: str) -> tuple[str, Body]:
        """The same with text."""
        text = f"{prefix} {self.text(self.random.randrange(8, 40))}"
        if self.sglang:
            return "/generate", {"text": text, "sampling_params": {"max_new_tokens": 4}}
        return "/v1/completions", {"model": self.model, "prompt": text, "max_tokens": 4}

    def in_chat(self, prefix: str) -> tuple[str, Body]:
        """The same as a chat, whose first message is the prefix."""
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": self.text(12)}]
        return "/v1/chat/completions", {"model": self.model, "messages": messages, "max_tokens": 4}

    async def part(self, name: str, groups: Sequence[Ask], *, at_once: int = 1) -> None:
        """Send the requests of all groups in turn, ``at_once`` of each group together after its first."""
        row = Row(name)
        first: dict[int, str] = {}
        for turn in range(self.repeats):
            for number, make in enumerate(groups):
                together = 1 if turn == 0 else at_once
                async with asyncio.TaskGroup() as group:
                    calls = [group.create_task(self.send(*make()), name=name) for _ in range(together)]
                for call in calls:
                    worker, expected, cached = call.result()
                    row.add(expected, cached, self.page)
                    if turn:
                        row.warm += 1
                        row.followed += worker == first[number]
                    first.setdefault(number, worker)
        self.say(row)

    def say(self, row: Row) -> None:
        """Print a row, and keep it."""
        print(row.line(self.page), flush=True)
        self.rows.append(row)


def _salt(salt: str) -> Body:
    return {"cache_salt": salt} if salt else {}


def cached_tokens(answer: Answer) -> int:
    """Prompt tokens that an engine says it had."""
    body = answer.json()
    if "meta_info" in body:
        return int(body["meta_info"]["cached_tokens"])
    return int((body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def prefixes(bench: Bench) -> None:
    """Prompts in ids, one after the other, four at once, and of two tenants; then in text, and as chats."""

    def ids(salt: str = "") -> list[Ask]:
        found = [bench.ids(_PREFIX_TOKENS) for _ in range(bench.groups)]
        return [partial(bench.in_ids, prefix, salt=salt) for prefix in found]

    def texts(make: Callable[[str], tuple[str, Body]]) -> list[Ask]:
        return [partial(make, bench.text(120)) for _ in range(bench.groups)]

    await bench.part("token ids", ids())
    await bench.part("token ids, four at once", ids(), at_once=4)
    shared = bench.ids(_PREFIX_TOKENS)
    both = [partial(bench.in_ids, shared, salt=salt) for salt in ("tenant-a", "tenant-b")]
    await bench.part("token ids, one prefix, two salts", both)
    await bench.part("text", texts(bench.in_text))
    await bench.part("chats", texts(bench.in_chat))


async def flush(bench: Bench) -> None:
    """A worker's cache is emptied through the gateway."""
    row = Row("after flushing through the gateway")
    route = "flush_cache" if bench.sglang else "reset_prefix_cache"
    for _ in range(bench.groups):
        prefix = bench.ids(_PREFIX_TOKENS)
        worker, _, _ = await bench.send(*bench.in_ids(prefix))
        await _announced(bench, prefix, worker)
        answer = await fetch(bench.gateway, f"/workers/{worker}/call/{route}", {})
        if answer.status != 200:
            row.wrong.append(f"{route}: {answer.status}")
        left = (await bench.overlaps(*bench.in_ids(prefix)))[worker]
        if left:
            row.wrong.append(f"{left} blocks left")
        _, expected, cached = await bench.send(*bench.in_ids(prefix))
        row.add(expected, cached, bench.page)
    bench.say(row)


async def restart(bench: Bench, victim: str, kill: str, start: str) -> None:
    """A worker dies and comes back with an empty cache: what it had is not expected of it, what it gets is."""
    row = Row("after kill -9 and restart")
    prefix = bench.ids(_PREFIX_TOKENS)
    pinned = {"x-forebay-worker": victim}
    path, body = bench.in_ids(prefix)
    await fetch(bench.gateway, path, body, pinned)
    await _announced(bench, prefix, victim)
    await _shell(kill)
    for _ in range(bench.repeats):  # elsewhere, meanwhile
        worker, expected, cached = await bench.send(*bench.in_ids(prefix))
        row.add(expected, cached, bench.page)
        if worker == victim:
            row.wrong.append("sent to the dead worker")
    await _shell(start)
    began = time.monotonic()
    while True:
        left = (await bench.overlaps(*bench.in_ids(prefix))).get(victim, 0)
        if left:
            row.wrong.append(f"{left} blocks expected of the new process")
        (found,) = [worker for worker in await bench.workers() if worker["id"] == victim]
        if found["is_ready"] and found["kv"]["state"] == "live":
            break
        if time.monotonic() - began > _GIVE_UP_S:
            raise TimeoutError(f"the worker is {found['state']}, its events {found['kv']}")
        await asyncio.sleep(0.1)
    print(f"followed again {time.monotonic() - began:.1f} s after the command to start it: {found['kv']}")
    fresh = bench.ids(_PREFIX_TOKENS)
    for turn in range(bench.repeats):
        path, body = bench.in_ids(fresh)
        answer = await fetch(bench.gateway, path, body, pinned if turn == 0 else None)
        overlap = int(answer.headers.get("x-forebay-overlap-blocks", "0"))
        row.add(overlap * bench.page, cached_tokens(answer), bench.page)
        if turn:
            row.warm += 1
            row.followed += answer.headers["x-forebay-worker"] == victim
    bench.say(row)


async def _announced(bench: Bench, prefix: list[int], worker: str) -> None:
    """Wait until the gateway knows that a worker has a prefix."""
    for _ in range(200):
        if (await bench.overlaps(*bench.in_ids(prefix))).get(worker, 0) * bench.page >= len(prefix) - bench.page:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{worker} has not announced a prefix")


async def _shell(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if await process.wait():
        raise OSError(f"{command!r} ended with {process.returncode}")


async def run(arguments: argparse.Namespace) -> int:
    """Run the parts that were asked for."""
    bench = Bench(arguments.gateway, groups=arguments.groups, repeats=arguments.repeats, seed=arguments.seed)
    await bench.learn()
    print(
        "| part | requests | on the warm worker | within a page | tokens expected (median) | cached less expected",
        end="",
    )
    print(" | false hits | wrong |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    if arguments.kill:
        await restart(bench, arguments.victim, arguments.kill, arguments.start)
    else:
        await prefixes(bench)
        await flush(bench)
    metrics = (await fetch(bench.gateway, "/metrics")).body.decode().splitlines()
    for line in metrics:
        if line.startswith(("forebay_kv_", "forebay_route_zero")) and not line.endswith(" 0.0"):
            print(line)
    return 1 if any(row.false_hits or row.wrong for row in bench.rows) else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_kv", description=__doc__)
    parser.add_argument("gateway", help="URL of the gateway")
    parser.add_argument("--groups", type=int, default=6, help="prefixes of each part (default: 6)")
    parser.add_argument("--repeats", type=int, default=5, help="requests with each (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--victim", default="", help="id of the worker to be killed")
    parser.add_argument("--kill", default="", help="shell command that kills it")
    parser.add_argument("--start", default="true", help="shell command that starts it again")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
