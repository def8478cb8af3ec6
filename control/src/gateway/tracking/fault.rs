//! What keeps a gateway from doing what it serves for: decided from states alone, without clock or I/O.

use std::fmt;
use std::net::IpAddr;

use vipgate_dataplane::snapshot::spec::Role;

use super::xdp::{Capture, TrackedCapture};
use crate::config::{Health, Require};
use crate::kernel::{LinkState, LinkStatus, NextHopState, NextHopStatus};

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
        /// Each one's address and its interface's name.
        hops: Vec<(IpAddr, String)>,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link { interface, state } => write!(f, "interface {interface} {}", state.phrase()),
            Self::NotCaptured { interface } => write!(f, "interface {interface} has lost its XDP program"),
            Self::Replaced { interface, id } => write!(f, "interface {interface} has another XDP program, id {id}"),
            Self::NextHops { side, hops } => {
                write!(f, "no next hop answers {side}:")?;
                for (at, (address, interface)) in hops.iter().take(MOST_NAMED).enumerate() {
                    write!(f, "{} {address} on {interface}", if at == 0 { "" } else { "," })?;
                }
                if hops.len() > MOST_NAMED { write!(f, " and {} more", hops.len() - MOST_NAMED) } else { Ok(()) }
            }
        }
    }
}

/// A side's name, and who is on it.
type Side = (&'static str, fn(Role) -> bool);
/// The two sides of a gateway.
const SIDES: [Side; 2] = [("inside", Role::is_inside), ("outside", Role::is_outside)];
/// Next hops that a fault names.
const MOST_NAMED: usize = 3;

/// All that is wrong.
pub(super) fn all(
    health: &Health,
    links: &[LinkStatus],
    captures: &[TrackedCapture],
    next_hops: &[NextHopStatus],
) -> Vec<Fault> {
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
    for side in SIDES {
        for is_v4 in [true, false] {
            let dead = dead_next_hops(side, is_v4, links, next_hops);
            // On a link that is both sides it is one fault.
            faults.extend(dead.filter(|dead| !faults.iter().any(|known| is_same(known, dead))));
        }
    }
    faults
}

/// A side is dead for a family when none of its next hops answers, and one of them has answered before. Those behind a link that is down
/// don't count: the link does.
fn dead_next_hops(
    (side, is_side): Side,
    is_v4: bool,
    links: &[LinkStatus],
    next_hops: &[NextHopStatus],
) -> Option<Fault> {
    let named = |hop: &NextHopStatus| {
        let link = links.iter().find(|link| link.id == hop.interface)?;
        let counts = is_side(link.role) && link.state == LinkState::Up && hop.address.is_ipv4() == is_v4;
        counts.then(|| (hop.state, hop.address, link.name.clone()))
    };
    let hops: Vec<_> = next_hops.iter().filter_map(named).collect();
    let has = |state| hops.iter().any(|hop| hop.0 == state);
    let is_dead = has(NextHopState::Down) && !has(NextHopState::Up);
    let down = hops.into_iter().filter(|hop| hop.0 == NextHopState::Down).map(|(_, address, name)| (address, name));
    is_dead.then(|| Fault::NextHops { side, hops: down.collect() })
}

fn is_same(one: &Fault, other: &Fault) -> bool {
    matches!((one, other), (Fault::NextHops { hops: one, .. }, Fault::NextHops { hops: other, .. }) if one == other)
}

fn link_fault(link: &LinkStatus) -> Fault {
    Fault::Link { interface: link.name.clone(), state: link.state }
}

/// Whether an interface is down, and that is a fault: where any one of a side will do, only when none of that side is up.
fn counts(require: Require, links: &[LinkStatus], link: &LinkStatus) -> bool {
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
        all(&health, links, &[], &[]).iter().map(Fault::to_string).collect()
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
            let faults = all(&Health::default(), &[], &[capture(state)], &[]);
            faults.iter().map(Fault::to_string).collect::<Vec<_>>()
        };
        assert_eq!(said(Capture::Attached), Vec::<String>::new());
        assert_eq!(said(Capture::Missing), ["interface if0 has lost its XDP program"]);
        assert_eq!(said(Capture::Replaced { id: 7 }), ["interface if0 has another XDP program, id 7"]);
    }

    #[test]
    fn a_side_is_dead_for_a_family_when_none_answers_and_one_has_answered_before() {
        use NextHopState::{Down, Unknown, Up};
        let hop = |interface: u8, address: &str, state| NextHopStatus {
            interface: InterfaceId(interface),
            address: address.parse().unwrap(),
            state,
            answered: None,
        };
        let said = |links: &[LinkStatus], hops: &[NextHopStatus]| {
            all(&Health::default(), links, &[], hops).iter().map(Fault::to_string).collect::<Vec<_>>()
        };
        let mut links = [link(0, Role::Inside, LinkState::Up), link(1, Role::Outside, LinkState::Up)];
        let alive = [Up, Unknown];
        for (a, b) in [(Up, Down), (Up, Up), (Unknown, Unknown), (Unknown, Up)] {
            assert!(said(&links, &[hop(1, "192.0.2.1", a), hop(1, "192.0.2.2", b)]).is_empty(), "{a:?} {b:?}");
        }
        for other in [Unknown, Down] {
            let mut hops = vec![hop(1, "192.0.2.1", Down), hop(1, "192.0.2.2", other), hop(0, "10.0.0.1", Up)];
            hops.push(hop(1, "fe80::1", alive[usize::from(other == Down)]));
            let found = said(&links, &hops);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("no next hop answers outside: 192.0.2.1 on if1"), "{found:?}");
            assert_eq!(found[0].contains("192.0.2.2"), other == Down);
        }
        // For one family alone, and inside.
        let hops = [hop(0, "fd00::1", Down), hop(0, "10.0.0.1", Up)];
        assert_eq!(said(&links, &hops), ["no next hop answers inside: fd00::1 on if0"]);
        // The link is what is wrong.
        links[0].state = LinkState::NoCarrier;
        assert_eq!(said(&links, &hops), ["interface if0 has no carrier"]);
        // One fault, of one link.
        let both = [link(0, Role::Both, LinkState::Up)];
        assert_eq!(said(&both, &hops), ["no next hop answers inside: fd00::1 on if0"]);
        let many: Vec<_> = (1..=9).map(|n| hop(0, &format!("10.0.0.{n}"), Down)).collect();
        assert!(said(&both, &many)[0].ends_with("10.0.0.3 on if0 and 6 more"), "{:?}", said(&both, &many));
    }
}
