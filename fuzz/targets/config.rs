//! Any text as `gateway.yaml` and `policyd.yaml`: it costs no more than it is long, faults have a place, and JSON means the same.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzzed::config(data));

#[cfg(not(fuzzing))]
fn main() {}
