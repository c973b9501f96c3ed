"""Kills processes of a loaded server at random and looks whether everybody gets over it.

    python tests/chaos.py --times 100

Each time one of the server's three processes is killed with SIGKILL, now and then a second one while the first is being
started anew. Whatever was asked before the kill must be answered, with an error or not, within 5 s; the supervisor must
bring the engine back; when the process of the API itself was killed, its workers must end and a new server must come up
beside what it left. At the end no process, no socket folder and no shared memory may be left. Exits 1 otherwise.

Only processes that this script has started are killed. The model is a tiny one on the null platform.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

ANSWER_S = 5.0     # the most that an answer may take after a kill
RECOVER_S = 120.0  # until a server that is not ready counts as lost; nothing is measured by it
ROLES = ("scheduler", "detokenizer", "api")
FLAGS = ("--platform=null", "--platform-option=delay_ms=2", "--restart=1000", "--kv-cache-memory=4MiB", "--port=0",
         "--log-level=warning")


class Server:
    """`isthmus serve` with its workers."""

    def __init__(self, model: str, folder: Path, flags: tuple[str, ...] = ()):
        self.said = open(folder.parent / "server.log", "a+")
        start = self.said.seek(0, os.SEEK_END)
        self.process = subprocess.Popen([sys.executable, "-m", "isthmus", "serve", model, *FLAGS, *flags],
                                        stdout=self.said, stderr=subprocess.STDOUT,
                                        env={**os.environ, "TMPDIR": str(folder)})
        self.known: dict[int, psutil.Process] = {self.process.pid: psutil.Process(self.process.pid)}
        self.shared: set[str] = set()  # files of shared memory that a worker had
        deadline, found = time.monotonic() + RECOVER_S, None
        while not found:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not start: {Path(self.said.name).read_text()[-2000:]}")
            time.sleep(0.05)
            text = Path(self.said.name).read_bytes()[start:].decode(errors="replace")
            found = re.search(r"ready .*?(http://127\.0\.0\.1:\d+)|(http://127\.0\.0\.1:\d+)", text)
        self.url = found[1] or found[2]

    def workers(self) -> dict[str, psutil.Process]:
        """The workers that live, by role."""
        found = {}
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.known[child.pid] = child
                self.shared.update(m.path for m in child.memory_maps() if m.path.startswith("/dev/shm"))
                role = " ".join(child.cmdline()).rpartition(".")[2]
                if role in ROLES:
                    found[role] = child
        except psutil.Error:  # it is gone, or going
            pass
        return found

    def alive(self) -> list[int]:
        """Processes of this server, of whatever time, that are still there."""
        return [pid for pid, process in self.known.items()
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


class Load:
    """Clients that stream one completion after the other. asked: when each running request was sent."""

    def __init__(self, clients: int, answer_s: float):
        self.clients, self.answer_s, self.url, self.stop = clients, answer_s, "", False
        self.asked: dict[int, float] = {}
        self.counts = {"done": 0, "failed": 0, "refused": 0}
        self.ended: dict[int, float] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.clients + 4)
        async with httpx.AsyncClient(timeout=2 * self.answer_s + 60, limits=limits) as http:
            self.http = http
            await asyncio.gather(*(self._client(i) for i in range(self.clients)))

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self.stop:
            if not self.url:
                await asyncio.sleep(0.02)
                continue
            self.asked[number] = time.monotonic()
            try:
                outcome = await self._ask(rng)
            except httpx.HTTPError:
                outcome = "failed"
            del self.asked[number]
            self.counts[outcome] += 1
            if outcome != "done":
                await asyncio.sleep(0.05)

    async def _ask(self, rng: random.Random) -> str:
        body = {"prompt": "so " * rng.randint(1, 30), "max_tokens": rng.randint(1, 80), "stream": True,
                "stop": ["zz"] if rng.random() < 0.3 else None}
        async with self.http.stream("POST", self.url + "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return "refused"
            async for line in response.aiter_lines():
                if line.startswith("data: {") and "error" in json.loads(line[6:]):
                    return "failed"
                if line == "data: [DONE]":
                    return "done"
        return "failed"

    async def answered(self, since: float) -> float:
        """Wait until all that was asked before `since` has ended: seconds that it took, at most `answer_s`."""
        while any(at < since for at in self.asked.values()):
            if time.monotonic() - since > self.answer_s:
                break
            await asyncio.sleep(0.01)
        return time.monotonic() - since


class Chaos:
    """The whole run. problems: empty when all is well."""

    def __init__(self, folder: Path, model: str, clients: int, seed: int, answer_s: float):
        self.folder, self.model, self.rng = folder, model, random.Random(seed)
        self.load, self.problems, self.most_s = Load(clients, answer_s), [], answer_s
        self.kills = dict.fromkeys(ROLES, 0)
        self.answer_s, self.recovery_s = [], []
        self.shared: set[str] = set()

    async def run(self, times: int) -> dict:
        server = await self._start()
        running = asyncio.create_task(self.load.run())
        try:
            while sum(self.kills.values()) < times and not self.problems:
                await asyncio.sleep(self.rng.uniform(0.1, 0.8))
                server = await self._kill(server)
            await asyncio.sleep(0.5)
        finally:
            self.load.stop = True
            server.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(server.process.wait, RECOVER_S)
            await running
        if code != 0:
            self.problems.append(f"the last server ended with code {code}")
        await self._nothing_left(server)
        if not self.load.counts["done"] or not self.load.counts["failed"]:
            self.problems.append(f"the load was no load: {self.load.counts}")
        return {"kills": self.kills, **self.load.counts, "slowest_answer_s": round(max(self.answer_s), 2),
                "slowest_recovery_s": round(max(self.recovery_s), 2), "problems": self.problems}

    async def _start(self) -> Server:
        server = await asyncio.to_thread(Server, self.model, self.folder)
        await self._ready(server)
        self.load.url = server.url
        return server

    async def _kill(self, server: Server) -> Server:
        """Kill one process, or two in short order, and see to what follows; the server that runs then."""
        roles = [self.rng.choice(ROLES)]
        if self.rng.random() < 0.2:
            roles.append(self.rng.choice(ROLES))
        began = time.monotonic()
        for role in roles:
            victim = server.process if role == "api" else server.workers().get(role)
            if victim is None:
                continue
            server.workers()
            at = time.monotonic()
            victim.kill()
            self.kills[role] += 1
            took = await self.load.answered(at)
            self.answer_s.append(took)
            if took > self.most_s:
                self.problems.append(f"{len(self.load.asked)} requests were not answered {took:.1f} s after {role} "
                                     "was killed")
            if role == "api":
                self.load.url = ""
                await asyncio.to_thread(server.process.wait)
                await self._gone(server)
                self.shared |= server.shared
                server = await self._start()
                break
        await self._ready(server)
        self.recovery_s.append(time.monotonic() - began)
        return server

    async def _ready(self, server: Server) -> None:
        deadline = time.monotonic() + RECOVER_S
        async with httpx.AsyncClient(timeout=5) as http:
            while time.monotonic() < deadline:
                try:
                    if (await http.get(server.url + "/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    if server.process.poll() is not None:
                        break
                await asyncio.sleep(0.05)
        self.problems.append(f"the server is not ready; its exit code is {server.process.poll()}")

    async def _gone(self, server: Server) -> None:
        deadline = time.monotonic() + self.most_s
        while left := server.alive():
            if time.monotonic() > deadline:
                self.problems.append(f"processes {left} outlive their server")
                return
            await asyncio.sleep(0.02)

    async def _nothing_left(self, server: Server) -> None:
        await self._gone(server)
        if left := [path.name for path in self.folder.iterdir()]:
            self.problems.append(f"left in the folder for temporary files: {left}")
        if left := [path for path in self.shared | server.shared if os.path.exists(path)]:
            self.problems.append(f"shared memory is left: {left}")


def chaos(times: int, clients: int = 12, seed: int = 0, model: str | None = None, answer_s: float = ANSWER_S) -> dict:
    """Run it: what was counted and measured, and `problems`."""
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as name:
        folder = Path(name, "tmp")
        folder.mkdir()
        if model is None:
            file = runpy.run_path(str(Path(__file__).with_name("checkpoints.py")))
            model = str(file["tiny_llama_gguf"](Path(name, "tiny.gguf")))
        result = asyncio.run(Chaos(folder, model, clients, seed, answer_s).run(times))
        if result["problems"]:
            result["log"] = Path(name, "server.log").read_text(errors="replace")[-4000:]
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    result = chaos(args.times, args.clients, args.seed)
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
