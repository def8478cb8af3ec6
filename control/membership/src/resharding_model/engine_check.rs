//! Compares the mirror of the engine's placement with real snapshots, over random changes of policy and membership.

use std::sync::Arc;

use vipgate_coverage::Coverage;
use vipgate_dataplane::flow::ids;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::{Entries, PolicyChange};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::{
    Announce, BlockSet, NetworkSpec, SLOTS, ShardMapRef, ShardMapSpec, ShardSpec, VipSpec,
};
use vipgate_dataplane::ports::{BlockId, Stripe};

use super::choices::Random;
use super::engine::{Engine, Owner};
use super::policies::{MAX_GATEWAYS, ModelPolicy, NAMES, Order, Policies, SHARDS, index_of};
use super::steps::Script;

/// Sequences of changes, and the changes of each.
const SEQUENCES: u64 = 400;
const CHANGES: usize = 40;
/// A port of a block that isn't reserved; the next block belongs to the other shard.
const FIRST_PORT: u16 = 1024;
const BLOCK_PORTS: u16 = 64;

/// What both say about a shard.
#[derive(Debug, PartialEq, Eq)]
struct ShardState {
    owner: Owner,
    may_open: bool,
    stripe: Stripe,
    successor: Option<usize>,
    replica_targets: u8,
    /// For each replication epoch whether the replica may lack sessions that was in sync then.
    may_lack_sessions: Vec<bool>,
}

fn names(order: Order) -> Vec<Arc<str>> {
    order.iter().map(|at| NAMES[at].into()).collect()
}

/// Every second block, or slot, belongs to the same shard.
fn shard_map(orders: [Order; SHARDS]) -> ShardMapSpec {
    let orders: Vec<_> = if orders[0] == orders[1] { vec![names(orders[0])] } else { orders.map(names).into() };
    let slots = (0..SLOTS).map(|slot| (slot % orders.len()) as u16).collect();
    ShardMapSpec { name: "map".into(), orders, slots }
}

fn listed_shards(orders: [Order; SHARDS]) -> Vec<ShardSpec> {
    let shard = |(at, order): (usize, Order)| {
        let mut blocks = BlockSet::default();
        (at..SLOTS).step_by(SHARDS).for_each(|block| blocks.insert(BlockId(block as u16)));
        let mut gateways = names(order).into_iter();
        let gateway = gateways.next().unwrap_or_default();
        ShardSpec { gateway, blocks: Some(Arc::new(blocks)), backups: gateways.collect() }
    };
    orders.into_iter().enumerate().map(shard).collect()
}

/// The policy as a change from nothing.
fn whole_policy(policy: &ModelPolicy, has_map: bool) -> PolicyChange {
    let orders = policy.placement.orders;
    let vip = VipSpec {
        address: [192, 0, 2, 1].into(),
        name: "Service a/a".into(),
        announce: Announce::L2,
        reserved_ports: Vec::new(),
        shards: if has_map { Vec::new() } else { listed_shards(orders) },
        shard_map: has_map.then(|| ShardMapRef { map: "map".into(), rotation: 0 }),
        private: vec![],
    };
    PolicyChange {
        version: policy.version.to_string(),
        shard_maps: has_map.then(|| shard_map(orders)).into_iter().collect(),
        vips: vec![vip].into(),
        ..PolicyChange::default()
    }
}

fn real_states(policy: &Policy) -> Vec<ShardState> {
    let members = policy.members();
    let index = |id: ids::GatewayId| index_of(members.name(id));
    let state = |at: u16| {
        let shards = &policy.vip(u32::from_be_bytes([192, 0, 2, 1])).expect("there is a VIP").shards;
        let shard = shards.of_port(FIRST_PORT + at * BLOCK_PORTS).expect("each port has a shard");
        ShardState {
            owner: match shard.owner {
                ids::Owner::This => Owner::This,
                ids::Owner::Other(id) => Owner::Other(index(id)),
                ids::Owner::Unowned => Owner::Unowned,
            },
            may_open: shard.may_open,
            stripe: shard.stripe,
            successor: shard.successor().map(index),
            replica_targets: shard.replica_targets(members).map(|id| 1 << index(id)).sum(),
            may_lack_sessions: (0..=members.replication_epoch())
                .map(|epoch| shards.replica_may_lack_sessions(shard, epoch))
                .collect(),
        }
    };
    (0..SHARDS as u16).map(state).collect()
}

fn mirrored_states(engine: &Engine) -> Vec<ShardState> {
    let state = |at: usize| {
        let shard = &engine.shards[at];
        ShardState {
            owner: shard.owner,
            may_open: shard.may_open,
            stripe: shard.stripe.map_or(Stripe::ALL, Stripe::for_epoch),
            successor: engine.successor(at),
            replica_targets: engine.replica_targets(at),
            may_lack_sessions: (0..=engine.replication_epoch())
                .map(|epoch| engine.replica_may_lack_sessions(at, epoch))
                .collect(),
        }
    };
    (0..SHARDS).map(state).collect()
}

/// The next members: most often only a little changes.
fn next_members(random: &mut Random, last: &MembersSpec, versions: &[Arc<str>]) -> MembersSpec {
    let mut next = last.clone();
    next.active_since += random.below(2);
    next.active_changes += random.below(2);
    if next.this.is_none() {
        next.this = Some(NAMES[0].into());
    }
    for member in &mut next.gateways {
        let change = random.below(10);
        match change {
            0 => member.active ^= true,
            1 => member.connected ^= true,
            2 => member.may_open ^= true,
            3..6 => {
                let version = &versions[random.below(versions.len() as u64) as usize];
                member.policy_release = PolicyRelease::Version(version.clone());
            }
            6 if random.percent(10) => member.policy_release = PolicyRelease::NotAwaited,
            _ => {}
        }
    }
    if random.percent(10) {
        let at = random.below(next.gateways.len() as u64) as usize;
        next.gateways.rotate_left(at);
        next.gateways.truncate(MAX_GATEWAYS - 1);
    } else if random.percent(30) {
        let has = |name: &&str| next.gateways.iter().any(|it| *it.name == **name);
        let missing: Vec<&str> = NAMES.into_iter().filter(|name| !has(name)).collect();
        next.gateways.extend(missing.into_iter().map(member));
    }
    next
}

fn member(name: &str) -> MemberSpec {
    MemberSpec {
        name: name.into(),
        tunnel: None,
        active: true,
        connected: true,
        may_open: true,
        policy_release: PolicyRelease::Version("".into()),
        authentication: Authentication::None,
    }
}

fn compare_sequence(seed: u64, coverage: &Coverage) {
    let random = &mut Random::new(!seed);
    let has_map = random.percent(50);
    let mut known = Policies::new();
    let policies: Vec<_> = Script::random(seed).placements.into_iter().map(|it| known.of(it)).collect();
    let mut versions: Vec<Arc<str>> = policies.iter().map(|policy| policy.version.clone()).collect();
    versions.push("".into());
    let (mut engine, mut builder) = (Engine::new(), Builder::new(NetworkSpec::default()));
    let mut current = PolicyChange::default();
    let mut members = MembersSpec { gateways: NAMES.map(member).into(), ..MembersSpec::default() };
    for change in 0..CHANGES {
        let before = engine.clone();
        let snapshot = if change == 0 || random.percent(30) {
            let policy = &policies[random.below(policies.len() as u64) as usize];
            engine.set_policy(policy);
            let next = whole_policy(policy, has_map);
            // Without what is in force already.
            let mut change = next.clone();
            if change.shard_maps == current.shard_maps {
                change.shard_maps = Entries::default();
            }
            if change.vips == current.vips {
                change.vips = Entries::default();
            }
            current = next;
            builder.with_change(&change).expect("a valid policy")
        } else {
            members = next_members(random, &members, &versions);
            engine.set_members(&members);
            builder.with_members(&members)
        };
        let (mirrored, real) = (mirrored_states(&engine), real_states(&snapshot.policy));
        assert_eq!(mirrored, real, "sequence {seed}, change {change} of {before:?}");
        let members = snapshot.policy.members();
        assert_eq!(engine.replication_epoch(), members.replication_epoch(), "sequence {seed}, change {change}");
        assert_eq!(engine.awaits_release, snapshot.policy.awaits_policy_release(), "sequence {seed}, change {change}");
        for shard in &real {
            let is_this = shard.owner == Owner::This;
            coverage.add(if has_map { "shard map" } else { "listed shards" }, 1);
            coverage.add("owner that may open", u64::from(is_this && shard.may_open));
            coverage.add("owner that awaits a release", u64::from(is_this && !shard.may_open));
            coverage.add("other owner", u64::from(matches!(shard.owner, Owner::Other(_))));
            coverage.add("no owner", u64::from(shard.owner == Owner::Unowned));
        }
    }
}

#[test]
fn the_mirror_of_the_placement_is_like_real_snapshots() {
    let coverage = Coverage::default();
    (0..SEQUENCES).for_each(|seed| compare_sequence(seed, &coverage));
    coverage.assert_reached(&[
        "shard map",
        "listed shards",
        "owner that may open",
        "owner that awaits a release",
        "other owner",
        "no owner",
    ]);
}
