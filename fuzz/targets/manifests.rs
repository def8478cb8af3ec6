//! Fuzz target of manifests: cost is linear in the input, the order of objects is irrelevant, and valid policies can be
//! applied, from files and from a server.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::manifests(data));

#[cfg(not(fuzzing))]
fn main() {}
