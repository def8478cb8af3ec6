//! Faults of a gateway, most of which make it unable to forward, and how those of interfaces follow from their states
//! alone, without clock or I/O. For next hops, see `next_hops.rs`.

use std::fmt;
use std::net::IpAddr;

use vipgate_dataplane::policy::spec::Role;

use crate::config::{Health, LinkRequirement};
use crate::kernel::{LinkState, LinkStatus};
use crate::state::tracking::{Attachment, InterfaceAttachment, ReceiveQueues};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An interface isn't operational.
    Interface {
        /// Interface name.
        interface: String,
        state: LinkState,
    },
    /// An interface has no XDP program.
    XdpDetached {
        /// Interface name.
        interface: String,
    },
    /// An interface has another XDP program.
    XdpReplaced {
        /// Interface name.
        interface: String,
        /// ID of that program.
        id: u32,
    },
    /// An interface has no tc guard.
    GuardDetached {
        /// Interface name.
        interface: String,
    },
    /// An interface has another program in place of the tc guard.
    GuardReplaced {
        /// Interface name.
        interface: String,
        /// ID of that program.
        id: u32,
    },
    /// Whether an interface has its XDP program is unknown.
    XdpUnknown {
        /// Interface name.
        interface: String,
    },
    /// Whether an interface has its tc guard is unknown.
    GuardUnknown {
        /// Interface name.
        interface: String,
    },
    /// Receive queues of an interface have no socket, or sockets have no queue.
    QueuesChanged {
        /// Interface name.
        interface: String,
        queues: ReceiveQueues,
    },
    /// All next hops of one side and address family are down.
    NextHopsDown {
        /// `inside` or `outside`.
        side: &'static str,
        /// The routes of the next hops.
        routes: RouteScope,
        /// Address and interface name of each.
        hops: Vec<(IpAddr, String)>,
    },
    /// The routes of one side and address family to next hops that were up are missing.
    NoRoute {
        /// `inside` or `outside`.
        side: &'static str,
        /// The missing routes.
        routes: RouteScope,
        /// IPv4, else IPv6.
        is_v4: bool,
        /// Their next hops: address and interface name of each.
        hops: Vec<(IpAddr, String)>,
    },
}

/// The routes whose next hops determine whether a side is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteScope {
    /// The default route: without it most destinations are unreachable, even if next hops of other routes are up.
    Default,
    /// All routes, where there is no default route: one next hop that is up is enough.
    All,
}

impl Fault {
    /// Whether the gateway is unable to forward. Without the tc guard it isn't: moving its sessions would help nobody.
    /// Nor while a program can't be queried: most likely it is attached, and traffic takes its way.
    pub fn prevents_forwarding(&self) -> bool {
        match self {
            Self::GuardDetached { .. }
            | Self::GuardReplaced { .. }
            | Self::XdpUnknown { .. }
            | Self::GuardUnknown { .. } => false,
            Self::Interface { .. }
            | Self::XdpDetached { .. }
            | Self::XdpReplaced { .. }
            | Self::QueuesChanged { .. }
            | Self::NextHopsDown { .. }
            | Self::NoRoute { .. } => true,
        }
    }
}

/// Faults as text, if there are any.
pub fn text(faults: &[Fault]) -> Option<String> {
    let texts: Vec<_> = faults.iter().map(Fault::to_string).collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface { interface, state } => write!(f, "interface {interface} {}", state.description()),
            Self::XdpDetached { interface } => write!(f, "interface {interface} has lost its XDP program"),
            Self::XdpReplaced { interface, id } => write!(f, "interface {interface} has another XDP program, id {id}"),
            Self::GuardDetached { interface } => write!(f, "interface {interface} has lost its tc guard"),
            Self::GuardReplaced { interface, id } => {
                write!(f, "interface {interface} has another program in place of its tc guard, id {id}")
            }
            Self::XdpUnknown { interface } => write!(f, "the XDP program of interface {interface} can't be queried"),
            Self::GuardUnknown { interface } => write!(f, "the tc guard of interface {interface} can't be queried"),
            Self::QueuesChanged { interface, queues: ReceiveQueues { bound, current, .. } } => {
                write!(f, "the receive queues of interface {interface} have changed from {bound} to {current}")
            }
            Self::NextHopsDown { side, routes, hops } => {
                let scope = match routes {
                    RouteScope::Default => " of the default route",
                    RouteScope::All => "",
                };
                write!(f, "no next hop{scope} answers {side}:")?;
                write_hops(f, hops)
            }
            Self::NoRoute { side, routes, is_v4, hops } => {
                let kind = match routes {
                    RouteScope::Default => "default route",
                    RouteScope::All => "route",
                };
                let family = if *is_v4 { "IPv4" } else { "IPv6" };
                write!(f, "no {family} {kind} {side}, last next hops:")?;
                write_hops(f, hops)
            }
        }
    }
}

/// Writes the first next hops, each after a space.
fn write_hops(f: &mut fmt::Formatter<'_>, hops: &[(IpAddr, String)]) -> fmt::Result {
    for (index, (address, interface)) in hops.iter().take(MAX_NAMED).enumerate() {
        write!(f, "{} {address} on {interface}", if index == 0 { "" } else { "," })?;
    }
    if hops.len() > MAX_NAMED { write!(f, " and {} more", hops.len() - MAX_NAMED) } else { Ok(()) }
}

/// A side of a gateway: its name, and the interface roles that belong to it.
pub(crate) type Side = (&'static str, fn(Role) -> bool);
/// The two sides of a gateway.
pub(crate) const SIDES: [Side; 2] = [("inside", Role::is_inside), ("outside", Role::is_outside)];
/// Maximum number of next hops named in a fault.
const MAX_NAMED: usize = 3;

/// The faults of interfaces, their programs and receive queues.
pub(crate) fn interface_faults(
    health: &Health,
    links: &[LinkStatus],
    attachments: &[InterfaceAttachment],
) -> Vec<Fault> {
    let mut faults: Vec<Fault> =
        links.iter().filter(|link| is_interface_fault(health.links, links, link)).map(link_fault).collect();
    faults.extend(attachments.iter().flat_map(attachment_faults));
    faults
}

fn attachment_faults(attachment: &InterfaceAttachment) -> impl Iterator<Item = Fault> {
    let interface = || attachment.interface.clone();
    let xdp = match attachment.xdp.state {
        Attachment::Attached => None,
        Attachment::Missing => Some(Fault::XdpDetached { interface: interface() }),
        Attachment::Replaced { id } => Some(Fault::XdpReplaced { interface: interface(), id }),
        Attachment::Unknown => Some(Fault::XdpUnknown { interface: interface() }),
    };
    let guard = match attachment.guard.unwrap_or_default().state {
        Attachment::Attached => None,
        Attachment::Missing => Some(Fault::GuardDetached { interface: interface() }),
        Attachment::Replaced { id } => Some(Fault::GuardReplaced { interface: interface(), id }),
        Attachment::Unknown => Some(Fault::GuardUnknown { interface: interface() }),
    };
    let queues = attachment.queues;
    let changed = queues.is_changed().then(|| Fault::QueuesChanged { interface: interface(), queues });
    [xdp, guard, changed].into_iter().flatten()
}

fn link_fault(link: &LinkStatus) -> Fault {
    Fault::Interface { interface: link.name.clone(), state: link.state }
}

/// Whether an interface is down and that is a fault. With `Require::Any`, only if no interface of one of its sides is
/// up.
pub(crate) fn is_interface_fault(require: LinkRequirement, links: &[LinkStatus], link: &LinkStatus) -> bool {
    let side_is_down = |is_side: &fn(Role) -> bool| {
        is_side(link.role) && !links.iter().any(|other| is_side(other.role) && other.state == LinkState::Up)
    };
    link.state != LinkState::Up
        && (require == LinkRequirement::All || SIDES.iter().any(|(_, is_side)| side_is_down(is_side)))
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::flow::ids::InterfaceId;

    use super::*;
    use crate::state::tracking::ProgramAttachment;

    fn link(id: u8, role: Role, state: LinkState) -> LinkStatus {
        LinkStatus { id: InterfaceId(id), name: format!("if{id}"), ifindex: id.into(), role, state, successor: None }
    }

    fn faults(require: LinkRequirement, links: &[LinkStatus]) -> Vec<String> {
        let health = Health { links: require, ..Health::default() };
        interface_faults(&health, links, &[]).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn each_interface_that_is_down_is_a_fault_with_its_state() {
        let mut links = [link(0, Role::Inside, LinkState::Up), link(1, Role::Outside, LinkState::Up)];
        assert_eq!(faults(LinkRequirement::All, &links), Vec::<String>::new());
        for (state, text) in [
            (LinkState::Down, "interface if1 is administratively down"),
            (LinkState::NoCarrier, "interface if1 has no carrier"),
            (LinkState::NotOperational, "interface if1 is not operational"),
            (LinkState::Gone, "interface if1 is gone"),
        ] {
            links[1].state = state;
            for require in [LinkRequirement::All, LinkRequirement::Any] {
                assert_eq!(faults(require, &links), [text]);
            }
        }
    }

    #[test]
    fn with_require_any_a_side_is_down_with_its_last_interface() {
        let mut links = [
            link(0, Role::Inside, LinkState::Up),
            link(1, Role::Outside, LinkState::NoCarrier),
            link(2, Role::Outside, LinkState::Up),
        ];
        assert_eq!(faults(LinkRequirement::Any, &links), Vec::<String>::new());
        assert_eq!(faults(LinkRequirement::All, &links).len(), 1);
        links[2].state = LinkState::Down;
        assert_eq!(faults(LinkRequirement::Any, &links).len(), 2);
        // An interface on both sides.
        links[2] = link(2, Role::Both, LinkState::Up);
        links[0].state = LinkState::Down;
        assert_eq!(faults(LinkRequirement::Any, &links), Vec::<String>::new());
    }

    /// The faults of an interface, and whether the gateway forwards with them.
    fn of_attachment(mut attachment: InterfaceAttachment) -> Vec<(String, bool)> {
        "if0".clone_into(&mut attachment.interface);
        let faults = interface_faults(&Health::default(), &[], &[attachment]);
        faults.iter().map(|fault| (fault.to_string(), !fault.prevents_forwarding())).collect()
    }

    #[test]
    fn an_interface_without_its_program_is_a_fault() {
        let faults = |state| {
            let xdp = ProgramAttachment { state, detached: 1 };
            of_attachment(InterfaceAttachment { xdp, ..InterfaceAttachment::default() })
        };
        assert_eq!(faults(Attachment::Attached), []);
        assert_eq!(faults(Attachment::Missing), [("interface if0 has lost its XDP program".to_owned(), false)]);
        let replaced = "interface if0 has another XDP program, id 7".to_owned();
        assert_eq!(faults(Attachment::Replaced { id: 7 }), [(replaced, false)]);
        let unknown = "the XDP program of interface if0 can't be queried".to_owned();
        assert_eq!(faults(Attachment::Unknown), [(unknown, true)], "it forwards as before");
    }

    #[test]
    fn an_interface_without_its_tc_guard_is_a_fault_with_which_the_gateway_forwards() {
        let faults = |state| {
            let guard = Some(ProgramAttachment { state, detached: 1 });
            of_attachment(InterfaceAttachment { guard, ..InterfaceAttachment::default() })
        };
        assert_eq!(faults(Attachment::Attached), []);
        assert_eq!(of_attachment(InterfaceAttachment::default()), [], "there is none with `on_exit: pass`");
        assert_eq!(faults(Attachment::Missing), [("interface if0 has lost its tc guard".to_owned(), true)]);
        let replaced = "interface if0 has another program in place of its tc guard, id 7".to_owned();
        assert_eq!(faults(Attachment::Replaced { id: 7 }), [(replaced, true)]);
        let unknown = "the tc guard of interface if0 can't be queried".to_owned();
        assert_eq!(faults(Attachment::Unknown), [(unknown, true)]);
    }

    #[test]
    fn added_and_removed_queues_are_a_fault() {
        let faults = |current| {
            let queues = ReceiveQueues { bound: 2, current, is_startable: current > 1 };
            of_attachment(InterfaceAttachment { queues, ..InterfaceAttachment::default() })
        };
        assert_eq!(faults(2), []);
        for (current, text) in [
            (4, "the receive queues of interface if0 have changed from 2 to 4"),
            (1, "the receive queues of interface if0 have changed from 2 to 1"),
        ] {
            assert_eq!(faults(current), [(text.to_owned(), false)]);
        }
    }
}
