#!/usr/bin/env python3
"""Tests a gateway on the virtio_net driver of several kernels, in copy mode and with zero copy, over IPv4 and IPv6: make e2e-kernels; needs root.

Each kernel of VIPGATE_KERNELS runs in a guest (QEMU without virtualization), between a pod and a server in network namespaces. A table of
the results stands at the end; logs and consoles are in target/kernels.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import checks
from guest import ROOT, Guest
from isolation import isolate, run
from network import FAMILIES, Network

# From here on virtio_net must grant zero copy, before it must not. 6.12 has none; those between weren't tried.
ZERO_COPY_SINCE = (7, 3)
MULTI_BUFFER_SINCE = (6, 6)
LOGS = ROOT / "target/kernels"
# Of all kernels together: some four times what they take on two cores.
LIMIT_SECONDS = 1200


class OutOfTime(BaseException):
    """The limit is exceeded. Not an error of one check, after which others would follow."""


def interrupt(*_):
    raise OutOfTime(f"longer than {LIMIT_SECONDS} s")


def version(release):
    return tuple(int(number) for number in release.split(".")[:2])


def modes(release):
    """The modes to test: name, `xdp.zero_copy`, and whether zero copy must be granted."""
    if version(release) < ZERO_COPY_SINCE:
        return [("copy", "auto", False)]
    return [("copy", "never", False), ("zero copy", "auto", True)]


class Results:
    """Outcomes by row (kernel, mode, family) and check."""

    def __init__(self):
        self.rows, self.columns, self.failures = {}, [], []

    def add(self, row, name, error=None):
        self.rows.setdefault(row, {})[name] = "FAILED" if error else "ok"
        if name not in self.columns:
            self.columns.append(name)
        if error:
            self.failures.append(f"FAILED: {' '.join(row)}: {name}: {type(error).__name__}: {error}")
            print(f"  {self.failures[-1]}", flush=True)

    def table(self):
        lines = [["kernel", "mode", "IP", *self.columns]]
        lines += [[*row, *(outcomes.get(name, "-") for name in self.columns)] for row, outcomes in self.rows.items()]
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def check_mode(results, release, mode, bench):
    """Runs all checks of one mode."""
    for name, check in checks.ALL:
        print(f"  {time.monotonic() - STARTED:4.0f} s: {mode}: {name}", flush=True)
        try:
            errors = check(bench)
        except Exception as error:
            errors = [error, error]
        for family, error in zip(FAMILIES, errors, strict=True):
            if error is not checks.NOT_APPLICABLE:
                results.add((release, mode, family), name, error)
        if check is checks.starts and any(errors):
            # The others need a gateway.
            break


def check_kernel(results, kernel):
    """Boots a kernel and runs all checks in each of its modes."""
    release = (kernel / "release").read_text().strip()
    print(f"{release}: boots", flush=True)
    logs = LOGS / release
    logs.mkdir(parents=True)
    network, guest = Network(kernel.name), None
    try:
        with tempfile.TemporaryDirectory() as folder:
            guest = Guest(kernel, network, Path(folder), logs)
        for mode, setting, has_zero_copy in modes(release):
            log, has_multi_buffer = logs / f"gateway-{mode.replace(' ', '-')}.log", version(release) >= MULTI_BUFFER_SINCE
            bench = checks.Bench(guest, network, setting, log, has_zero_copy=has_zero_copy, has_multi_buffer=has_multi_buffer)
            try:
                check_mode(results, release, mode, bench)
            finally:
                bench.close()
    except Exception as error:
        results.add((release, "-", "-"), "guest", error)
    finally:
        if guest:
            guest.stop()
        network.close()


def main():
    isolate(["VIPGATE_BINARY", "VIPGATE_KERNELS"])
    Path("/run/netns").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "none", "/run/netns")
    shutil.rmtree(LOGS, ignore_errors=True)
    results = Results()
    kernels = [path.parent for path in Path(os.environ["VIPGATE_KERNELS"]).glob("*/release")]
    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LIMIT_SECONDS)
    try:
        for kernel in sorted(kernels, key=lambda kernel: version((kernel / "release").read_text())):
            check_kernel(results, kernel)
    except OutOfTime as error:
        results.add(("-", "-", "-"), "time", error)
    print(f"\n{results.table()}\n")
    for failure in results.failures:
        print(failure)
    print(f"{len(results.failures)} failed, {time.monotonic() - STARTED:.0f} s; logs: {LOGS.relative_to(ROOT)}")
    sys.exit(1 if results.failures or not results.rows else 0)


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
