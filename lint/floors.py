#!/usr/bin/env python3
"""Checks that the modules of our crates depend on each other in one direction only.

A room is a file or folder directly below a crate's `src`. Where rooms are floors, there is no cycle of imports between them; between files
there is none of more than `MAX_CYCLE`; and no crate has more than `MAX_ROOMS` rooms where that is limited. Test modules don't count: they may
use everything.

    lint/floors.py             checks every crate, exit code 1 and the cycles when a rule is broken
    lint/floors.py CRATE/src   prints which room uses which, and through which files
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATES = ["dataplane/src", "dataplane/mem/src", "dataplane/xdp/src", "dataplane/testkit/src", "control/policy/src", "control/membership/src", "control/cloud/src", "control/cloud/testkit/src", "control/common/src", "control/netlink/src", "control/node/src", "control/src", "tests/lab/src", "bench/src"]
FLOORS = {"dataplane/src", "control/policy/src", "control/membership/src", "control/cloud/src", "control/common/src", "control/netlink/src", "control/node/src", "control/src", "tests/lab/src", "bench/src"}
MAX_ROOMS = {"dataplane/src": 12}
MAX_CYCLE = 4

TEST_FILE = re.compile(r"(^|/)(tests?|fixtures|model)(/|\.rs$|_)|_tests\.rs$")
USE = re.compile(r"^\s*(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", re.M)
PATH = re.compile(r"\b(?:crate|super)(?:::\w+)+")


def modules(src):
    """Module path -> file, without tests."""
    found = {}
    for file in sorted(src.rglob("*.rs")):
        name = file.relative_to(src).as_posix()
        if TEST_FILE.search(name):
            continue
        parts = name.removesuffix(".rs").split("/")
        if parts[-1] in ("mod", "lib", "main"):
            parts.pop()
        found[tuple(parts)] = file
    return found


def split_top(text):
    """Splits at commas outside of braces."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def use_paths(tree, prefix=()):
    """Every path of a `use` tree."""
    for item in map(str.strip, split_top(tree)):
        if "{" in item:
            head, rest = item.split("{", 1)
            names = tuple(name for name in head.strip().split("::") if name)
            yield from use_paths(rest.rsplit("}", 1)[0], prefix + names)
        elif item:
            yield prefix + tuple(item.split(" as ")[0].split("::"))


def paths(file):
    """Every path that a file names, outside of comments and of its test module."""
    text = re.sub(r"//[^\n]*", "", file.read_text(encoding="utf-8"))
    text = text.split("#[cfg(test)]\nmod tests {")[0]
    for tree in USE.findall(text):
        yield from use_paths(" ".join(tree.split()))
    for path in PATH.findall(text):
        yield tuple(path.split("::"))


def imports(found):
    """Module -> modules that it uses. A child may look at the module that it is a part of."""
    edges = {module: set() for module in found}
    for module, file in found.items():
        for path in paths(file):
            base, names = list(module), list(path)
            if names[0] == "crate":
                base, names = [], names[1:]
            elif names[0] in ("super", "self"):
                while names and names[0] in ("super", "self"):
                    if names.pop(0) == "super":
                        base = base[:-1]
            else:
                continue
            used = tuple(base + names)
            while used and used not in found:
                used = used[:-1]
            if used and used != module and module[: len(used)] != used:
                edges[module].add(used)
    return edges


def cycles(edges):
    """Strongly connected groups of more than one, largest first (Tarjan)."""
    number, low, stack, groups = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in edges[node]:
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in edges:
        if node not in number:
            visit(node)
    return sorted(groups, key=len, reverse=True)


def rooms(edges):
    """Room -> room -> the imports between them."""
    between = {}
    for module, used in edges.items():
        for other in used:
            between.setdefault(module[:1], {}).setdefault(other[:1], []).append((module, other))
            between.setdefault(other[:1], {})
    return {room: {other: why for other, why in used.items() if other != room} for room, used in between.items()}


def name(module):
    return "::".join(module) or "the crate's root"


def check(crate):
    """What is wrong with a crate, a line each."""
    src = ROOT / crate
    edges = imports(modules(src))
    for group in cycles(edges):
        if len(group) > MAX_CYCLE:
            yield f"{crate}: {len(group)} files import each other in a cycle: {', '.join(map(name, group))}"
    between = rooms(edges)
    for group in cycles(between) if crate in FLOORS else []:
        yield f"{crate}: rooms import each other in a cycle: {', '.join(map(name, group))}"
        for room in group:
            for other, why in between[room].items():
                if other in group:
                    yield f"  {name(room)} uses {name(other)}: " + ", ".join(f"{name(a)} -> {name(b)}" for a, b in why[:4])
    entries = len(list(src.iterdir()))
    if entries > MAX_ROOMS.get(crate, entries):
        yield f"{crate}: {entries} entries, at most {MAX_ROOMS[crate]}"


def main():
    if len(sys.argv) > 1:
        for room, used in sorted(rooms(imports(modules(Path(sys.argv[1])))).items()):
            print(f"{name(room)}: " + ", ".join(sorted(f"{name(other)} ({len(why)})" for other, why in used.items())))
        return 0
    problems = [line for crate in CRATES if (ROOT / crate).is_dir() for line in check(crate)]
    print("\n".join(problems) or f"{len(CRATES)} crates: no cycle of rooms, none of more than {MAX_CYCLE} files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
