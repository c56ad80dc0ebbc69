"""Would the tests notice? Applies every mutation of ``mutations.yaml``, one at a time, and runs its tests.

    python tests/mutations/run.py                # all; writes results.json and results.md
    python tests/mutations/run.py --room surgery # those of one room; --only WORD: whose description has the word
    python tests/mutations/run.py --again        # those not killed, or changed since they were

A mutation replaces a piece of one line of ``ghostexport/`` that stands there exactly once. It is killed when a test
fails. The tree is copied to a temporary folder, so that the working tree is never touched, and before anything is
mutated the tests are run there as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TREE = HERE.parents[1]
LIMIT_SECONDS = 300

#: Processes that start with the heavy libraries loaded, and none of ghostexport.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "onnxruntime", "onnx_ir", "pytest"])

Mutation = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", default="", help="selection, recovery, surgery, runtimes or statistics")
    parser.add_argument("--only", default="", help="a word of the description")
    parser.add_argument("--again", action="store_true", help="leave out what the committed results call killed")
    arguments = parser.parse_args()
    known = {key(result): result for result in read_results()}
    mutations = read_mutations()
    wanted = [
        mutation
        for mutation in mutations
        if arguments.only in mutation["what"]
        and arguments.room in mutation["room"]
        and not (arguments.again and known.get(key(mutation), {}).get("killed"))
    ]
    with tempfile.TemporaryDirectory(prefix="ghostexport-mutations-") as folder:
        copy = copied(Path(folder))
        sound, said = passes(" ".join(sorted({test for m in wanted for test in m["tests"].split()})), copy, 20)
        if wanted and not sound:
            raise SystemExit(f"Tests fail without a mutation:\n{said}")
        for mutation in wanted:
            known[key(mutation)] = tried(mutation, copy)
            write_results([known[key(m)] for m in mutations if key(m) in known])


def read_mutations() -> list[Mutation]:
    """Every mutation with the room it belongs to."""
    rooms = yaml.safe_load((HERE / "mutations.yaml").read_text(encoding="utf-8"))
    return [{"room": room} | mutation for room, mutations in rooms.items() for mutation in mutations]


def read_results() -> list[dict[str, Any]]:
    path = HERE / "results.json"
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def key(mutation: dict[str, Any]) -> tuple[str, ...]:
    return tuple(mutation[name] for name in ("room", "what", "old", "new", "tests"))


def place(old: str, tree: Path) -> Path:
    """The file of the package that has the text, which stands in it exactly once and in no other.

    Raises:
        ValueError: it does not, or it is more than a piece of one line.
    """
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "ghostexport").rglob("*.py"))}
    holders = [path for path, text in sources.items() if old in text]
    count = sum(text.count(old) for text in sources.values())
    if count != 1 or "\n" in old:
        where = ", ".join(path.relative_to(tree).as_posix() for path in holders) or "nowhere"
        raise ValueError(f"{old!r} stands {count} times in the package ({where}), not once in a line")
    return holders[0]


def copied(folder: Path) -> Path:
    """A copy of the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=TREE,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (TREE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, folder / name)
    return folder


def tried(mutation: Mutation, copy: Path) -> dict[str, Any]:
    """What became of one mutation: its file, whether a test failed, which one first, and the seconds it took."""
    path = place(mutation["old"], copy)
    text = path.read_text(encoding="utf-8")
    started = time.monotonic()
    path.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
    try:
        survived, said = passes(mutation["tests"], copy)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = [line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    result = mutation | {
        "file": path.relative_to(copy).as_posix(),
        "killed": not survived,
        "by": failed[0].split("::", 1)[-1] if failed and not survived else "",
        "seconds": round(time.monotonic() - started, 1),
    }
    print("killed  " if result["killed"] else "SURVIVED", result["what"], result["seconds"], "s", flush=True)
    return result


def passes(tests: str, copy: Path, times: int = 1) -> tuple[bool, str]:
    """Whether the tests pass in the copy, and what pytest said; in a process of its own with libraries loaded before.

    Raises:
        SystemExit: they could not be run.
    """
    said = copy / "said.txt"
    process = FORKS.Process(target=run_pytest, args=(tests.split(), copy, said))
    process.start()
    process.join(times * LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return False, "FAILED it::takes too long"
    if process.exitcode < 0:
        return False, "FAILED it::crashes"
    text = said.read_text(encoding="utf-8")
    if process.exitcode not in (0, 1, 2):
        raise SystemExit(f"{tests} could not be run:\n{text}")
    return process.exitcode == 0, text


def run_pytest(tests: list[str], copy: Path, said: Path) -> None:
    """Runs in a forked process whose imports are the copy's."""
    with said.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(HERE), str(TREE)))]
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
        if Path(sys.modules["ghostexport"].__file__ or "").parent.parent != copy:
            code = 3
        sys.stdout.flush()
        os._exit(code)


def write_results(results: list[dict[str, Any]]) -> None:
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    killed = sum(result["killed"] for result in results)
    lines = [f"# {killed} of {len(results)} mutations are killed", ""]
    lines += ["Written by `run.py` from `mutations.yaml`.", ""]
    for room in dict.fromkeys(result["room"] for result in results):
        lines += [f"## {room}", "", "| what is wrong | file | killed by |", "|---|---|---|"]
        lines += [
            f"| {r['what']} | {r['file'].removeprefix('ghostexport/')} | {r['by'] if r['killed'] else '**survived**'} |"
            for r in results
            if r["room"] == room
        ]
        lines.append("")
    (HERE / "results.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
