//! Backend slices: the backends of a large Service, divided by address, so that one changed backend changes one slice.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_policy::compiler::{PlacedBackend, PlacedService};
use vipgate_policy::fingerprint::mix;

use super::{Key, Kind};

/// Backends of a Service up to which they are part of its resource.
pub const MAX_INLINE_BACKENDS: usize = 256;
/// Backends per slice, on average.
const SLICE_BACKENDS: usize = 64;
/// Maximum number of slices of a Service.
pub const MAX_SLICES: u32 = 4096;

/// A Service as a resource: its backends are in it, or in slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceResource {
    /// The Service; without backends if it has slices.
    pub service: PlacedService,
    /// Number of its slices.
    pub slices: u32,
}

/// A part of a Service's backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSlice {
    /// Name of the Service.
    pub service: Arc<str>,
    /// Number of the slice.
    pub number: u32,
    /// The backends, by address.
    pub backends: Vec<PlacedBackend>,
}

/// The key of a slice.
pub fn slice_key(service: &str, number: u32) -> Key {
    Key { kind: Kind::BackendSlice, name: format!("{service}#{number}").into() }
}

/// The Service and the number in a slice's name; `None`: it isn't the name of a slice.
pub fn parse_name(name: &str) -> Option<(&str, u32)> {
    let (service, number) = name.rsplit_once('#')?;
    let parsed = number.parse::<u32>().ok().filter(|parsed| *parsed < MAX_SLICES && parsed.to_string() == number)?;
    Some((service, parsed))
}

/// The number of slices for this many backends; 0: they are in the Service's resource.
pub fn slice_count(backends: usize) -> u32 {
    let count = if backends > MAX_INLINE_BACKENDS { backends.div_ceil(SLICE_BACKENDS) } else { 0 };
    u32::try_from(count).unwrap_or(MAX_SLICES).min(MAX_SLICES)
}

/// The backends of a Service by slice.
pub fn backend_slices(service: &PlacedService) -> Vec<BackendSlice> {
    let count = slice_count(service.backends.len());
    let slice = |number| BackendSlice { service: service.name.clone(), number, backends: Vec::new() };
    let mut slices: Vec<BackendSlice> = (0..count).map(slice).collect();
    if count > 0 {
        for backend in &service.backends {
            slices[slice_of(backend.address, count) as usize].backends.push(backend.clone());
        }
    }
    slices
}

/// The slice of an address. Linear hashing: with one slice more, one of the others is divided, and all addresses of the
/// rest stay.
fn slice_of(address: IpAddr, count: u32) -> u32 {
    let hash = match address {
        IpAddr::V4(v4) => mix(v4.to_bits().into()),
        IpAddr::V6(v6) => mix(mix((v6.to_bits() >> 64) as u64) ^ v6.to_bits() as u64),
    };
    let level = count.next_power_of_two();
    // Fits: less than `level`.
    let number = (hash & u64::from(level - 1)) as u32;
    if number < count { number } else { number - level / 2 }
}

#[cfg(test)]
mod tests;
