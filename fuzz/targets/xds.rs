//! Fuzz target of the xDS client: any responses of a policy server. Rejected responses change nothing, and incremental
//! updates lead to the same policy as a full rebuild.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::xds(data));

#[cfg(not(fuzzing))]
fn main() {}
