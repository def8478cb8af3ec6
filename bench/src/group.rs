//! Another gateway beside the measured one: which of the two has all ports of the VIPs, and the tunnel between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use vipgate_dataplane::ports::{BLOCKS, BlockId, BlockSet};
use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec, MembersSpec};
use vipgate_dataplane::snapshot::spec::{Announce, PolicySet, Role, ShareSpec};
use vipgate_dataplane::snapshot::tunnels::Mark;
use vipgate_dataplane::wire::tunnel_tag::TagKey;
use vipgate_dataplane::wire::vxlan::Outer;

use crate::packets::INSIDE_MAC;
use crate::rig::Control;

/// What a tunnel puts before a frame: Ethernet, IPv4, UDP, VXLAN.
pub(crate) const OUTER: u16 = 50;
/// The other gateway's address; its link address is [`OTHER_MAC`].
pub(crate) const OTHER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
pub(crate) const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 3, 2];
const THIS: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const PORT: u16 = 4790;
const NAMES: [&str; 2] = ["this", "other"];

/// Which gateway has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The measured one.
    This,
    /// The other one.
    Other,
}

/// Whether packets between the two have tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tags {
    #[default]
    Without,
    With,
}

impl Tags {
    /// The key of one direction, to the measured gateway or from it.
    fn key(self, direction: u8) -> Option<TagKey> {
        (self == Self::With).then(|| TagKey::new(&[direction; 16]))
    }

    fn authentication(self) -> Authentication {
        match (self.key(1), self.key(2)) {
            (Some(sent), taken @ Some(_)) => Authentication::Tagged { sent, taken: [taken, None] },
            _ => Authentication::None,
        }
    }
}

/// Makes all VIPs of a policy common to both gateways: announced by both, with all blocks and pods in the share of the measured one, for
/// which the other one stands in.
pub(crate) fn share(set: &mut PolicySet) {
    let mut blocks = BlockSet::default();
    (0..BLOCKS as u16).for_each(|block| blocks.insert(BlockId(block)));
    let (this, other): (Arc<str>, Arc<str>) = (NAMES[0].into(), NAMES[1].into());
    let share = ShareSpec { gateway: this.clone(), blocks: Some(Arc::new(blocks)), backups: vec![other] };
    for vip in &mut set.vips {
        vip.announce = Announce::Bgp;
        vip.shares = vec![share.clone()];
    }
    for endpoint in &mut set.endpoints {
        endpoint.gateway = Some(this.clone());
    }
}

/// Lets the measured gateway know which of the two has everything, and whether the other one takes copies of sessions.
pub(crate) fn agree(control: &mut Control, holder: Holder, linked: bool, tags: Tags) {
    let addresses = [THIS, OTHER];
    let member = |at: usize| MemberSpec {
        name: NAMES[at].into(),
        tunnel: Some(SocketAddr::new(addresses[at].into(), PORT)),
        serving: at == 1 || holder == Holder::This,
        linked: linked && at == 1,
        may_open: true,
        authentication: tags.authentication(),
    };
    let spec =
        MembersSpec { this: Some(NAMES[0].into()), gateways: vec![member(0), member(1)], ..MembersSpec::default() };
    let snapshot = control.builder.with_members(&spec);
    control.publisher.publish(snapshot);
}

/// Turns the frame at the end of `frame` into one that the other gateway has sent through the tunnel, as it came in outside there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tunnel {
    outer: Outer,
    key: Option<TagKey>,
}

impl Tunnel {
    pub(crate) fn new(tags: Tags) -> Result<Self> {
        let outer = Outer::new(IpAddr::V4(OTHER), SocketAddr::new(THIS.into(), PORT));
        let outer = outer.context("both ends of the tunnel are of one family")?;
        Ok(Self { outer, key: tags.key(2) })
    }

    pub(crate) fn wrap(self, frame: &mut [u8], entropy: u16) {
        let vni = Mark { sides: Role::Outside.sides(), leg: 1 }.vni();
        let inner = frame.len() as u16 - OUTER;
        self.outer.write(frame, inner, vni, entropy >> 2, 0);
        if let Some(key) = self.key {
            key.seal(&mut frame[usize::from(OUTER)..], vni);
        }
        frame[..6].copy_from_slice(&INSIDE_MAC);
        frame[6..12].copy_from_slice(&OTHER_MAC);
    }
}

/// What is in a frame that goes to the other gateway; `None` if it goes elsewhere.
pub(crate) fn inner(frame: &[u8]) -> Option<&[u8]> {
    let (outer, inner) = frame.split_at_checked(usize::from(OUTER))?;
    let is_right = outer[..6] == OTHER_MAC && outer[30..34] == OTHER.octets() && outer[36..38] == PORT.to_be_bytes();
    is_right.then_some(inner)
}
