#!/usr/bin/env python3
"""Checks that code, output and documents use the field's terms: no word of the table below is left in any tracked file.

    lint/words.py         exit code 1 and the places when a word is left
    lint/words.py FILE..  checks these files only

A word in lower case matches as part of an identifier (`settle` in `is_settled_now` and `SettleTime`) and in text; a word in upper case
matches as a part of constants only; a phrase with spaces matches in text. `ALLOWED` names the few places that must keep a word, each with
its reason.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = re.compile(r"\.(rs|md|py|sh|c|h|proto|yaml|yml|toml|service|conf|svg)$|(^|/)(Makefile|Dockerfile)$")

# What must not be written, and the term for it.
WORDS = {
    # Packet path.
    "takeover|takeovers": "failover",
    "recheck|rechecks|rechecked": "revalidate",
    "relay": "forward to the owner",
    "express": "fast path",
    "far side|far end": "remote",
    "link address|link addresses": "MAC address",
    # Engine.
    "settle|settles|settled|settling": "release, restore, open",
    "glimpse|glimpses": "session log, capture",
    "tap|taps": "capture",
    "sweeper|sweepers": "expiry",
    "announcer": "announce",
    "obey|obeys": "commands",
    "outbox|outlet": "replication queue",
    "heir|heirs": "replica targets",
    "resting": "quarantined",
    "foretold": "predicted",
    "told": "sent, acknowledged",
    "news": "update, record",
    "PATIENCE|QUIET": "..._TIMEOUT, ..._INTERVAL",
    "MOST|LONGEST": "MAX_...",
    "TOLD|SAID|HEARD": "a state's name",
    # Control.
    "dealt|deals": "placement, assignment",
    "roster|registrar|seat|seats": "membership, member",
    "wish|wishes": "desired state",
    "beat|beats": "heartbeat",
    "hearsay": "relayed view",
    "crowd": "coalescing",
    "keeper": "session store",
    "complaint|complaints": "diagnostic",
    "lapsed": "expired",
    # What people read.
    "WAY|WHOSE|MEANING": "DIRECTION, OWNER, DESCRIPTION",
    "heard": "consumed, received",
    "hears": "receives",
    "no session knows": "no matching session",
    "is told": "receives",
    "copies of sessions|copy of a session|session copies": "standby sessions",
    # Tests and benchmarks.
    "ledger|tally": "counters, accounting, coverage",
    "cable|cables": "link",
    "judge|judges": "verifier",
    "stranger|strangers": "unauthenticated peer",
    "yardstick": "baseline",
    # Types whose name says nothing.
    "struct Plan|struct Event|struct Place|enum Plan|enum Event|enum Place": "a name that says of what",
}

# File, word (or part of a line): reason.
ALLOWED = [
    ("CHANGELOG.md", "| ", "the table of renamed things names them"),
    ("control/src/policyd/membership/store/etcd.rs", "beats/", "keys in etcd, which servers of other versions read"),
]


def pattern(word):
    """The regular expression of a table's word; identifiers are split before it is applied."""
    if word.isupper():
        return re.compile(rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])|(?<=_)(?:{word})(?![A-Za-z])")
    return re.compile(rf"(?<![a-z])(?:{word})(?![a-z])", re.IGNORECASE)


def split_identifiers(line):
    """Separates the parts of camel case: `SettleTime` becomes `Settle Time`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)


def tracked():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    return [file for file in files if TEXT.search(file) and (ROOT / file).is_file()]


def is_allowed(file, line):
    return any(file == place and part in line for place, part, _ in ALLOWED)


def main():
    words = [(pattern(word), word, term) for word, term in WORDS.items()]
    found = 0
    for file in sys.argv[1:] or tracked():
        if file == "lint/words.py":
            continue
        for number, line in enumerate((ROOT / file).read_text(errors="replace").splitlines(), 1):
            spaced = split_identifiers(line)
            for regex, word, term in words:
                if (match := regex.search(spaced)) and not is_allowed(file, line):
                    print(f"{file}:{number}: `{match[0]}`: write {term}: {line.strip()[:120]}")
                    found += 1
    if found:
        print(f"{found} words that the terms of `lint/words.py` replace", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
