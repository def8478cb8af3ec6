#!/usr/bin/env python3
"""Mutation testing of a package in one build. cargo-mutants lists the mutants; the environment variable MUTANT
selects one at run time.

    tests/mutants.py dataplane --draw 200 --seed 1 --fast --scratch /tmp/mutants

Each function with selected mutants gets a copy of its body for each. Mutants that don't compile are left out, so the
package is built a few times instead of once per mutant. A mutant is caught when a test fails or times out. Sources are
copied to the scratch directory, which keeps its build and a list of surviving mutants for the next run (--only).
"""

import argparse
import filecmp
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AREAS = {
    "dataplane": (
        "dataplane",
        ["-p", "vipgate-dataplane", "--lib", "--test", "engine"],
        # The slowest tests run last, and only for mutants that no other test has caught.
        [
            "captures::a_filtered_capture_is_the_matching_subset_of_a_full_capture",
            "batch_boundaries::one_worker_sends_the_same_for_any_batch_boundaries",
            "batch_boundaries::two_workers_send_the_same_for_any_batch_boundaries",
            "trace::packets_are_processed_as_traced",
            "model::the_engine_matches_the_reference_nat",
            "policy_changes::selective_revalidation_equals_full_revalidation",
            "properties::every_reply_reaches_the_pod_that_sent_the_request",
            "policy::tests::sequences::",
            "policy::tests::services::",
            "policy::tests::endpoints_are_limited_",
            "policy::tests::vips_are_limited_",
            "wire::",
            "observe::",
        ],
        [f"dataplane/src/{module}/**/*.rs" for module in ("session", "ports", "reassembly", "stage")],
    ),
    # The whole workspace, so that libraries are built with the same features as by other targets of the Makefile.
    "policy": ("control", ["--workspace", "--lib"], [], ["control/src/policy.rs", "control/src/policy/**/*.rs"]),
}
SWITCH = """
#[doc(hidden)]
#[allow(missing_docs)]
pub mod mutant {
    pub fn is(number: u32) -> bool {
        static IT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        *IT.get_or_init(|| std::env::var("MUTANT").map_or(0, |it| it.parse().unwrap_or(0))) == number
    }
}
"""
TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(?P<hash>#*)".*?"(?P=hash)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n]+?|[^\\'])'|[{}]""", re.S
)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--scratch", required=True, help="directory for the copy and its build")
    parser.add_argument("--draw", type=int, help="number of mutants, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choice")
    parser.add_argument("--only", help="file with the names of mutants, one a line, instead of a random choice")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one test; five times that for a slow one")
    parser.add_argument("--fast", action="store_true", help="leave out the slowest tests")
    parser.add_argument("--skip", action="append", default=[], help="tests to leave out, such as those that fail here")
    return parser.parse_args()


def list_mutants(files):
    """All mutants of these files."""
    command = ["cargo", "mutants", "--list", "--json", "--workspace"] + [word for file in files for word in ("-f", file)]
    mutants = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return [mutant for mutant in mutants if mutant.get("function")]


def block(text, start, end):
    """Offset of the start of the block that ends at `end`."""
    opened = []
    for token in TOKEN.finditer(text, start, end):
        if token.group() == "{":
            opened.append(token.start())
        elif token.group() == "}":
            first = opened.pop()
            if token.end() == end:
                return first
    raise ValueError(text[start:end])


def with_mutants(text, mutants):
    """The text with these mutants, and (first line, last line, numbers) of the mutants that may cause an error there."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(location):
        return tuple(lines[location[end]["line"] - 1] + location[end]["column"] - 1 for end in ("start", "end"))

    functions = {}
    for number, mutant in mutants.items():
        functions.setdefault(span(mutant["function"]["span"]), []).append(number)
    written, done, suspects = "", 0, []
    for (start, end), numbers in sorted(functions.items()):
        if start < done:
            # A function nested in one with mutants of its own.
            suspects.append((0, 0, numbers))
            continue
        first = block(text, start, end)
        written += text[done:first] + "{\n"
        begin = written.count("\n") + 1
        for number in numbers:
            left, right = span(mutants[number]["span"])
            mutated = text[first:left] + mutants[number]["replacement"] + text[right:end]
            here = written.count("\n") + 1
            written += f"if crate::mutant::is({number}) {mutated} else\n"
            suspects.append((here, written.count("\n"), [number]))
        written += text[first:end] + "\n}"
        suspects.append((begin, written.count("\n"), numbers))
        done = end
    return written + text[done:], suspects


class Scratch:
    """Copy of the sources with the mutants."""

    def __init__(self, path, area):
        self.path = path
        folder, self.targets, self.slow, self.files = AREAS[area]
        self.folder = os.path.join(path, folder)
        self.touched = set()
        for file in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.split(b"\0"):
            if file:
                self.copy(file.decode())

    def copy(self, file):
        """Copies a file unless the copy is identical, since cargo rebuilds what is touched."""
        source, copy = os.path.join(ROOT, file), os.path.join(self.path, file)
        if not os.path.exists(copy) or not filecmp.cmp(source, copy, shallow=False):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy(source, copy)

    def write(self, path, text):
        path = os.path.join(self.path, path)
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def put(self, mutants):
        """Writes all mutants into the copy; returns the mutants that may cause errors, by file and lines."""
        root = os.path.relpath(os.path.join(self.folder, "src/lib.rs"), self.path)
        with open(os.path.join(ROOT, root), encoding="utf-8") as file:
            self.write(root, file.read() + SWITCH)
        files, suspects = {}, {}
        for number, mutant in mutants.items():
            files.setdefault(mutant["file"], {})[number] = mutant
        for path in self.touched | set(files):
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text, suspects[path] = with_mutants(file.read(), files.get(path, {}))
            self.write(path, text)
        self.touched |= set(files)
        return suspects

    def cargo(self):
        """Builds the tests; returns cargo's messages and the finished process."""
        command = ["cargo", "test", "--no-run", "--locked", "--message-format=json", *self.targets]
        out = subprocess.run(command, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        return [json.loads(line) for line in out.stdout.splitlines() if line.startswith(b"{")], out

    def build(self, mutants):
        """Removes mutants that don't compile, and builds the rest; returns the test programs."""
        while True:
            suspects = self.put(mutants)
            messages, out = self.cargo()
            if out.returncode == 0:
                own = [it for it in messages if it.get("executable") and it["target"]["src_path"].startswith(self.folder + "/")]
                return [it["executable"] for it in own]
            errors = [it["message"] for it in messages if it.get("reason") == "compiler-message"]
            errors = [it for it in errors if it["level"] == "error"]
            bad = set().union(*(causes(error, suspects) for error in errors)) & set(mutants)
            if not bad:
                sys.exit("compile errors without a mutant:\n" + out.stderr.decode() + "".join(error["rendered"] for error in errors))
            print(f"{len(bad)} mutants don't compile", flush=True)
            for number in bad:
                del mutants[number]

    def restore(self):
        """Restores proptest's regression files, which would be tried first with the next mutant."""
        for folder, _, files in os.walk(self.folder):
            for file in files:
                path = os.path.join(folder, file)
                if "regressions" in path:
                    original = os.path.join(ROOT, os.path.relpath(path, self.path))
                    if os.path.exists(original):
                        shutil.copy2(original, path)
                    else:
                        os.remove(path)

    def test(self, programs, number, timeout, skip, fast, module=None):
        """Runs the tests with a mutant; returns what caught it, if anything."""
        environment = os.environ | {
            "MUTANT": str(number),
            "PROPTEST_RNG_SEED": "1",
            "PROPTEST_MAX_SHRINK_ITERS": "0",
        }
        skipped = [word for test in skip for word in ("--skip", test)]
        not_slow = skipped + [word for test in self.slow for word in ("--skip", test)]
        # First the module's own tests, then all others, beginning with those of the whole engine.
        rounds = [(timeout, [module] + not_slow), (timeout, not_slow)] if module else [(timeout, not_slow)]
        if self.slow and not fast:
            rounds.append((5 * timeout, self.slow + skipped))
        for limit, words in rounds:
            for program in programs if words[:1] == [module] else reversed(programs):
                child = subprocess.Popen([program, *words], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
                end = first_failure(child, limit)
                self.restore()
                if end:
                    return end
        return None


def module_of(mutant):
    """The outermost module of a mutant, as a prefix of test names."""
    return mutant["file"].split("/src/")[1].split("/")[0].removesuffix(".rs") + "::"


def causes(message, suspects):
    """The mutants that cause an error: those of the lines that it points to, else those of the function."""
    for spans in ([it for it in message["spans"] if it["is_primary"]], message["spans"]):
        for span in spans:
            hits = [(last - first, numbers) for first, last, numbers in suspects.get(span["file_name"], [])
                    if first <= span["line_start"] <= last]
            if hits:
                return set(min(hits)[1])
    return set()


def first_failure(child, limit):
    """Waits for a failed test or a timeout; none if all tests pass."""
    rest = b""
    try:
        while True:
            if not select.select([child.stdout], [], [], limit)[0]:
                return "timeout"
            chunk = os.read(child.stdout.fileno(), 65536)
            if not chunk:
                return None if child.wait() == 0 else f"exit {child.returncode}"
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"test ") and line.endswith(b"FAILED"):
                    return line.split()[1].decode()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()


def main():
    it = options()
    scratch = Scratch(os.path.abspath(it.scratch), it.area)
    mutants = list_mutants(scratch.files)
    total = len(mutants)
    if it.only:
        with open(it.only, encoding="utf-8") as file:
            names = set(file.read().splitlines())
        mutants = [mutant for mutant in mutants if mutant["name"] in names]
    elif it.draw:
        mutants = random.Random(it.seed).sample(mutants, it.draw)
    selected = dict(enumerate(mutants, 1))
    print(f"{total} mutants, {len(selected)} selected", flush=True)
    programs = scratch.build(selected)
    started = time.monotonic()
    if failed := scratch.test(programs, 0, 10 * it.timeout, it.skip, it.fast):
        sys.exit(f"fails without a mutant: {failed}")
    print(f"{len(selected)} mutants compile; without a mutant, the tests take {time.monotonic() - started:.0f} s", flush=True)
    survived = []
    for number, mutant in selected.items():
        started = time.monotonic()
        end = scratch.test(programs, number, it.timeout, it.skip, it.fast, module_of(mutant))
        print(f"{'caught' if end else 'SURVIVED'} {mutant['name']}: {end} ({time.monotonic() - started:.0f} s)", flush=True)
        if not end:
            survived.append(mutant["name"])
    with open(os.path.join(scratch.path, f"survived-{it.area}.txt"), "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in survived)
    caught = len(selected) - len(survived)
    print(f"{caught} of {len(selected)} caught: {caught / max(len(selected), 1):.1%}")


if __name__ == "__main__":
    main()
