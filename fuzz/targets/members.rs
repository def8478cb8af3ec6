//! Any beats, notices and views in any order: numbers of views never fall, leases are for those who serve, and what a server says, others
//! understand.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzzed::members(data));

#[cfg(not(fuzzing))]
fn main() {}
