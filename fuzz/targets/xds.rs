//! Any responses of a policy server: what is refused changes nothing, and each change comes to what all of it, built anew, comes to.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzzed::xds(data));

#[cfg(not(fuzzing))]
fn main() {}
