//! What belongs to others stays with them, and limits are kept.

use vipgate_cloud::plan::{Problem, plan};
use vipgate_cloud::{Allocation, Binding, Claim, ErrorKind, Tags};

use crate::aws::world::{World, actions, vip};
use crate::calls::Calls;

fn binding(address: &vipgate_cloud::PublicAddress, nic: &vipgate_cloud::Nic) -> Binding {
    Binding { address: address.clone(), private: address.private[&nic.id] }
}

#[tokio::test]
async fn an_address_that_somebody_attached_meanwhile_is_not_taken() {
    let world = World::new(1).await;
    world.converge().await;
    let (address, a, b) = (world.address(1).await, world.nic("a").await, world.nic("b").await);
    // Somebody takes it to an ENI of theirs, after it was observed.
    let (_, theirs) = world.fake.with(|cloud| cloud.add_instance("t3.medium", "eu-west-1c"));
    let private = world.fake.with(|cloud| cloud.private_addresses(&theirs))[0];
    world.fake.with(|cloud| cloud.associate_by_hand(&world.allocations[0], &theirs, private));
    let moved = world.provider.move_from_dead(&a.id, &b, &[binding(&address, &b)]).await;
    assert_eq!(moved.unwrap_err().kind, ErrorKind::InUse);
    let attached = world.provider.attach(&a, &[binding(&address, &a)]).await;
    assert_eq!(attached.unwrap_err().kind, ErrorKind::InUse);
    world.provider.detach(&a.id, std::slice::from_ref(&address)).await.unwrap();
    assert_eq!(world.fake.with(|cloud| cloud.routes())[&vip(1)], (theirs, private));
    let plan = plan(&world.desired, &world.observe().await);
    assert_eq!(plan.actions, []);
    assert!(matches!(plan.problems[&vip(1)], Problem::Attached(_)));
}

#[tokio::test]
async fn an_address_of_another_cluster_is_not_claimed_and_nothing_of_it_is_changed() {
    let world = World::new(1).await;
    let before = world.address(1).await;
    world.fake.with(|cloud| cloud.set_tag(&world.allocations[0], "vipgate.io/cluster", "test"));
    let claim = Claim { cluster: "prod".to_owned(), owner: "x/y".to_owned() };
    let claimed = world.provider.claim(&before, &claim).await;
    assert_eq!(claimed.unwrap_err().kind, ErrorKind::InUse);
    world.fake.take_log();
    assert_eq!(world.converge().await, []);
    world.provider.unclaim(&before).await.unwrap();
    assert_eq!(world.provider.release(&before).await.unwrap_err().kind, ErrorKind::InUse);
    assert!(actions(&world.fake.take_log()).iter().all(|action| action.starts_with("Describe")));
}

#[tokio::test]
async fn a_claim_that_was_removed_keeps_the_address_from_being_attached() {
    let world = World::new(1).await;
    world.converge().await;
    world.fake.with(|cloud| cloud.disassociate_by_hand(&world.allocations[0]));
    let (address, nic) = (world.address(1).await, world.nic("a").await);
    world.fake.with(|cloud| cloud.set_tag(&world.allocations[0], "vipgate.io/cluster", "test"));
    let attached = world.provider.attach(&nic, &[binding(&address, &nic)]).await;
    assert_eq!(attached.unwrap_err().kind, ErrorKind::InUse);
    assert!(!world.fake.with(|cloud| cloud.routes()).contains_key(&vip(1)));
}

#[tokio::test]
async fn private_addresses_of_others_at_the_same_eni_are_left_alone() {
    let mut world = World::new(1).await;
    let eni = world.enis["a"].clone();
    let pods: Vec<std::net::IpAddr> = (100..105).map(|last| [10, 0, 0, last].into()).collect();
    for pod in &pods {
        world.fake.with(|cloud| cloud.assign_by_hand(&eni, *pod));
    }
    assert_eq!(world.nic("a").await.capacity.v4, 9, "fifteen, without the primary and those of pods");
    world.converge().await;
    world.assert_home();
    world.desired.vips.clear();
    world.converge().await;
    let left = world.fake.with(|cloud| cloud.private_addresses(&eni));
    assert_eq!(left[1..], pods);
}

#[tokio::test]
async fn what_somebody_attaches_elsewhere_at_the_eni_is_not_detached() {
    let world = World::new(1).await;
    world.converge().await;
    let (address, nic) = (world.address(1).await, world.nic("a").await);
    let pod = [10, 0, 0, 100].into();
    world.fake.with(|cloud| {
        cloud.assign_by_hand(&world.enis["a"], pod);
        cloud.disassociate_by_hand(&world.allocations[0]);
        cloud.associate_by_hand(&world.allocations[0], &world.enis["a"], pod);
    });
    world.provider.detach(&nic.id, std::slice::from_ref(&address)).await.unwrap();
    let route = world.fake.with(|cloud| cloud.routes().get(&vip(1)).cloned());
    assert_eq!(route, Some((world.enis["a"].clone(), pod)));
}

#[tokio::test]
async fn a_private_address_with_another_public_one_is_neither_used_nor_unassigned() {
    let world = World::new(2).await;
    world.converge().await;
    let (address, nic) = (world.address(1).await, world.nic("a").await);
    let private = address.private[&nic.id];
    world.fake.with(|cloud| {
        let theirs = cloud.add_address(vip(99), &[]);
        cloud.disassociate_by_hand(&world.allocations[0]);
        cloud.associate_by_hand(&theirs, &world.enis["a"], private);
    });
    let attached = world.provider.attach(&nic, &[binding(&address, &nic)]).await;
    assert_eq!(attached.unwrap_err().kind, ErrorKind::InUse);
    let unprepared = world.provider.unprepare(&nic, &[binding(&address, &nic)]).await;
    assert_eq!(unprepared.unwrap_err().kind, ErrorKind::InUse);
    assert!(world.fake.with(|cloud| cloud.routes()).contains_key(&vip(99)));
}

#[tokio::test]
async fn tags_of_a_pool_are_no_patterns() {
    let mut world = World::new(1).await;
    let odd = r"p?b*\c";
    world.fake.with(|cloud| cloud.add_address(vip(99), &[("vipgate", odd)]));
    for (value, found) in [("public", vec![vip(1)]), ("pub*", vec![]), ("p?blic", vec![]), (odd, vec![vip(99)])] {
        world.scope.tags = [("vipgate".to_owned(), value.to_owned())].into();
        let addresses = world.observe().await.addresses;
        assert_eq!(addresses.iter().map(|it| it.address).collect::<Vec<_>>(), found, "{value}");
    }
}

#[tokio::test]
async fn ipv6_addresses_have_room_of_their_own() {
    let mut world = World::with(0, vipgate_cloud::Associate::Nic, "t3.nano").await;
    world.scope.prefixes = vec!["2001:db8::40/127".parse().unwrap()];
    let capacity = world.nic("a").await.capacity;
    assert_eq!((capacity.v4, capacity.v6), (1, 1));
    for address in ["2001:db8::40", "2001:db8::41"] {
        let (gateway, standbys) = (Some("a".to_owned()), vec![]);
        let wanted = vipgate_cloud::plan::DesiredVip { owner: "Service default/six".to_owned(), gateway, standbys };
        world.desired.vips.insert(address.parse().unwrap(), wanted);
    }
    world.converge().await;
    let problems = plan(&world.desired, &world.observe().await).problems;
    assert_eq!(problems.values().collect::<Vec<_>>(), [&Problem::NoCapacity("a".to_owned())]);
    assert_eq!(world.homes().len(), 1);
}

#[tokio::test]
async fn a_small_instance_has_room_for_one_vip() {
    let mut world = World::with(2, vipgate_cloud::Associate::Nic, "t3.nano").await;
    world.desired.vips.values_mut().for_each(|vip| vip.standbys.clear());
    assert_eq!(world.nic("a").await.capacity.v4, 1);
    world.converge().await;
    assert_eq!(world.homes().len(), 1);
    let problems = plan(&world.desired, &world.observe().await).problems;
    assert_eq!(problems.values().collect::<Vec<_>>(), [&Problem::NoCapacity("a".to_owned())]);
    // Room that comes back is used by itself.
    world.place(2, "b", "a");
    world.desired.vips.values_mut().for_each(|vip| vip.standbys.clear());
    world.converge().await;
    world.assert_home();
}

#[tokio::test]
async fn an_address_is_allocated_once_and_only_such_a_one_is_released() {
    let world = World::new(1).await;
    let tags: Tags = world.scope.tags.clone();
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/new".to_owned() };
    let allocation = Allocation { tags, claim, is_ipv6: false, zone: None, token: "prod-1".to_owned() };
    let first = world.provider.allocate(&allocation).await.unwrap();
    let second = world.provider.allocate(&allocation).await.unwrap();
    assert_eq!(first, second);
    assert!(first.token.is_some() && world.observe().await.addresses.contains(&first));
    assert_eq!(world.provider.release(&first).await.unwrap_err().kind, ErrorKind::InUse, "it is claimed");
    world.provider.unclaim(&first).await.unwrap();
    for _ in 0..2 {
        world.provider.release(&first).await.unwrap();
    }
    let existing = world.address(1).await;
    assert_eq!(world.provider.release(&existing).await.unwrap_err().kind, ErrorKind::InUse);
    let count = world.observe().await.addresses.len();
    world.fake.with(|cloud| cloud.set_address_limit(2));
    let refused = world.provider.allocate(&Allocation { token: "prod-2".to_owned(), ..allocation }).await;
    assert_eq!((refused.unwrap_err().kind, world.observe().await.addresses.len()), (ErrorKind::Quota, count));
}

#[tokio::test]
async fn many_gateways_are_read_in_pages() {
    let mut world = World::new(1).await;
    for number in 0..12 {
        let (instance, _) = world.fake.with(|cloud| cloud.add_instance("t3.medium", "eu-west-1a"));
        let gateway = format!("g{number:02}");
        world.scope.gateways.push(vipgate_cloud::GatewayNic { gateway, instance, nic: Some("0".to_owned()) });
    }
    let observed = world.observe().await;
    assert_eq!(observed.nics.len(), 14);
    assert!(observed.nics.iter().all(|nic| nic.zone.as_deref() == Some("eu-west-1")));
    assert_eq!(observed.nic_of("g03").unwrap().capacity.v4, 5);
}
