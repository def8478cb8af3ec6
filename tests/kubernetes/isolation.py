"""Namespaces of a test script, and programs in them: everything that it starts ends with the script, also when it fails or is killed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def isolate(variables):
    """Runs the calling script again in namespaces of its own, with the variables that the Makefile's targets set."""
    missing = [variable for variable in variables if variable not in os.environ]
    if missing:
        sys.exit(f"{', '.join(missing)}: not set; the Makefile's targets set them")
    if os.geteuid() != 0:
        sys.exit("needs root for namespaces")
    if "VIPGATE_ISOLATED" not in os.environ:
        os.environ["VIPGATE_ISOLATED"] = "yes"
        namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", [*namespaces, sys.executable, *sys.argv])
    run("ip", "link", "set", "lo", "up")
    # In this mount namespace alone, and gone with it. Overlays need another file system than the one that they lie over.
    tempfile.tempdir = "/mnt"
    run("mount", "-t", "tmpfs", "none", tempfile.tempdir)


def run(*command, stdin=None, env=None):
    """Runs a program; its stdout. A failure has the program's stderr."""
    done = subprocess.run([str(word) for word in command], input=stdin, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what, condition, seconds=30, log=None):
    """Waits for a condition; its value."""
    end = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}" + (f"\n{log()[-6000:]}" if log else ""))
        time.sleep(0.1)


class Process:
    """A program that runs until `stop`, with its output in a file."""

    def __init__(self, folder, name, command, **settings):
        self.name = name
        self.log_file = Path(folder) / f"{name}.log"
        with self.log_file.open("wb") as log:
            command = [str(word) for word in command]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **settings)

    def log(self):
        return self.log_file.read_text(errors="replace")

    def wait_until(self, what, condition, seconds=60):
        def holds():
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} has exited with {self.process.returncode}\n{self.log()[-6000:]}")
            return condition()

        return wait_for(f"{self.name}: {what}", holds, seconds, self.log)

    def stop(self):
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} ignores SIGTERM\n{self.log()[-6000:]}") from None
