//! What tests of certificates have in common.

use std::time::{Duration, SystemTime};

use super::names::DnsName;

pub(super) const DAY: Duration = Duration::from_hours(24);

/// A day in 2026.
pub(super) fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + 20_784 * DAY
}

pub(super) fn names(names: &[&str]) -> Vec<DnsName> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}
