//! Any text and any message as a filter of captures and sessions: both forms of one filter mean the same.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzzed::filter(data));

#[cfg(not(fuzzing))]
fn main() {}
