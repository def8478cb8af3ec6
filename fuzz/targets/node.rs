//! Fuzz target of the agent of a node: what a policy server sends, and the nftables scripts that follow from it.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::node(data));

#[cfg(not(fuzzing))]
fn main() {}
