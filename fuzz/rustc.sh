#!/bin/sh
# Compiles the workspace's own crates with coverage instrumentation for libFuzzer; cargo runs it as
# RUSTC_WORKSPACE_WRAPPER, so dependencies are those of the tests. Build scripts run without libFuzzer.
# Cargo doesn't notice a change of these flags: touch the sources, or remove target/.
case "$*" in *"--crate-name build_script_"*) exec "$@" ;; esac
exec "$@" --cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
