//! Capabilities of the calling thread (capabilities(7)): permitted, effective, inheritable, ambient and bounding set.

use std::{fmt, io};

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_ambient_set, capability_is_in_bounding_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
};

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

/// The first kernel on which using a BPF map by file descriptor needs no `CAP_BPF`, whatever
/// `unprivileged_bpf_disabled` is.
const MAPS_BY_DESCRIPTOR: (u32, u32) = (5, 19);

impl Capabilities {
    /// The empty set.
    pub const NONE: Self = Self(CapabilitySet::empty());
    /// What the start of a gateway needs; `SETPCAP` to drop the rest, `NET_BIND_SERVICE` for ports below 1024.
    pub const GATEWAY_START: Self = Self(
        CapabilitySet::NET_ADMIN
            .union(CapabilitySet::NET_RAW)
            .union(CapabilitySet::IPC_LOCK)
            .union(CapabilitySet::SYS_ADMIN)
            .union(CapabilitySet::BPF)
            .union(CapabilitySet::PERFMON)
            .union(CapabilitySet::NET_BIND_SERVICE)
            .union(CapabilitySet::SETPCAP),
    );
    /// What the running control thread needs: `NET_ADMIN` for routes, neighbors and attaching its programs again,
    /// `NET_RAW` for packet sockets, with `IPC_LOCK` for reopened AF_XDP sockets, `BPF` for maps on older kernels.
    const CONTROL: Self = Self(
        CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::IPC_LOCK).union(CapabilitySet::BPF),
    );
    /// What withdrawing routes needs.
    pub const ROUTES: Self = Self(CapabilitySet::NET_ADMIN);
    /// What a policy server needs until its ports are bound.
    pub const POLICY_SERVER: Self = Self(CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::SETPCAP));

    /// What using BPF maps and programs by file descriptor needs: nothing; on older kernels `BPF`, or else `SYS_ADMIN`.
    pub fn maps() -> Self {
        if kernel_version().is_some_and(|version| version >= MAPS_BY_DESCRIPTOR) {
            return Self::NONE;
        }
        let has_bpf = capabilities(None).is_ok_and(|sets| sets.permitted.contains(CapabilitySet::BPF));
        Self(if has_bpf { CapabilitySet::BPF } else { CapabilitySet::SYS_ADMIN })
    }

    /// What the running control thread needs.
    pub fn control() -> Self {
        Self(Self::CONTROL.0.union(Self::maps().0))
    }

    /// The effective set of the calling thread.
    pub fn current() -> Self {
        Self(capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective))
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("none") } else { write_names(self.0, f) }
    }
}

fn write_names(set: CapabilitySet, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (n, (name, _)) in set.iter_names().enumerate() {
        write!(f, "{}{name}", if n > 0 { " " } else { "" })?;
    }
    Ok(())
}

/// Limits all capability sets of the calling thread to these.
pub(super) fn limit(Capabilities(kept): Capabilities) -> io::Result<()> {
    let current = capabilities(None)?;
    // The bounding set first, since dropping it needs `SETPCAP`. Without that, `no_new_privs` prevents gaining any.
    let can_drop_bounding = current.effective.contains(CapabilitySet::SETPCAP);
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match capability_is_in_bounding_set(capability) {
            // Beyond the last capability of this kernel.
            Err(Errno::INVAL) => break,
            Ok(true) if can_drop_bounding && !kept.contains(capability) => {
                remove_capability_from_bounding_set(capability)?;
            }
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        if !kept.contains(capability) && capability_is_in_ambient_set(capability)? {
            configure_capability_in_ambient_set(capability, false)?;
        }
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: current.effective & kept,
            permitted: current.permitted & kept,
            inheritable: current.inheritable & kept,
        },
    )?;
    Ok(())
}

/// The kernel's major and minor version.
fn kernel_version() -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_dropped_from_the_calling_thread_only() {
        let before = capabilities(None).unwrap();
        let kept = std::thread::spawn(|| {
            limit(Capabilities::ROUTES).unwrap();
            limit(Capabilities::CONTROL).unwrap();
            capabilities(None).unwrap()
        });
        let kept = kept.join().unwrap();
        assert!(Capabilities::ROUTES.0.contains(kept.permitted | kept.inheritable | kept.effective), "{kept:?}");
        assert_eq!(kept.permitted, before.permitted & Capabilities::ROUTES.0);
        assert_eq!(capabilities(None).unwrap(), before);
    }

    #[test]
    fn capabilities_are_printed_by_name() {
        assert_eq!(Capabilities::NONE.to_string(), "none");
        assert_eq!(Capabilities::POLICY_SERVER.to_string(), "SETPCAP NET_BIND_SERVICE");
        assert!(kernel_version().is_some_and(|version| version > (4, 0)));
    }
}
