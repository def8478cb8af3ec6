//! Capabilities of the calling thread (capabilities(7)): permitted, effective, inheritable, ambient, and what it could ever gain.

use std::fmt;
use std::io;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_ambient_set, capability_is_in_bounding_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
};

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

/// The first kernel that lets a process use maps that it has a descriptor of without `CAP_BPF`, whatever `unprivileged_bpf_disabled` says.
const MAPS_BY_DESCRIPTOR: (u32, u32) = (5, 19);

impl Capabilities {
    /// None.
    pub const NONE: Self = Self(CapabilitySet::empty());
    /// What a gateway's start needs; `SETPCAP` to give up the rest, `NET_BIND_SERVICE` for ports below 1024.
    pub const START: Self = Self(
        CapabilitySet::NET_ADMIN
            .union(CapabilitySet::NET_RAW)
            .union(CapabilitySet::IPC_LOCK)
            .union(CapabilitySet::SYS_ADMIN)
            .union(CapabilitySet::BPF)
            .union(CapabilitySet::PERFMON)
            .union(CapabilitySet::NET_BIND_SERVICE)
            .union(CapabilitySet::SETPCAP),
    );
    /// What the control thread needs as long as it runs: `NET_ADMIN` for routes, neighbours, and to put the XDP program on an interface again,
    /// `NET_RAW` for packet sockets, with `IPC_LOCK` for AF_XDP sockets that are opened again, `BPF` for maps of older kernels.
    const CONTROL: Self = Self(
        CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW).union(CapabilitySet::IPC_LOCK).union(CapabilitySet::BPF),
    );
    /// What it needs to remove routes.
    pub const ROUTES: Self = Self(CapabilitySet::NET_ADMIN);
    /// What a policy server needs until its ports are open.
    pub const BINDS: Self = Self(CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::SETPCAP));

    /// What a thread needs to use maps and programs that it has descriptors of: nothing, but on older kernels `BPF`, or `SYS_ADMIN` in its place.
    pub fn maps() -> Self {
        if kernel().is_some_and(|version| version >= MAPS_BY_DESCRIPTOR) {
            return Self::NONE;
        }
        let has_bpf = capabilities(None).is_ok_and(|sets| sets.permitted.contains(CapabilitySet::BPF));
        Self(if has_bpf { CapabilitySet::BPF } else { CapabilitySet::SYS_ADMIN })
    }

    /// What the control thread needs as long as it runs.
    pub fn control() -> Self {
        Self(Self::CONTROL.0.union(Self::maps().0))
    }

    /// Those that are in force in the calling thread.
    pub fn current() -> Self {
        Self(capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective))
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("none") } else { bitflags_text(self.0, f) }
    }
}

fn bitflags_text(set: CapabilitySet, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (n, (name, _)) in set.iter_names().enumerate() {
        write!(f, "{}{name}", if n > 0 { " " } else { "" })?;
    }
    Ok(())
}

/// Keeps of what the calling thread has no more than these.
pub(super) fn keep(Capabilities(kept): Capabilities) -> io::Result<()> {
    let now = capabilities(None)?;
    // What it could gain goes first: that takes a capability itself. Where it isn't there, nothing can be gained either (`no_new_privs`).
    let may_limit = now.effective.contains(CapabilitySet::SETPCAP);
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match capability_is_in_bounding_set(capability) {
            // The kernel knows no further ones.
            Err(Errno::INVAL) => break,
            Ok(true) if may_limit && !kept.contains(capability) => remove_capability_from_bounding_set(capability)?,
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
            effective: now.effective & kept,
            permitted: now.permitted & kept,
            inheritable: now.inheritable & kept,
        },
    )?;
    Ok(())
}

/// The kernel's version.
fn kernel() -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_up_what_it_is_not_to_keep_and_no_other_thread_does() {
        let before = capabilities(None).unwrap();
        let kept = std::thread::spawn(|| {
            keep(Capabilities::ROUTES).unwrap();
            keep(Capabilities::CONTROL).unwrap();
            capabilities(None).unwrap()
        });
        let kept = kept.join().unwrap();
        assert!(Capabilities::ROUTES.0.contains(kept.permitted | kept.inheritable | kept.effective), "{kept:?}");
        assert_eq!(kept.permitted, before.permitted & Capabilities::ROUTES.0);
        assert_eq!(capabilities(None).unwrap(), before);
    }

    #[test]
    fn they_have_their_names() {
        assert_eq!(Capabilities::NONE.to_string(), "none");
        assert_eq!(Capabilities::BINDS.to_string(), "SETPCAP NET_BIND_SERVICE");
        assert!(kernel().is_some_and(|version| version > (4, 0)));
    }
}
