//! A peer gateway of the gateway under test: assignment of all VIP shards to one of the two, and the tunnel between
//! them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use vipgate_dataplane::flow::tunnel_metadata::TunnelMetadata;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::{Announce, EndpointSpec, Role, ShardSpec, VipSpec};
use vipgate_dataplane::ports::{BLOCKS, BlockId, BlockSet};
use vipgate_dataplane::wire::tunnel_auth::TagKey;
use vipgate_dataplane::wire::vxlan::OuterHeaders;

use crate::packets::INSIDE_MAC;

/// Bytes of the outer headers: Ethernet, IPv4, UDP, VXLAN.
pub(crate) const OUTER_HEADERS: u16 = 50;
/// Address and MAC address of the peer gateway.
pub(crate) const PEER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
pub(crate) const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 3, 2];
const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const TUNNEL_PORT: u16 = 4790;
const NAMES: [&str; 2] = ["this", "other"];

/// The owner of all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShardOwner {
    /// The gateway under test.
    Local,
    /// The peer gateway.
    Peer,
}

/// Whether tunnel packets carry authentication tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TunnelTags {
    #[default]
    Disabled,
    Enabled,
}

impl TunnelTags {
    /// The key of one direction: 1 from the gateway under test, 2 to it.
    fn key(self, direction: u8) -> Option<TagKey> {
        (self == Self::Enabled).then(|| TagKey::new(&[direction; 16]))
    }

    fn authentication(self) -> Authentication {
        match (self.key(1), self.key(2)) {
            (Some(sent), taken @ Some(_)) => Authentication::Tagged { transmit_key: sent, receive_keys: [taken, None] },
            _ => Authentication::None,
        }
    }
}

/// Announces all VIPs of a policy from both gateways, with all port blocks and pods in the shard of the gateway under
/// test, and the peer as its replica.
pub(crate) fn assign_shards(policy: &mut PolicyChange) {
    let mut blocks = BlockSet::default();
    (0..BLOCKS as u16).for_each(|block| blocks.insert(BlockId(block)));
    let (local, peer): (Arc<str>, Arc<str>) = (NAMES[0].into(), NAMES[1].into());
    let shard = ShardSpec { gateway: local.clone(), blocks: Some(Arc::new(blocks)), backups: vec![peer] };
    let shards = || vec![shard.clone()];
    let vips = policy.vips.changed();
    policy.vips = vips.map(|vip| VipSpec { announce: Announce::Bgp, shards: shards(), ..(**vip).clone() }).collect();
    let endpoints = policy.endpoints.changed();
    policy.endpoints = endpoints.map(|it| EndpointSpec { gateway: Some(local.clone()), ..(**it).clone() }).collect();
}

/// The membership: which gateway owns the shards, and whether there is a replication link to the peer.
pub(crate) fn membership(owner: ShardOwner, linked: bool, tags: TunnelTags) -> MembersSpec {
    let addresses = [LOCAL, PEER];
    let member = |at: usize| MemberSpec {
        name: NAMES[at].into(),
        tunnel: Some(SocketAddr::new(addresses[at].into(), TUNNEL_PORT)),
        active: at == 1 || owner == ShardOwner::Local,
        connected: linked && at == 1,
        may_open: true,
        policy_release: PolicyRelease::NotAwaited,
        authentication: tags.authentication(),
    };
    MembersSpec { this: Some(NAMES[0].into()), gateways: vec![member(0), member(1)], ..MembersSpec::default() }
}

/// The peer's end of the tunnel: encapsulates frames that the peer received on its outside interface.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tunnel {
    outer: OuterHeaders,
    key: Option<TagKey>,
}

impl Tunnel {
    pub(crate) fn new(tags: TunnelTags) -> Result<Self> {
        let outer = OuterHeaders::new(IpAddr::V4(PEER), SocketAddr::new(LOCAL.into(), TUNNEL_PORT));
        let outer = outer.context("tunnel endpoints have different address families")?;
        Ok(Self { outer, key: tags.key(2) })
    }

    /// Encapsulates the packet behind the first [`OUTER_HEADERS`] bytes of `frame`.
    pub(crate) fn encap(self, frame: &mut [u8], entropy: u16) {
        let vni = TunnelMetadata { sides: Role::Outside.sides(), hop_count: 1, requests_port: false }.vni();
        let inner = frame.len() as u16 - OUTER_HEADERS;
        self.outer.write(frame, inner, vni, entropy >> 2, 0);
        if let Some(key) = self.key {
            key.write_tag(&mut frame[usize::from(OUTER_HEADERS)..], vni);
        }
        frame[..6].copy_from_slice(&INSIDE_MAC);
        frame[6..12].copy_from_slice(&PEER_MAC);
    }
}

/// Decapsulates a frame to the peer gateway; `None` if it has another destination.
pub(crate) fn decap(frame: &[u8]) -> Option<&[u8]> {
    let (outer, inner) = frame.split_at_checked(usize::from(OUTER_HEADERS))?;
    let is_to_peer =
        outer[..6] == PEER_MAC && outer[30..34] == PEER.octets() && outer[36..38] == TUNNEL_PORT.to_be_bytes();
    is_to_peer.then_some(inner)
}
