//! Any bytes in the file that sessions outlive the process in: they are taken up or not, and then the gateway works as one that began
//! empty: packets pass, frames are conserved, everything expires.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vipgate_fuzz::state::state(data));

#[cfg(not(fuzzing))]
fn main() {}
