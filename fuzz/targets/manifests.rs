//! Any text as manifests: it costs no more than it is long, the order of objects says nothing, and what is fine can be put in force, from
//! files and by way of a server alike.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzzed::manifests(data));

#[cfg(not(fuzzing))]
fn main() {}
