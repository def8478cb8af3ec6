//! Backend slices: the backends of a large Service, divided by address, so that one changed backend changes one slice.
//!
//! A Service's resource and slices have two lists of backends: the first one of each address, and further ones. The
//! first ones are assigned to slices by address, further ones by their first target port, too, since an address may have
//! more of them than a slice.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::spec::first_target;
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
    /// The first backends of addresses, by address.
    pub backends: Vec<PlacedBackend>,
    /// Further backends, by address and ports.
    pub more_backends: Vec<PlacedBackend>,
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
    let slice = |number| BackendSlice {
        service: service.name.clone(),
        number,
        backends: Vec::new(),
        more_backends: Vec::new(),
    };
    let mut slices: Vec<BackendSlice> = (0..count).map(slice).collect();
    if count > 0 {
        let (first, further) = divide(&service.backends);
        for backend in first {
            slices[slice_of(hash(backend.address), count) as usize].backends.push(backend.clone());
        }
        for backend in further {
            slices[slice_of(further_hash(backend), count) as usize].more_backends.push(backend.clone());
        }
    }
    slices
}

/// The first backend of each address, and the others; `backends`: in the order of a Service.
pub(super) fn divide(backends: &[PlacedBackend]) -> (Vec<&PlacedBackend>, Vec<&PlacedBackend>) {
    let (mut first, mut further) = (Vec::with_capacity(backends.len()), Vec::new());
    for of_address in backends.chunk_by(|one, other| one.address == other.address) {
        first.extend(&of_address[..1]);
        further.extend(&of_address[1..]);
    }
    (first, further)
}

/// Sorts the backends of both lists as a Service has them.
pub(in crate::xds) fn sort_backends(backends: &mut [PlacedBackend]) {
    backends.sort_by(|one, other| one.key().cmp(&other.key()));
}

fn hash(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(v4) => mix(v4.to_bits().into()),
        IpAddr::V6(v6) => mix(mix((v6.to_bits() >> 64) as u64) ^ v6.to_bits() as u64),
    }
}

fn further_hash(backend: &PlacedBackend) -> u64 {
    let (number, port) = first_target(&backend.ports);
    mix(hash(backend.address) ^ u64::from(number) << 16 ^ u64::from(port))
}

/// The slice of a hash. Linear hashing: with one slice more, one of the others is divided, and all backends of the rest
/// stay.
fn slice_of(hash: u64, count: u32) -> u32 {
    let level = count.next_power_of_two();
    // Fits: less than `level`.
    let number = (hash & u64::from(level - 1)) as u32;
    if number < count { number } else { number - level / 2 }
}

#[cfg(test)]
mod tests;
