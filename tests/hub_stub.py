"""A model hub on loopback, as far as its client asks for files: `python hub_stub.py FOLDER` prints its port.

FOLDER/owner/repo/* are the files of each repository; a file `.gated` makes its downloads refused.
"""
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Handler(BaseHTTPRequestHandler):
    root: Path

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.api(parts[2:])
        repo, rest = self.root.joinpath(*parts[:2]), parts[2:]
        if (repo / ".gated").exists():
            return self.send(403, b"gated", {"X-Error-Code": "GatedRepo"})
        file = repo.joinpath(*rest[2:])
        if rest[:1] != ["resolve"] or not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}
        self.send(200, data, headers, body)

    def api(self, parts: list[str]):
        repo, rest = self.root.joinpath(*parts[:2]), parts[2:]
        if not repo.is_dir():
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = sorted(p for p in repo.rglob("*") if p.is_file() and p.name != ".gated")
        names = [p.relative_to(repo).as_posix() for p in files]
        if rest[:1] == ["tree"]:
            answer = [{"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                      for name, path in zip(names, files, strict=True)]
        else:
            answer = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    Handler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
