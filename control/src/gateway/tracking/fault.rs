//! What keeps a gateway from doing what it serves for, and what of it interfaces show: decided from states alone, without clock or I/O. Next
//! hops take time, see `next_hops.rs`.

use std::fmt;
use std::net::IpAddr;

use vipgate_dataplane::snapshot::spec::Role;

use super::xdp::{Capture, TrackedCapture};
use crate::config::{Health, Require};
use crate::kernel::{LinkState, LinkStatus};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An interface can't send or receive.
    Link {
        /// Its name.
        interface: String,
        /// Why.
        state: LinkState,
    },
    /// An interface has no XDP program.
    NotCaptured {
        /// Its name.
        interface: String,
    },
    /// An interface has another XDP program.
    Replaced {
        /// Its name.
        interface: String,
        /// The kernel's number of that program.
        id: u32,
    },
    /// Of one side's next hops of one family, none answers.
    NextHops {
        /// Which side.
        side: &'static str,
        /// Which of its next hops.
        routes: Routes,
        /// Each one's address and its interface's name.
        hops: Vec<(IpAddr, String)>,
    },
    /// One side had next hops of one family that answered, and has no route to any now.
    NoRoute {
        /// Which side.
        side: &'static str,
        /// Which routes it had.
        routes: Routes,
        /// The family: IPv4, or IPv6.
        is_v4: bool,
        /// Where they led to: each next hop's address and its interface's name.
        hops: Vec<(IpAddr, String)>,
    },
}

/// The routes by whose next hops a side is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// The default route's: without it most destinations are lost, whatever other next hops answer.
    Default,
    /// All, where there is no default route: each is for some destinations, and one that answers speaks for its side.
    All,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link { interface, state } => write!(f, "interface {interface} {}", state.phrase()),
            Self::NotCaptured { interface } => write!(f, "interface {interface} has lost its XDP program"),
            Self::Replaced { interface, id } => write!(f, "interface {interface} has another XDP program, id {id}"),
            Self::NextHops { side, routes, hops } => {
                let of = match routes {
                    Routes::Default => " of the default route",
                    Routes::All => "",
                };
                write!(f, "no next hop{of} answers {side}:")?;
                write_hops(f, hops)
            }
            Self::NoRoute { side, routes, is_v4, hops } => {
                let kind = match routes {
                    Routes::Default => "default route",
                    Routes::All => "route",
                };
                let family = if *is_v4 { "IPv4" } else { "IPv6" };
                write!(f, "no {kind} for {family} is left {side}, it led to")?;
                write_hops(f, hops)
            }
        }
    }
}

/// The first of them, each with a space before it.
fn write_hops(f: &mut fmt::Formatter<'_>, hops: &[(IpAddr, String)]) -> fmt::Result {
    for (at, (address, interface)) in hops.iter().take(MOST_NAMED).enumerate() {
        write!(f, "{} {address} on {interface}", if at == 0 { "" } else { "," })?;
    }
    if hops.len() > MOST_NAMED { write!(f, " and {} more", hops.len() - MOST_NAMED) } else { Ok(()) }
}

/// A side's name, and who is on it.
pub(super) type Side = (&'static str, fn(Role) -> bool);
/// The two sides of a gateway.
pub(super) const SIDES: [Side; 2] = [("inside", Role::is_inside), ("outside", Role::is_outside)];
/// Next hops that a fault names.
const MOST_NAMED: usize = 3;

/// All that is wrong with interfaces.
pub(super) fn of_interfaces(health: &Health, links: &[LinkStatus], captures: &[TrackedCapture]) -> Vec<Fault> {
    let mut faults: Vec<Fault> =
        links.iter().filter(|link| counts(health.links, links, link)).map(link_fault).collect();
    faults.extend(captures.iter().filter_map(|capture| {
        let interface = capture.interface.clone();
        match &capture.state {
            Capture::Attached => None,
            Capture::Missing => Some(Fault::NotCaptured { interface }),
            Capture::Replaced { id } => Some(Fault::Replaced { interface, id: *id }),
        }
    }));
    faults
}

fn link_fault(link: &LinkStatus) -> Fault {
    Fault::Link { interface: link.name.clone(), state: link.state }
}

/// Whether an interface is down, and that is a fault: where any one of a side will do, only when none of that side is up.
pub(super) fn counts(require: Require, links: &[LinkStatus], link: &LinkStatus) -> bool {
    let side_is_down = |is_side: &fn(Role) -> bool| {
        is_side(link.role) && !links.iter().any(|other| is_side(other.role) && other.state == LinkState::Up)
    };
    link.state != LinkState::Up && (require == Require::All || SIDES.iter().any(|(_, is_side)| side_is_down(is_side)))
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::io::InterfaceId;

    use super::*;

    fn link(id: u8, role: Role, state: LinkState) -> LinkStatus {
        LinkStatus { id: InterfaceId(id), name: format!("if{id}"), ifindex: id.into(), role, state, successor: None }
    }

    fn said(require: Require, links: &[LinkStatus]) -> Vec<String> {
        let health = Health { links: require, ..Health::default() };
        of_interfaces(&health, links, &[]).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn any_interface_that_is_down_is_a_fault_and_says_why() {
        let mut links = [link(0, Role::Inside, LinkState::Up), link(1, Role::Outside, LinkState::Up)];
        assert_eq!(said(Require::All, &links), Vec::<String>::new());
        for (state, words) in [
            (LinkState::Down, "interface if1 is set down"),
            (LinkState::NoCarrier, "interface if1 has no carrier"),
            (LinkState::NotOperational, "interface if1 is not operational"),
            (LinkState::Gone, "interface if1 is gone"),
        ] {
            links[1].state = state;
            for require in [Require::All, Require::Any] {
                assert_eq!(said(require, &links), [words]);
            }
        }
    }

    #[test]
    fn where_one_of_a_side_will_do_a_side_is_down_with_its_last_interface() {
        let mut links = [
            link(0, Role::Inside, LinkState::Up),
            link(1, Role::Outside, LinkState::NoCarrier),
            link(2, Role::Outside, LinkState::Up),
        ];
        assert_eq!(said(Require::Any, &links), Vec::<String>::new());
        assert_eq!(said(Require::All, &links).len(), 1);
        links[2].state = LinkState::Down;
        assert_eq!(said(Require::Any, &links).len(), 2);
        // One that is on both sides.
        links[2] = link(2, Role::Both, LinkState::Up);
        links[0].state = LinkState::Down;
        assert_eq!(said(Require::Any, &links), Vec::<String>::new());
    }

    #[test]
    fn an_interface_without_its_program_is_a_fault() {
        let capture = |state| TrackedCapture { interface: "if0".to_owned(), state, detached: 1 };
        let said = |state| {
            let faults = of_interfaces(&Health::default(), &[], &[capture(state)]);
            faults.iter().map(Fault::to_string).collect::<Vec<_>>()
        };
        assert_eq!(said(Capture::Attached), Vec::<String>::new());
        assert_eq!(said(Capture::Missing), ["interface if0 has lost its XDP program"]);
        assert_eq!(said(Capture::Replaced { id: 7 }), ["interface if0 has another XDP program, id 7"]);
    }
}
