//! The gateway's interfaces with their addresses, and the up/down state of all other devices.
//!
//! An interface is the device that had the configured name at start: packet sockets are bound to its index, so another
//! device with the same name doesn't replace it.

use std::collections::{BTreeSet, HashMap};

use tracing::{info, warn};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::spec::{InterfaceSpec, Role};
use vipgate_netlink::{Address, Change, Link, LinkState};

use super::error::NetworkError;
use super::network::InterfaceConfig;

/// The state of one gateway interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    pub id: InterfaceId,
    /// Its name in the configuration.
    pub name: String,
    /// Its interface index.
    pub ifindex: u32,
    /// Its role: inside, outside or both.
    pub role: Role,
    pub state: LinkState,
    /// The index and up state of a new device with its name, after the original device was removed.
    pub successor: Option<(u32, bool)>,
}

/// The effect of an event on the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Effect {
    /// The network state has changed.
    pub(super) changed: bool,
    /// The kernel may have removed or revived routes without a notification: they must be dumped again.
    pub(super) routes_stale: bool,
}

/// One interface of the gateway.
#[derive(Clone, Debug)]
struct OwnInterface {
    id: InterfaceId,
    name: String,
    role: Role,
    ifindex: u32,
    mac: [u8; 6],
    mtu: u16,
    /// The gateway's packet buffers: for the MTUs at its start.
    frames: FrameLayout,
    up: bool,
    state: LinkState,
    is_virtual: bool,
    /// The device was removed. Final: packet sockets aren't bound to a device that appears later.
    gone: bool,
    /// The index and up state of the new device with its name, already logged.
    successor: Option<(u32, bool)>,
    addresses: BTreeSet<Address>,
}

/// All devices, by interface index.
#[derive(Clone, Debug)]
pub(super) struct Links {
    interface_id: Vec<OwnInterface>,
    /// Of every device: whether it is up and has a carrier.
    up: HashMap<u32, bool>,
}

impl Links {
    /// Finds the configured interfaces among the kernel's devices.
    pub(super) fn new(wanted: &[InterfaceConfig], links: &[Link]) -> Result<Self, NetworkError> {
        let is_wanted = |link: &&Link| wanted.iter().any(|wanted| wanted.name == link.name);
        let frames = FrameLayout::for_mtu(links.iter().filter(is_wanted).map(mtu).max().unwrap_or_default());
        let mut own = Vec::with_capacity(wanted.len());
        for InterfaceConfig { id, name, role } in wanted {
            let link = links.iter().find(|link| &link.name == name);
            let link = link.ok_or_else(|| NetworkError::InterfaceMissing { name: name.clone() })?;
            if link.flags & libc::IFF_LOOPBACK.cast_unsigned() != 0 {
                return Err(NetworkError::Loopback { name: name.clone() });
            }
            let mac = link.mac.filter(|_| link.hardware_type == libc::ARPHRD_ETHER);
            let mac = mac.ok_or(NetworkError::NotEthernet { name: name.clone(), link_type: link.hardware_type })?;
            if link.master.is_some() {
                warn!(
                    interface = %name,
                    "belongs to a bridge, bond or VRF: routes and neighbors are on the master device"
                );
            }
            own.push(OwnInterface {
                id: *id,
                name: name.clone(),
                role: *role,
                ifindex: link.ifindex,
                mac,
                mtu: mtu(link),
                frames,
                up: link.is_up(),
                state: link.state(),
                is_virtual: link.is_virtual,
                gone: false,
                successor: None,
                addresses: BTreeSet::new(),
            });
        }
        own.sort_by_key(|own| own.id);
        Ok(Self { interface_id: own, up: HashMap::new() })
    }

    /// The gateway's interface with this index.
    pub(super) fn interface_id(&self, ifindex: u32) -> Option<InterfaceId> {
        self.interface_id.iter().find(|own| own.ifindex == ifindex && !own.gone).map(|own| own.id)
    }

    /// Applies a link event.
    pub(super) fn apply(&mut self, change: Change, link: &Link) -> Effect {
        let before = if change == Change::Removed {
            self.up.remove(&link.ifindex)
        } else {
            self.up.insert(link.ifindex, link.is_up())
        };
        let routes_stale = match change {
            Change::Removed => before.is_some(),
            Change::New | Change::Replaced => before.is_some_and(|before| before != link.is_up()),
        };
        let mut changed = false;
        for own in &mut self.interface_id {
            changed |= own.apply(change, link);
        }
        Effect { changed, routes_stale }
    }

    /// Replaces all devices by a dump: those that aren't in it were removed.
    pub(super) fn replace(&mut self, links: &[Link]) -> Effect {
        let known: Vec<u32> = self.up.keys().copied().collect();
        let gone = known.into_iter().filter(|ifindex| links.iter().all(|link| link.ifindex != *ifindex));
        for ifindex in gone.collect::<Vec<_>>() {
            self.up.remove(&ifindex);
        }
        let mut changed = false;
        for own in &mut self.interface_id {
            if links.iter().all(|link| link.ifindex != own.ifindex) {
                changed |= own.mark_gone();
            }
        }
        for link in links {
            changed |= self.apply(Change::New, link).changed;
        }
        Effect { changed, routes_stale: true }
    }

    /// Applies an address event.
    pub(super) fn apply_address(&mut self, change: Change, address: Address) -> Effect {
        // The kernel removes routes with this preferred source address, and sends notifications for some of them only.
        let routes_stale = change == Change::Removed;
        let Some(own) = self.interface_id.iter_mut().find(|own| own.ifindex == address.ifindex && !own.gone) else {
            return Effect { changed: false, routes_stale };
        };
        let before = own.addresses.clone();
        own.addresses.retain(|known| known.ip != address.ip);
        if change != Change::Removed && address.usable {
            own.addresses.insert(address);
        }
        Effect { changed: before != own.addresses, routes_stale }
    }

    /// Replaces all addresses by a dump.
    pub(super) fn replace_addresses(&mut self, addresses: Vec<Address>) {
        for own in &mut self.interface_id {
            own.addresses.clear();
        }
        for address in addresses {
            self.apply_address(Change::New, address);
        }
    }

    /// The state of the interfaces.
    pub(super) fn status(&self) -> Vec<LinkStatus> {
        let status = |own: &OwnInterface| LinkStatus {
            id: own.id,
            name: own.name.clone(),
            ifindex: own.ifindex,
            role: own.role,
            state: own.state,
            successor: own.successor,
        };
        self.interface_id.iter().map(status).collect()
    }

    /// The interfaces, for the engine.
    pub(super) fn spec(&self) -> Vec<InterfaceSpec> {
        let spec = |own: &OwnInterface| InterfaceSpec {
            id: own.id,
            name: own.name.clone(),
            ifindex: own.ifindex,
            role: own.role,
            mac: own.mac,
            mtu: own.mtu,
            up: own.up,
            addresses: own.addresses.iter().map(|address| address.ip).collect(),
            frames: own.frames,
            partial_checksums: own.is_virtual,
        };
        self.interface_id.iter().map(spec).collect()
    }
}

impl OwnInterface {
    /// Applies a link event; returns whether the interface has changed.
    fn apply(&mut self, change: Change, link: &Link) -> bool {
        if self.gone || link.ifindex != self.ifindex {
            self.track_successor(change, link);
            return false;
        }
        if change == Change::Removed {
            return self.mark_gone();
        }
        if link.name != self.name {
            info!(
                interface = %self.name,
                ifindex = self.ifindex,
                now = %link.name,
                "the interface was renamed; it stays in use"
            );
        }
        let before = (self.mac, self.mtu, self.up);
        self.mac = link.mac.unwrap_or(self.mac);
        self.mtu = mtu(link);
        self.up = link.is_up();
        self.state = link.state();
        if self.mtu != before.1 {
            self.log_mtu_change(before.1);
        }
        before != (self.mac, self.mtu, self.up)
    }

    fn mark_gone(&mut self) -> bool {
        if self.gone {
            return false;
        }
        warn!(
            interface = %self.name,
            ifindex = self.ifindex,
            "the interface was removed; it counts as down until another device has its name"
        );
        self.gone = true;
        self.up = false;
        self.state = LinkState::Gone;
        self.addresses.clear();
        true
    }

    fn log_mtu_change(&self, before: u16) {
        let (interface, mtu, max) = (&self.name, self.mtu, self.frames.max_mtu());
        if mtu > max {
            warn!(
                event = "mtu_too_long",
                interface,
                mtu,
                max,
                "the MTU of {interface} is {mtu} now: received packets of more than {max} bytes are lost; lower it, and \
                 that of the senders on this link: `ip link set dev {interface} mtu {max}`{}",
                self.restart_advice()
            );
        } else if before > max {
            info!(event = "mtu_fits", interface, mtu, "the MTU of {interface} is {mtu} now, within the limit of {max}");
        }
    }

    /// Whether a restart helps, which adapts the packet buffers to the MTU.
    fn restart_advice(&self) -> &'static str {
        let fits = self.mtu <= FrameLayout::for_mtu(self.mtu).max_mtu();
        if fits { "; or restart the gateway, whose packet buffers adapt to the MTU" } else { "" }
    }

    fn track_successor(&mut self, change: Change, link: &Link) {
        if !self.gone {
            return;
        }
        let is_known = self.successor.is_some_and(|(ifindex, _)| ifindex == link.ifindex);
        if change == Change::Removed || link.name != self.name {
            self.successor = self.successor.filter(|_| !is_known);
            return;
        }
        if !is_known {
            warn!(
                interface = %self.name,
                was = self.ifindex,
                ifindex = link.ifindex,
                "another device has the interface's name now; the gateway restarts to use it once it is up"
            );
        }
        self.successor = Some((link.ifindex, link.is_up()));
    }
}

/// The MTU, limited to the maximum size of an IP packet, 65535 bytes.
fn mtu(link: &Link) -> u16 {
    u16::try_from(link.mtu).unwrap_or(u16::MAX)
}
