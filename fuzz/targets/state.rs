//! Fuzz target of session persistence: any contents of a state file. Sessions are restored or discarded, then the
//! gateway works: packets are forwarded, no frame is lost, all sessions expire.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate_fuzz::state::state(data));

#[cfg(not(fuzzing))]
fn main() {}
