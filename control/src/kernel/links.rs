//! The gateway's own interfaces and their addresses, and whether any other device came up or went down.
//!
//! An interface is the device that had its name when the gateway started: packet sockets are bound to that device, so
//! another device of the same name is not taken for it.

use std::collections::{BTreeSet, HashMap};

use tracing::{info, warn};
use vipgate_dataplane::io::{InterfaceId, MAX_MTU};
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, Role};

use super::error::NetworkError;
use super::message::{Address, Change, Link, LinkState};
use super::network::Wanted;

/// How one interface of the gateway stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    /// Its number.
    pub id: InterfaceId,
    /// Its name in the configuration.
    pub name: String,
    /// The kernel's index of it.
    pub ifindex: u32,
    /// Which side of the gateway it is.
    pub role: Role,
    /// Whether packets can be sent and received by it.
    pub state: LinkState,
    /// The device that has its name by now, since the one that had it is gone; and whether that one is up.
    pub successor: Option<(u32, bool)>,
}

/// What a change of the kernel's objects means for the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Effect {
    /// The network looks different now.
    pub(super) changed: bool,
    /// The kernel may have dropped or revived routes without telling: they must be read again.
    pub(super) routes_stale: bool,
}

/// One interface of the gateway.
#[derive(Clone, Debug)]
struct Own {
    id: InterfaceId,
    name: String,
    role: Role,
    ifindex: u32,
    mac: [u8; 6],
    mtu: u16,
    up: bool,
    state: LinkState,
    /// The device is no more. It stays so: a device that comes later isn't the one that the packet sockets are bound to.
    gone: bool,
    /// The device that has come in its place and was reported, and whether it is up.
    successor: Option<(u32, bool)>,
    addresses: BTreeSet<Address>,
}

/// The devices, by the kernel's index.
#[derive(Clone, Debug)]
pub(super) struct Links {
    own: Vec<Own>,
    /// Whether it is up and has a carrier, of every device.
    up: HashMap<u32, bool>,
}

impl Links {
    /// Looks the configured interfaces up among the kernel's devices.
    pub(super) fn new(wanted: &[Wanted], links: &[Link]) -> Result<Self, NetworkError> {
        let mut own = Vec::with_capacity(wanted.len());
        for Wanted { id, name, role } in wanted {
            let link = links.iter().find(|link| &link.name == name);
            let link = link.ok_or_else(|| NetworkError::InterfaceMissing { name: name.clone() })?;
            if link.flags & libc::IFF_LOOPBACK.cast_unsigned() != 0 {
                return Err(NetworkError::Loopback { name: name.clone() });
            }
            let mac = link.mac.filter(|_| link.hardware == libc::ARPHRD_ETHER);
            let mac = mac.ok_or(NetworkError::NotEthernet { name: name.clone(), link_type: link.hardware })?;
            if link.master.is_some() {
                warn!(interface = %name, "belongs to a bridge, bond or VRF: its routes and neighbours are not its own");
            }
            own.push(Own {
                id: *id,
                name: name.clone(),
                role: *role,
                ifindex: link.ifindex,
                mac,
                mtu: mtu(link),
                up: link.is_up(),
                state: link.state(),
                gone: false,
                successor: None,
                addresses: BTreeSet::new(),
            });
        }
        own.sort_by_key(|own| own.id);
        Ok(Self { own, up: HashMap::new() })
    }

    /// The gateway's interface with this index of the kernel.
    pub(super) fn own(&self, ifindex: u32) -> Option<InterfaceId> {
        self.own.iter().find(|own| own.ifindex == ifindex && !own.gone).map(|own| own.id)
    }

    /// A device as it is now, or its end.
    pub(super) fn apply(&mut self, change: Change, link: &Link) -> Effect {
        let before = if change == Change::Gone {
            self.up.remove(&link.ifindex)
        } else {
            self.up.insert(link.ifindex, link.is_up())
        };
        let routes_stale = match change {
            Change::Gone => before.is_some(),
            Change::New | Change::Replaced => before.is_some_and(|before| before != link.is_up()),
        };
        let mut changed = false;
        for own in &mut self.own {
            changed |= own.apply(change, link);
        }
        Effect { changed, routes_stale }
    }

    /// All devices as a dump has them: those that aren't in it are gone.
    pub(super) fn replace(&mut self, links: &[Link]) -> Effect {
        let known: Vec<u32> = self.up.keys().copied().collect();
        let gone = known.into_iter().filter(|ifindex| links.iter().all(|link| link.ifindex != *ifindex));
        for ifindex in gone.collect::<Vec<_>>() {
            self.up.remove(&ifindex);
        }
        let mut changed = false;
        for own in &mut self.own {
            if links.iter().all(|link| link.ifindex != own.ifindex) {
                changed |= own.end();
            }
        }
        for link in links {
            changed |= self.apply(Change::New, link).changed;
        }
        Effect { changed, routes_stale: true }
    }

    /// An address of a device, or its end.
    pub(super) fn apply_address(&mut self, change: Change, address: Address) -> Effect {
        // The kernel drops routes that prefer the address as their source, and says so for some of them only.
        let routes_stale = change == Change::Gone;
        let Some(own) = self.own.iter_mut().find(|own| own.ifindex == address.ifindex && !own.gone) else {
            return Effect { changed: false, routes_stale };
        };
        let before = own.addresses.clone();
        own.addresses.retain(|known| known.ip != address.ip);
        if change != Change::Gone && address.usable {
            own.addresses.insert(address);
        }
        Effect { changed: before != own.addresses, routes_stale }
    }

    /// All addresses as a dump has them.
    pub(super) fn replace_addresses(&mut self, addresses: Vec<Address>) {
        for own in &mut self.own {
            own.addresses.clear();
        }
        for address in addresses {
            self.apply_address(Change::New, address);
        }
    }

    /// How the interfaces stand.
    pub(super) fn status(&self) -> Vec<LinkStatus> {
        let status = |own: &Own| LinkStatus {
            id: own.id,
            name: own.name.clone(),
            ifindex: own.ifindex,
            role: own.role,
            state: own.state,
            successor: own.successor,
        };
        self.own.iter().map(status).collect()
    }

    /// The interfaces, for the engine.
    pub(super) fn spec(&self) -> Vec<InterfaceSpec> {
        let spec = |own: &Own| InterfaceSpec {
            id: own.id,
            name: own.name.clone(),
            ifindex: own.ifindex,
            role: own.role,
            mac: own.mac,
            mtu: own.mtu,
            up: own.up,
            addresses: own.addresses.iter().map(|address| address.ip).collect(),
        };
        self.own.iter().map(spec).collect()
    }
}

impl Own {
    /// Returns whether anything about it has changed.
    fn apply(&mut self, change: Change, link: &Link) -> bool {
        if self.gone || link.ifindex != self.ifindex {
            self.notice_successor(change, link);
            return false;
        }
        if change == Change::Gone {
            return self.end();
        }
        if link.name != self.name {
            info!(interface = %self.name, ifindex = self.ifindex, now = %link.name, "the interface was renamed; still using it");
        }
        let before = (self.mac, self.mtu, self.up);
        self.mac = link.mac.unwrap_or(self.mac);
        self.mtu = mtu(link);
        self.up = link.is_up();
        self.state = link.state();
        if self.mtu != before.1 {
            self.say_mtu(before.1);
        }
        before != (self.mac, self.mtu, self.up)
    }

    fn end(&mut self) -> bool {
        if self.gone {
            return false;
        }
        warn!(interface = %self.name, ifindex = self.ifindex, "the interface is gone; it counts as down until another device has its name");
        self.gone = true;
        self.up = false;
        self.state = LinkState::Gone;
        self.addresses.clear();
        true
    }

    fn say_mtu(&self, before: u16) {
        let (interface, mtu) = (&self.name, self.mtu);
        if mtu > MAX_MTU {
            warn!(
                event = "mtu_too_long",
                interface,
                mtu,
                most = MAX_MTU,
                "the MTU of {interface} is {mtu} now: packets of more than {MAX_MTU} bytes that come there are lost; set it, and that of whoever \
                 sends there: `ip link set dev {interface} mtu {MAX_MTU}`"
            );
        } else if before > MAX_MTU {
            info!(
                event = "mtu_fits",
                interface, mtu, "the MTU of {interface} is {mtu} now, and nothing is too long any more"
            );
        }
    }

    fn notice_successor(&mut self, change: Change, link: &Link) {
        if !self.gone {
            return;
        }
        let is_known = self.successor.is_some_and(|(ifindex, _)| ifindex == link.ifindex);
        if change == Change::Gone || link.name != self.name {
            self.successor = self.successor.filter(|_| !is_known);
            return;
        }
        if !is_known {
            warn!(
                interface = %self.name,
                was = self.ifindex,
                ifindex = link.ifindex,
                "another device has the interface's name now; the gateway starts again to use it once it is up"
            );
        }
        self.successor = Some((link.ifindex, link.is_up()));
    }
}

/// An IP packet has at most 65535 bytes, whatever the device would carry.
fn mtu(link: &Link) -> u16 {
    u16::try_from(link.mtu).unwrap_or(u16::MAX)
}
