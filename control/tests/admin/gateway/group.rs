//! The group status of gw-a, one of three gateways: gw-b is linked but not in sync; gw-c is down, and gw-a owns its
//! shard.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vipgate::membership::status::Authority;
use vipgate::membership::{Member, MembershipView};
use vipgate::peer::{LinkError, PeerStatus, PeersStatus, Release, ReplicationStatus};
use vipgate::state::group::GroupStatus;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::{EndpointSpec, ShardSpec, VipSpec};
use vipgate_dataplane::ports::{BlockId, BlockSet};
use vipgate_dataplane::wire::tunnel_auth::TagKey;

pub const NAMES: [&str; 3] = ["gw-a", "gw-b", "gw-c"];

/// The group status of gw-a with these active members.
pub fn group(active: &[&str]) -> GroupStatus {
    let member = |(at, name): (u64, &str)| Member {
        serving: active.contains(&name),
        incarnation: 7 + at,
        ..Member::new(name.into(), 3 + at)
    };
    let members = (0..).zip(NAMES).map(member).collect();
    GroupStatus {
        authority: Some(Authority::Reachable),
        view: Arc::new(MembershipView { number: 14, serving_changes: 3, members }),
        links: Arc::new(PeersStatus { peers: peers(), unauthenticated: 1 }),
        draining: false,
        spec: MembersSpec {
            this: Some("gw-a".into()),
            gateways: NAMES.map(|name| member_spec(name, active.contains(&name))).into(),
            active_since: 14,
            active_changes: 3,
        },
        ..GroupStatus::default()
    }
}

fn member_spec(name: &str, active: bool) -> MemberSpec {
    MemberSpec {
        name: name.into(),
        tunnel: Some(format!("10.2.0.{}:4790", name.as_bytes()[3]).parse().unwrap()),
        active,
        connected: name == "gw-b",
        may_open: true,
        policy_release: PolicyRelease::NotAwaited,
        authentication: match name {
            "gw-b" => Authentication::Tagged {
                transmit_key: TagKey::new(&[1; 16]),
                receive_keys: [Some(TagKey::new(&[2; 16])), None],
            },
            _ => Authentication::None,
        },
    }
}

/// The links: gw-b is up, gw-c down.
fn peers() -> BTreeMap<Arc<str>, PeerStatus> {
    let replication = ReplicationStatus {
        in_sync_from: true,
        sent: 120,
        received: 80,
        queued_bytes: 4096,
        resyncs: 2,
        released: Some(Release { view: 14, ..Release::default() }),
        ..ReplicationStatus::default()
    };
    let up = PeerStatus {
        linked: true,
        since: Some(Tick(1)),
        version: 1,
        rtt: Some(Duration::from_micros(180)),
        replication,
        ..PeerStatus::default()
    };
    let down = PeerStatus {
        rejections: 4,
        failures: 5,
        last_failure: Some(LinkError::Connection("connection refused".to_owned())),
        ..PeerStatus::default()
    };
    [("gw-b".into(), up), ("gw-c".into(), down)].into()
}

/// A policy with placement: gw-a is the home of the first VIP and of its endpoint; the second VIP has a shard per
/// gateway.
pub fn sharded_policy() -> PolicyChange {
    let mut set = super::policy();
    let shard =
        |home: &str, backup: &str, blocks| ShardSpec { gateway: home.into(), blocks, backups: vec![backup.into()] };
    let blocks = |first: u16| {
        let mut blocks = BlockSet::default();
        (first..first + 336).for_each(|block| blocks.insert(BlockId(block)));
        Some(Arc::new(blocks))
    };
    let shards = [
        vec![shard("gw-a", "gw-b", None)],
        vec![shard("gw-a", "gw-b", blocks(16)), shard("gw-b", "gw-c", blocks(352)), shard("gw-c", "gw-a", blocks(688))],
    ];
    let placed = set.vips.changed().zip(shards).map(|(vip, shards)| VipSpec { shards, ..(**vip).clone() });
    set.vips = placed.collect();
    let first = EndpointSpec::clone(set.endpoints.changed().next().unwrap());
    set.endpoints.insert(EndpointSpec { gateway: Some("gw-a".into()), ..first });
    set
}
