//! Shards of VIPs with a shard map: owners and ports by slot, and what stays when maps and members change.

use std::sync::Arc;

use super::*;
use crate::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use crate::policy::spec::ShardMapSpec;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Members as gateway `a` sees them; `active` by name, and for each the version of the policy that it has released.
fn members(active: &str, released: &str) -> Members {
    let member = |name: &&str| MemberSpec {
        name: (*name).into(),
        tunnel: None,
        active: active.contains(*name),
        connected: true,
        may_open: true,
        policy_release: PolicyRelease::Version(released.into()),
        authentication: Authentication::None,
    };
    let spec = MembersSpec {
        this: Some("a".into()),
        gateways: NAMES.iter().map(member).collect(),
        active_since: 1,
        active_changes: 1,
    };
    let mut members = Members::default();
    members.set_policy_version("v2");
    members.with_states(&spec)
}

/// A map whose slots have these orders in turn.
fn spec(orders: &[&str]) -> ShardMapSpec {
    let names = |order: &&str| order.chars().map(|name| Arc::from(name.to_string())).collect();
    ShardMapSpec {
        name: "m".into(),
        orders: orders.iter().map(names).collect(),
        slots: (0..SLOTS).map(|slot| (slot % orders.len()) as u16).collect(),
    }
}

fn id(members: &Members, name: &str) -> Owner {
    match members.id(name).unwrap() {
        this if members.this() == Some(this) => Owner::This,
        other => Owner::Other(other),
    }
}

#[test]
fn a_block_belongs_to_the_owner_of_its_rotated_slot() {
    let members = members("abd", "v2");
    let map = Arc::new(ShardMap::new(&spec(&["ab", "ba", "cd"]), &ShardMap::default(), &members));
    for rotation in [0, 1, 63, 64, 700, 1023] {
        let shards = Shards::new(map.clone(), Some(ShardMapId(0)), rotation);
        let mut own = BlockSet::default();
        for block in blocks() {
            let slot = (usize::from(block.0) + usize::from(rotation)) % SLOTS;
            let owner = id(&members, ["a", "b", "d"][slot % 3]);
            assert_eq!(shards.owner_of_port(block.first_port() + 9), owner, "block {} + {rotation}", block.0);
            assert_eq!(shards.of_port(block.first_port()).unwrap().owner, owner);
            if owner == Owner::This {
                own.insert(block);
            }
        }
        assert_eq!(shards.own_blocks(), own);
        let parts: Vec<_> = shards.parts(members.this()).map(|part| *part.blocks).collect();
        assert_eq!(parts, [own], "all of it may be allocated");
        let homes: Vec<_> = shards.home_parts().iter().map(|part| (part.shard.home(), part.blocks.count())).collect();
        assert_eq!(homes.iter().map(|(_, count)| count).sum::<u32>(), 1024);
        assert_eq!(homes.len(), 3);
    }
}

#[test]
fn sessions_are_opened_in_ports_with_the_home_of_the_endpoint_first() {
    // `b` has failed, and `a` owns its slots.
    let members = members("acd", "v2");
    let map = Arc::new(ShardMap::new(&spec(&["ab", "ba"]), &ShardMap::default(), &members));
    let shards = Shards::new(map, Some(ShardMapId(0)), 0);
    let parts = |home: &str| shards.parts(members.id(home)).map(|part| part.blocks.contains(BlockId(20))).collect();
    let (own, failed): (Vec<bool>, Vec<bool>) = (parts("a"), parts("b"));
    assert_eq!((own, failed), (vec![true, false], vec![false, true]));
}

#[test]
fn an_added_gateway_changes_no_owner_until_it_is_active() {
    let members = members("ab", "v1");
    let before = ShardMap::new(&spec(&["ab", "ba"]), &ShardMap::default(), &members);
    let after = ShardMap::new(&spec(&["cab", "ba", "ab", "cba"]), &before, &members);
    assert!(after.has_same_owners(&before));
    assert!(after.list().iter().all(|shard| shard.former_owner().is_none()));
    assert!(after.starts_epoch(&members), "the added gateway needs the sessions");
    let stripes = |map: &ShardMap| map.of_slot(0).unwrap().stripe;
    assert_eq!(stripes(&before), stripes(&after), "its owner goes on with the same ports");
}

#[test]
fn what_policy_moves_between_active_gateways_waits_for_the_former_owner() {
    let (waiting, released) = (members("ab", "v1"), members("ab", "v2"));
    let before = ShardMap::new(&spec(&["ba"]), &ShardMap::default(), &waiting);
    let moved = ShardMap::new(&spec(&["ab"]), &before, &waiting);
    let shard = |map: &ShardMap| map.of_slot(5).unwrap().clone();
    assert!(shard(&moved).awaits_release() && !shard(&moved).may_open);
    assert_eq!(Shards::new(Arc::new(moved.clone()), None, 0).parts(waiting.this()).count(), 0);
    let after = moved.with_members(&released).unwrap();
    assert!(shard(&after).may_open && shard(&after).former_owner().is_none());
    // The former owner is inactive: nobody can release it, and nobody uses it.
    let alone = moved.with_members(&members("a", "v1")).unwrap();
    assert!(shard(&alone).may_open);
    // Lost again meanwhile: it has to be released anew.
    let lost = ShardMap::new(&spec(&["ba"]), &moved, &waiting);
    assert_eq!((shard(&lost).owner, shard(&lost).former_owner()), (id(&waiting, "b"), None));
}

#[test]
fn a_vip_with_another_map_is_synchronized_anew() {
    let members = members("ab", "v2");
    let map = Arc::new(ShardMap::new(&spec(&["ab", "ba"]), &ShardMap::default(), &members));
    let shards = |id, rotation| Shards::new(map.clone(), Some(ShardMapId(id)), rotation);
    let first = shards(0, 3).replacing(&Shards::default(), &members);
    assert!(!first.starts_epoch(&members));
    let shard = map.of_slot(0).unwrap();
    assert!(!first.replica_may_lack_sessions(shard, 1));
    for other in [shards(1, 3), shards(0, 4)] {
        let other = other.replacing(&first, &members);
        assert!(other.starts_epoch(&members));
        assert!(other.replica_may_lack_sessions(shard, 1) && !other.replica_may_lack_sessions(shard, 2));
    }
    assert!(!shards(0, 3).replacing(&first, &members).starts_epoch(&members));
}
