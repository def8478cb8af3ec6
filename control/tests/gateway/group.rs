//! Three gateways as one of them, gw-a, sees them: gw-b is linked and behind, gw-c is gone and gw-a stands in for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vipgate::gateway::group::GroupStatus;
use vipgate::members::{Authority, Member, View};
use vipgate::peer::{Broken, CopiesStatus, PeerStatus, PeersStatus};
use vipgate_dataplane::ports::{BlockId, BlockSet};
use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec, MembersSpec};
use vipgate_dataplane::snapshot::spec::{PolicySet, ShareSpec};
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::wire::tunnel_tag::TagKey;

pub const NAMES: [&str; 3] = ["gw-a", "gw-b", "gw-c"];

/// How gw-a stands while these serve.
pub fn group(serving: &[&str]) -> GroupStatus {
    let member = |(at, name): (u64, &str)| Member {
        serving: serving.contains(&name),
        incarnation: 7 + at,
        ..Member::new(name.into(), 3 + at)
    };
    let spec = |name: &str| MemberSpec {
        name: name.into(),
        tunnel: Some(format!("10.2.0.{}:4790", name.as_bytes()[3]).parse().unwrap()),
        serving: serving.contains(&name),
        linked: name == "gw-b",
        may_open: true,
        authentication: match name {
            "gw-b" => {
                Authentication::Tagged { sent: TagKey::new(&[1; 16]), taken: [Some(TagKey::new(&[2; 16])), None] }
            }
            _ => Authentication::None,
        },
    };
    let copies = CopiesStatus {
        in_sync_from: true,
        sent: 120,
        taken: 80,
        queued: 4096,
        resyncs: 2,
        released: Some(14),
        ..CopiesStatus::default()
    };
    let up = PeerStatus {
        linked: true,
        since: Some(Tick(1)),
        version: 1,
        rtt: Some(Duration::from_micros(180)),
        copies,
        ..PeerStatus::default()
    };
    let down = PeerStatus {
        refused: 4,
        failures: 5,
        last_failure: Some(Broken::Connection("connection refused".to_owned())),
        ..PeerStatus::default()
    };
    let peers: BTreeMap<Arc<str>, PeerStatus> = [("gw-b".into(), up), ("gw-c".into(), down)].into();
    GroupStatus {
        authority: Some(Authority::Present),
        view: Arc::new(View { number: 14, serving_changes: 3, members: (0..).zip(NAMES).map(member).collect() }),
        links: Arc::new(PeersStatus { peers, strangers: 1 }),
        draining: false,
        spec: MembersSpec {
            this: Some("gw-a".into()),
            gateways: NAMES.map(spec).into(),
            since: 14,
            serving_changes: 3,
        },
        lease: None,
    }
}

/// The policy with its VIPs dealt: the first is gw-a's, of the second each has a part; its endpoint is gw-a's.
pub fn dealt() -> PolicySet {
    let mut set = super::policy();
    let share =
        |home: &str, backup: &str, blocks| ShareSpec { gateway: home.into(), blocks, backups: vec![backup.into()] };
    let blocks = |first: u16| {
        let mut blocks = BlockSet::default();
        (first..first + 336).for_each(|block| blocks.insert(BlockId(block)));
        Some(Arc::new(blocks))
    };
    set.vips[0].shares = vec![share("gw-a", "gw-b", None)];
    set.vips[1].shares =
        vec![share("gw-a", "gw-b", blocks(16)), share("gw-b", "gw-c", blocks(352)), share("gw-c", "gw-a", blocks(688))];
    set.endpoints[0].gateway = Some("gw-a".into());
    set
}
