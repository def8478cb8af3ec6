//! Fuzz target of `gateway.yaml` and `policyd.yaml`: cost is linear in the input, errors have a position, and the same
//! configuration as JSON is equivalent.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::config(data));

#[cfg(not(fuzzing))]
fn main() {}
