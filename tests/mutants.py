#!/usr/bin/env python3
"""Mutation testing of a package in one build: cargo-mutants names the mutants, and MUTANT in the environment says which one runs.

    tests/mutants.py dataplane --draw 200 --seed 1 --fast --scratch /tmp/mutants

Each function with mutants that were drawn gets a copy of its body for each. What doesn't compile is left out, so the package is built a
few times and not once for each mutant. A mutant is caught when a test fails or takes too long; they run in the order in which they were
drawn, so who has no time for all has drawn fewer. Sources are copied to the scratch directory, which keeps its build; a list of what
survived is there, too, and can be given to the next run with --only.
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
        # What takes longest runs last, for what nothing else has caught.
        [
            "captures::a_capture_by_a_filter_is_its_part_of_a_capture_of_everything",
            "cuts::one_worker_sends_the_same_whatever_the_batches",
            "cuts::two_workers_send_the_same_whatever_the_batches",
            "explain::what_is_foretold_comes_true",
            "model::the_engine_does_what_the_simple_nat_does",
            "policy_changes::whoever_is_not_checked_again_would_have_passed",
            "properties::every_answer_finds_the_pod_that_asked",
            "snapshot::tests::sequences::",
            "snapshot::tests::services::",
            "snapshot::tests::there_are_no_more_",
            "wire::",
            "watch::",
        ],
        [f"dataplane/src/{name}{rest}" for name in ("session", "ports", "fragments", "stage") for rest in (".rs", "/**/*.rs")],
    ),
    # The whole workspace, so that libraries are built with the features that other targets of the Makefile have, too.
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
    parser.add_argument("--draw", type=int, help="how many mutants; all if it isn't said")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--only", help="file with the names of mutants, one a line: these, and none are drawn")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one test, five times that for a slow one")
    parser.add_argument("--fast", action="store_true", help="leave out the tests that take longest")
    parser.add_argument("--skip", action="append", default=[], help="tests to leave out, which fail here anyway")
    return parser.parse_args()


def listed(files):
    """All mutants of these files."""
    command = ["cargo", "mutants", "--list", "--json", "--workspace"] + [word for file in files for word in ("-f", file)]
    mutants = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return [mutant for mutant in mutants if mutant.get("function")]


def block(text, start, end):
    """Where the block begins that ends at `end`."""
    begun = []
    for token in TOKEN.finditer(text, start, end):
        if token.group() == "{":
            begun.append(token.start())
        elif token.group() == "}":
            first = begun.pop()
            if token.end() == end:
                return first
    raise ValueError(text[start:end])


def switched(text, mutants):
    """The text with these mutants in it, and a list of (first line, last line, numbers): who may be to blame for an error there."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(place):
        return tuple(lines[place[end]["line"] - 1] + place[end]["column"] - 1 for end in ("start", "end"))

    functions = {}
    for number, mutant in mutants.items():
        functions.setdefault(span(mutant["function"]["span"]), []).append(number)
    written, done, blame = "", 0, []
    for (start, end), numbers in sorted(functions.items()):
        if start < done:
            # A function within a function that has its own.
            blame.append((0, 0, numbers))
            continue
        first = block(text, start, end)
        written += text[done:first] + "{\n"
        begin = written.count("\n") + 1
        for number in numbers:
            left, right = span(mutants[number]["span"])
            mutated = text[first:left] + mutants[number]["replacement"] + text[right:end]
            here = written.count("\n") + 1
            written += f"if crate::mutant::is({number}) {mutated} else\n"
            blame.append((here, written.count("\n"), [number]))
        written += text[first:end] + "\n}"
        blame.append((begin, written.count("\n"), numbers))
        done = end
    return written + text[done:], blame


class Scratch:
    """The copy of the sources."""

    def __init__(self, path, area):
        self.path = path
        folder, self.targets, self.slow, self.files = AREAS[area]
        self.folder = os.path.join(path, folder)
        self.touched = set()
        for file in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.split(b"\0"):
            if file:
                self.copy(file.decode())

    def copy(self, file):
        """Copies a file, if it isn't there as it is: what is touched is built again."""
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
        """Writes all mutants into the copy; says who is to blame for which lines of which file."""
        root = os.path.relpath(os.path.join(self.folder, "src/lib.rs"), self.path)
        with open(os.path.join(ROOT, root), encoding="utf-8") as file:
            self.write(root, file.read() + SWITCH)
        files, blame = {}, {}
        for number, mutant in mutants.items():
            files.setdefault(mutant["file"], {})[number] = mutant
        for path in self.touched | set(files):
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text, blame[path] = switched(file.read(), files.get(path, {}))
            self.write(path, text)
        self.touched |= set(files)
        return blame

    def cargo(self):
        """Messages of a build."""
        command = ["cargo", "test", "--no-run", "--locked", "--message-format=json", *self.targets]
        out = subprocess.run(command, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        return [json.loads(line) for line in out.stdout.splitlines() if line.startswith(b"{")], out

    def build(self, mutants):
        """Leaves out what doesn't compile, and builds the rest; returns the test programs."""
        while True:
            blame = self.put(mutants)
            messages, out = self.cargo()
            if out.returncode == 0:
                mine = [it for it in messages if it.get("executable") and it["target"]["src_path"].startswith(self.folder + "/")]
                return [it["executable"] for it in mine]
            errors = [it["message"] for it in messages if it.get("reason") == "compiler-message"]
            errors = [it for it in errors if it["level"] == "error"]
            bad = set().union(*(to_blame(error, blame) for error in errors)) & set(mutants)
            if not bad:
                sys.exit("it doesn't compile:\n" + out.stderr.decode() + "".join(error["rendered"] for error in errors))
            print(f"{len(bad)} don't compile", flush=True)
            for number in bad:
                del mutants[number]

    def restore(self):
        """Failures that properties keep would be tried first with the next mutant."""
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
        """How a mutant ends, and by what."""
        environment = os.environ | {
            "MUTANT": str(number),
            "PROPTEST_RNG_SEED": "1",
            "PROPTEST_MAX_SHRINK_ITERS": "0",
        }
        skipped = [word for test in skip for word in ("--skip", test)]
        not_slow = skipped + [word for test in self.slow for word in ("--skip", test)]
        # The module's own tests know it best; of all others, those of the whole engine do.
        rounds = [(timeout, [module] + not_slow), (timeout, not_slow)] if module else [(timeout, not_slow)]
        if self.slow and not fast:
            rounds.append((5 * timeout, self.slow + skipped))
        for limit, words in rounds:
            for program in programs if words[:1] == [module] else reversed(programs):
                child = subprocess.Popen([program, *words], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
                end = watch(child, limit)
                self.restore()
                if end:
                    return end
        return None


def module_of(mutant):
    """The outermost module that a mutant is in, as its tests are named."""
    return mutant["file"].split("/src/")[1].split("/")[0].removesuffix(".rs") + "::"


def to_blame(message, blame):
    """The mutants that an error is about: those whose lines it points to, else those of the function."""
    for spans in ([it for it in message["spans"] if it["is_primary"]], message["spans"]):
        for span in spans:
            hits = [(last - first, numbers) for first, last, numbers in blame.get(span["file_name"], [])
                    if first <= span["line_start"] <= last]
            if hits:
                return set(min(hits)[1])
    return set()


def watch(child, limit):
    """Waits for a test that fails, or takes too long; nothing if there is none."""
    rest = b""
    try:
        while True:
            if not select.select([child.stdout], [], [], limit)[0]:
                return "time limit"
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
    mutants = listed(scratch.files)
    total = len(mutants)
    if it.only:
        with open(it.only, encoding="utf-8") as file:
            names = set(file.read().splitlines())
        mutants = [mutant for mutant in mutants if mutant["name"] in names]
    elif it.draw:
        mutants = random.Random(it.seed).sample(mutants, it.draw)
    drawn = dict(enumerate(mutants, 1))
    print(f"{total} mutants, {len(drawn)} drawn", flush=True)
    programs = scratch.build(drawn)
    begun = time.monotonic()
    if failed := scratch.test(programs, 0, 10 * it.timeout, it.skip, it.fast):
        sys.exit(f"without a mutant, it fails: {failed}")
    print(f"{len(drawn)} of them compile; without a mutant, tests take {time.monotonic() - begun:.0f} s", flush=True)
    survived = []
    for number, mutant in drawn.items():
        begun = time.monotonic()
        end = scratch.test(programs, number, it.timeout, it.skip, it.fast, module_of(mutant))
        print(f"{'caught' if end else 'SURVIVED'} {mutant['name']}: {end} ({time.monotonic() - begun:.0f} s)", flush=True)
        if not end:
            survived.append(mutant["name"])
    with open(os.path.join(scratch.path, f"survived-{it.area}.txt"), "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in survived)
    caught = len(drawn) - len(survived)
    print(f"{caught} of {len(drawn)} caught: {caught / max(len(drawn), 1):.1%}")


if __name__ == "__main__":
    main()
