//! Fuzz target of capture filters, as text and as JSON: both forms of a filter are equivalent.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::filter(data));

#[cfg(not(fuzzing))]
fn main() {}
