//! Fuzz target of the membership protocol: heartbeats, view updates and views in any order. View numbers never
//! decrease, only active members hold leases, and messages of a server can be decoded by others.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate::fuzz::members(data));

#[cfg(not(fuzzing))]
fn main() {}
