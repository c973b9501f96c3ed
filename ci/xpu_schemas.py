"""Compare platforms/xpu/schemas.toml with the operators in vllm-xpu-kernels' wheel: `python ci/xpu_schemas.py`.

The wheel is downloaded by pip, or given with --wheel; it is read, never imported: its libraries hold the schemas that
they register as text. The result goes to ci/xpu_schemas.json. 1 when an operator is missing or has another schema.
`--write` takes the wheel's schemas over, for a new version; the reference kernels of tests/emulation/xpu_operators then
have to follow.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import graph

EXPECTED, RECORD = graph.ROOT / "platforms" / "xpu" / "schemas.toml", graph.ROOT / "ci" / "xpu_schemas.json"
LIBRARIES = ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")
TEXT = re.compile(rb"[\x20-\x7e\t\n]{12,}")
SCHEMA = re.compile(r"[a-z_][a-z0-9_]*\((?:[A-Z][A-Za-z]+|int|bool|float|str|\(|\)).*\) ?-> .+", re.DOTALL)


def normal(schema: str) -> str:
    """One space between words, one after each comma, none before brackets that close."""
    return re.sub(r"\s+\)", ")", re.sub(r"\s*,\s*", ", ", re.sub(r"\s+", " ", schema))).strip()


def schemas(wheel: Path) -> dict[str, str]:
    """"library::name" -> schema, of every operator that the wheel's libraries register."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for library in LIBRARIES:
            data = archive.read(f"vllm_xpu_kernels/{library}.abi3.so")
            for match in TEXT.finditer(data):
                text = match[0].decode().strip()
                if SCHEMA.fullmatch(text):
                    schema = normal(text)
                    found[f"{library}::{schema.partition('(')[0]}"] = f"{library}::{schema}"
    return found


def compare(expected: list[str], wheel: dict[str, str]) -> dict[str, str]:
    """Operator -> "same", or what is there instead."""
    result = {}
    for schema in expected:
        name = schema.partition("(")[0]
        actual = wheel.get(name)
        result[name] = "missing" if actual is None else "same" if actual == normal(schema) else actual
    return result


def download(package: str, version: str | None, folder: Path) -> Path:
    wanted = package if version is None else f"{package}=={version}"
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
                    str(folder), wanted], check=True)
    return next(folder.glob("*.whl"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is here already")
    parser.add_argument("--write", action="store_true", help="take the wheel's version and schemas over")
    given = parser.parse_args(argv)
    about = tomllib.loads(EXPECTED.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        wheel = given.wheel or download(about["package"], None if given.write else about["version"], Path(folder))
        found, digest = schemas(wheel), hashlib.sha256(wheel.read_bytes()).hexdigest()
    version = wheel.name.split("-")[1]
    result = compare(about["schemas"], found)
    if given.write:
        text = EXPECTED.read_text("utf-8").replace(f'"{about["version"]}"', f'"{version}"')
        for schema in about["schemas"]:
            text = text.replace(schema, found.get(schema.partition("(")[0], schema))
        EXPECTED.write_text(text, "utf-8")
    bad = {name: what for name, what in result.items() if what != "same"}
    if version != about["version"]:
        bad["version"] = f"{version}, not {about['version']}"
    RECORD.write_text(json.dumps({
        "date": datetime.date.today().isoformat(), "package": about["package"], "version": version,
        "wheel": wheel.name, "sha256": digest, "operators in the wheel": len(found), "operators": result},
        indent=1) + "\n", "utf-8")
    for name, what in bad.items():
        print(f"{name}: {what}")
    print(f"{len(result)} operators compared with {len(found)} of {wheel.name}: {len(bad)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
