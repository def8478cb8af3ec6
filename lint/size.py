#!/usr/bin/env python3
"""Counts the lines of Rust in each crate and keeps them within a budget.

A file belongs to the crate whose Cargo.toml is nearest above it. Its lines are tests when it lies in a `tests` folder of the crate, when its
module is declared under `#[cfg(test)]`, or when they stand in an inline module under `#[cfg(test)]`. Crates that only tests use (`TEST_CRATES`)
are tests wholly; the lab is product, since the demo is.

A budget only falls: a commit that removes code lowers it, and a crate that is more than `SLACK` lines below its budget is an
error, too. A commit that raises one adds a capability; its message says in a line `Adds:` which, and in a line `Removes:` what went for it.

    lint/size.py            prints lines and budgets, exit code 1 when a crate isn't within its budget
    lint/size.py --write    lowers budgets to today's lines, rounded up; never raises one
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ROOT / "lint/size.txt"
STEP = 100  # budgets are multiples, so that a mend of some lines needs none
SLACK = 2 * STEP
TEST_CRATES = {"control/cloud/testkit", "dataplane/testkit", "fuzz", "tests"}

TEST_MODULE = re.compile(r"^(?P<indent>\s*)#\[cfg\((?:test|any\(test\b[^\n]*|all\(test\b[^\n]*)\)\]\n(?:\s*(?:#\[[^\n]*|//[^\n]*)\n)*"
                         r"\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(?P<name>\w+)\s*(?P<end>[;{])", re.M)
MODULE_PATH = re.compile(r'#\[path\s*=\s*"([^"]+)"\]')


def sources(pattern):
    """Files of the project: a checkout without .git has the same."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(set(folders) - {"target", ".git", "node_modules"})
        found += [(Path(folder) / name).relative_to(ROOT) for name in sorted(fnmatch.filter(files, pattern))]
    return found


def crate_of(file, crates):
    return next(parent for parent in file.parents if parent in crates)


def folder_of_children(file):
    """Where the files of a file's modules lie."""
    return file.parent if file.stem in ("mod", "lib", "main") else file.parent / file.stem


def test_modules(file, text):
    """Files and folders of modules that exist in tests only, and the lines of inline ones."""
    outside, inline = set(), 0
    for found in TEST_MODULE.finditer(text):
        if found["end"] == ";":
            path = MODULE_PATH.search(found[0])
            module = file.parent / path[1] if path else folder_of_children(file) / f"{found['name']}.rs"
            outside |= {module, module.parent / "mod.rs" if module.stem == "mod" else module.with_suffix("")}
            outside.add(folder_of_children(file) / found["name"] / "mod.rs")
        else:
            end = re.compile(rf"^{found['indent'].lstrip(chr(10))}\}}", re.M).search(text, found.end())
            inline += text.count("\n", found.start(), end.end() if end else len(text)) + 1
    return outside, inline


def count():
    """Crate -> [lines of product, lines of tests]."""
    crates = {file.parent for file in sources("Cargo.toml")}
    texts = {file: (ROOT / file).read_text() for file in sources("*.rs")}
    outside, inline = set(), {}
    for file, text in texts.items():
        modules, inline[file] = test_modules(file, text)
        outside |= modules
    lines = {}
    for file, text in texts.items():
        crate = crate_of(file, crates)
        within = file.relative_to(crate)
        tests = (str(crate) in TEST_CRATES or within.parts[0] in ("tests", "benches")
                 or file in outside or any(parent in outside for parent in file.parents))
        total = text.count("\n")
        counts = lines.setdefault(str(crate), [0, 0])
        counts[0] += 0 if tests else total - inline[file]
        counts[1] += total if tests else inline[file]
    return lines


def read_budgets(text):
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {crate: [int(product), int(tests)] for crate, product, tests in rows}


def rises(older, newer):
    """Crates whose budget is higher than before; a crate that moved counts with the sum of all."""
    if sum(map(sum, newer.values())) <= sum(map(sum, older.values())):
        return []
    return [crate for crate, budget in newer.items() if sum(budget) > sum(older.get(crate, [0, 0]))]


def unexplained_rises():
    """Commits that raise budgets without a word about it, where there is a history."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    commits = git("log", "--format=%H", "--", str(BUDGETS.relative_to(ROOT))).stdout.split()
    for commit in commits:
        older, newer = (git("show", f"{at}:lint/size.txt") for at in (f"{commit}^", commit))
        if older.returncode or newer.returncode:
            continue
        message = git("log", "-1", "--format=%B", commit).stdout
        raised = rises(read_budgets(older.stdout), read_budgets(newer.stdout))
        if raised and not (re.search(r"^Adds:", message, re.M) and re.search(r"^Removes:", message, re.M)):
            yield f"commit {commit[:8]} raises the budget of {', '.join(raised)}: its message needs lines `Adds:` and `Removes:`"


def report(lines, budgets):
    """The table, and what breaks a rule."""
    broken = []
    print(f"{'crate':24}{'product':>9}{'budget':>9}{'tests':>9}{'budget':>9}")
    for crate in sorted(lines.keys() | budgets.keys()):
        counts, budget = lines.get(crate, [0, 0]), budgets.get(crate, [0, 0])
        print(f"{crate:24}{counts[0]:9}{budget[0]:9}{counts[1]:9}{budget[1]:9}")
        for kind, now, most in zip(("product", "tests"), counts, budget):
            if now > most:
                broken.append(f"{crate}: {now} lines of {kind}, the budget is {most}")
            elif now + SLACK < most:
                broken.append(f"{crate}: {now} lines of {kind}, the budget is still {most}: lint/size.py --write")
    bench = sum(lines.get("bench", [0, 0]))
    product = sum(counts[0] for crate, counts in lines.items() if crate != "bench")
    tests = sum(counts[1] for crate, counts in lines.items() if crate != "bench")
    print(f"{product} product, {bench} bench, {tests} tests: {product + bench + tests} lines of Rust")
    for kind, patterns in (("Python", ["*.py"]), ("shell", ["*.sh"]), ("C", ["*.c", "*.h"]), ("protobuf", ["*.proto"])):
        print(f"beside them {sum((ROOT / file).read_text().count(chr(10)) for pattern in patterns for file in sources(pattern))} lines of {kind}")
    return broken


def write(lines, budgets):
    rounded = {crate: [-(-lines // STEP) * STEP for lines in counts] for crate, counts in lines.items()}
    lowered = {crate: [min(pair) for pair in zip(counts, budgets.get(crate, counts))] for crate, counts in rounded.items()}
    header = "# Lines of Rust that each crate may have: crate, product, tests. See size.py.\n"
    BUDGETS.write_text(header + "".join(f"{crate} {product} {tests}\n" for crate, (product, tests) in sorted(lowered.items())))
    return lowered


def main():
    lines = count()
    budgets = read_budgets(BUDGETS.read_text()) if BUDGETS.exists() else {}
    if sys.argv[1:] == ["--write"]:
        budgets = write(lines, budgets)
    broken = [*report(lines, budgets), *unexplained_rises()]
    print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
