"""Many streaming clients against a real server, a third of which hang up at random; then the drain is checked.

    python tests/soak.py --clients 200 --seconds 180 -- --platform=cpu --kv-cache-memory=400MiB

What follows -- goes to `isthmus serve`. K and V must be small enough to fill within half the time: pages take memory
when they are first used, and after half the time nothing may grow.

Bounded in time and in requests, and only against a server it starts itself on this machine. Exits 1 on any error that
is not the clients' own doing, on a page that does not come back, or on memory that grows.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

READY_S = 300.0  # until a server that does not get ready, idle or to its end counts as lost


def start_server(flags: list[str]) -> tuple[subprocess.Popen, str]:
    """`isthmus serve` on a free port: the process and its URL, once it is ready. What it says goes to a file: a pipe
    that nobody reads would stop it when full."""
    command = [sys.executable, "-m", "isthmus.core.cli.main", "serve", "--port=0", *flags]
    said = tempfile.NamedTemporaryFile("r", prefix="isthmus-soak-", suffix=".log")
    process = subprocess.Popen(command, stdout=open(said.name, "w"), stderr=subprocess.STDOUT)
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", Path(said.name).read_text())
        try:
            if found and httpx.get(found[0] + "/ready").status_code == 200:
                process.said = said  # lives as long as the process object
                return process, found[0]
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the server was not ready in {READY_S:g} s: {Path(said.name).read_text()[-2000:]}")


def held(process: subprocess.Popen) -> int:
    """Bytes that the server and its children hold, in memory or swapped out; the system may take files' pages."""
    parent = psutil.Process(process.pid)
    return sum(_anonymous(p) for p in [parent, *parent.children(recursive=True)])


def _anonymous(process: psutil.Process) -> int:
    told = Path(f"/proc/{process.pid}/status")
    if not told.exists():
        return process.memory_info().rss
    return 1024 * sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", told.read_text(), re.MULTILINE)))


class Client:
    """One client: requests one after the other until the time is up."""

    def __init__(self, number: int, quits: bool, stop_at: float, counts: dict[str, int], errors: list[str]):
        self.rng, self.quits, self.stop_at = random.Random(number), quits, stop_at
        self.counts, self.errors, self.number = counts, errors, number

    def body(self) -> dict:
        rng = self.rng
        words = " ".join(rng.choices(("river", "stone", "seven", "lamp", "north", "glass"), k=rng.randint(4, 60)))
        body = {"messages": [{"role": "system", "content": f"You are helper {rng.randint(0, 5)}. Be brief and kind."},
                             {"role": "user", "content": f"Tell me about: {words}"}],
                "stream": True, "max_tokens": rng.randint(4, 64), "temperature": rng.choice([0, 0.8])}
        if rng.random() < 0.2:
            body.update(stop=[". "], logprobs=True, top_logprobs=2)
        if rng.random() < 0.2:
            body.update(frequency_penalty=0.5, top_p=0.9, top_k=40, stream_options={"include_usage": True})
        if rng.random() < 0.1:
            body.update(n=2)
        return body

    async def run(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.stop_at:
            quit_after = self.rng.randint(0, 12) if self.quits else None
            try:
                await asyncio.wait_for(self.one(http, quit_after), 170)
            except Exception as error:
                self.errors.append(f"client {self.number}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)

    async def one(self, http: httpx.AsyncClient, quit_after: int | None) -> None:
        finished, events = 0, 0
        body = self.body()
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
            if quit_after == 0:
                self.counts["quit"] += 1
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    events += 1
                    finished += sum(1 for c in event["choices"] if c.get("finish_reason") in ("stop", "length"))
                if events == quit_after:
                    self.counts["quit"] += 1
                    return
                if line == "data: [DONE]":
                    if finished != body.get("n", 1):
                        raise RuntimeError(f"{finished} choices finished of {body.get('n', 1)}")
                    self.counts["done"] += 1
                    return
        raise RuntimeError("the stream ended without [DONE]")


async def load(url: str, clients: int, seconds: float, process: subprocess.Popen) -> tuple[dict, list[str], list[int]]:
    """Run the clients; sample the server's memory all the while."""
    counts, errors, memory = {"done": 0, "quit": 0}, [], []
    stop_at = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients + 8, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=180, limits=limits) as http:
        tasks = [asyncio.create_task(Client(i, i % 3 == 0, stop_at, counts, errors).run(http)) for i in range(clients)]
        while not all(t.done() for t in tasks):
            memory.append(held(process))
            await asyncio.wait(tasks, timeout=max(1.0, seconds / 60))
    return counts, errors, memory


def drained(url: str) -> dict:
    """The engine's numbers once nothing runs and the cache is flushed."""
    deadline, stats = time.monotonic() + READY_S, {}
    while time.monotonic() < deadline:
        stats = httpx.get(url + "/server_info", timeout=60).json()["stats"]
        if stats and not stats["running"] and not stats["waiting"]:  # none while the engine is in a long step
            httpx.post(url + "/flush_cache", timeout=60).raise_for_status()
            return httpx.get(url + "/server_info").json()["stats"]
        time.sleep(0.2)
    raise RuntimeError(f"still busy {READY_S:g} s after the last client left: {stats}")


def soak(clients: int, seconds: float, flags: list[str]) -> dict:
    """The whole run: what was counted, and `problems`, empty when all is well."""
    process, url = start_server(flags)
    try:
        counts, errors, memory = asyncio.run(load(url, clients, seconds, process))
        stats = drained(url)
        problems = errors[:20]
        if stats["pages_free"] != stats["pages_total"]:
            problems.append(f"{stats['pages_total'] - stats['pages_free']} pages did not come back")
        if stats["ownership_violations"]:
            problems.append(f"{stats['ownership_violations']} ownership violations")
        middle, last = memory[len(memory) // 2], memory[-1]
        if last > middle * 1.05 + 64 * 2**20:
            problems.append(f"memory grew from {middle / 2**20:.0f} MiB at half time to {last / 2**20:.0f} MiB")
        if not counts["done"] or not counts["quit"]:
            problems.append(f"the load was no load: {counts}")
        return {"clients": clients, "seconds": seconds, **counts, "errors": len(errors), "problems": problems,
                "memory_mib": [round(m / 2**20) for m in memory], "stats": stats}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags for isthmus serve, after --")
    args = parser.parse_args()
    result = soak(args.clients, args.seconds, args.flags)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
