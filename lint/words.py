#!/usr/bin/env python3
"""Checks that code, output and documents use the field's terms: no word of the table below is left in any file.

    lint/words.py         exit code 1 and the places when a word is left
    lint/words.py FILE..  checks these files only

A word in lower case matches as part of an identifier (`tap` in `set_tap` and `TapQueue`) and in text; a word in upper case matches as a part
of constants only; a phrase matches in text, and between the parts of an identifier. `ALLOWED` names the few places that must keep a word, each with
its reason.
"""

import os
import re
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

EACH = [(word, term) for words, term in WORDS.items() for word in words.split("|")]
PHRASES = {word.lower(): term for word, term in EACH if " " in word}
CONSTANTS = {word: term for word, term in EACH if word.isupper()}
SINGLE = {word: term for word, term in EACH if " " not in word and not word.isupper()}

# File, part of the line: reason.
ALLOWED = [
    ("control/cloud/testkit/src/azure.rs", "tapConfigurations", "a field of Azure's API"),
    ("control/cloud/testkit/src/azure/interface.rs", "tapConfigurations", "a field of Azure's API"),
    ("control/cloud/testkit/src/azure/schema.rs", "tapConfigurations", "a field of Azure's API"),
    ("control/cloud/testkit/src/azure/schema.rs", "virtualNetworkTaps", "a field of Azure's API"),
    ("tests/kernels/guest.py", "-netdev", "QEMU's name of a device"),
    ("tests/kernels/network.py", "IFF_", "a flag of the kernel"),
]


def split_identifiers(line):
    """Separates the parts of camel case: `SettleTime` becomes `Settle Time`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)


def sources():
    """All text files of the project: a checkout without .git has the same."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(set(folders) - {"target", ".git", "node_modules"})
        for file in sorted(files):
            path = str((Path(folder) / file).relative_to(ROOT))
            if TEXT.search(path):
                yield path


def is_allowed(file, line):
    return any(file == place and part in line for place, part, _ in ALLOWED)


def findings(line):
    """The words of a line that are in the table, each with its term."""
    words = re.findall("[A-Za-z]+", split_identifiers(line))
    for word in words:
        if term := CONSTANTS.get(word) or SINGLE.get(word.lower()):
            yield word, term
    text = f" {' '.join(words).lower()} "
    for phrase, term in PHRASES.items():
        if f" {phrase} " in text:
            yield phrase, term


def main():
    found = 0
    for file in sys.argv[1:] or sources():
        if file == "lint/words.py":
            continue
        for number, line in enumerate((ROOT / file).read_text(errors="replace").splitlines(), 1):
            for word, term in findings(line):
                if not is_allowed(file, line):
                    print(f"{file}:{number}: `{word}`: write {term}: {line.strip()[:120]}")
                    found += 1
    if found:
        print(f"{found} words that the terms of `lint/words.py` replace", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
