//! From a tagged address to a VIP, failover, hand-over, and back.

use std::time::{Duration, Instant};

use vipgate_cloud::execute::ActionKind;
use vipgate_cloud::plan::{DesiredVip, plan};
use vipgate_cloud::{Associate, Claim, Provider};

use vipgate_cloud_testkit::Fault;

use crate::aws::world::{World, action, actions, parameter, vip};
use crate::calls::Calls;

#[tokio::test]
async fn an_address_is_claimed_prepared_at_both_gateways_and_attached() {
    let world = World::new(2).await;
    world.converge().await;
    world.assert_home();
    let tags = world.fake.with(|cloud| cloud.tags(&world.allocations[0]));
    assert_eq!((&*tags["vipgate.io/cluster"], &*tags["vipgate.io/vip"]), ("prod", "Service default/web-1"));
    let address = world.address(1).await;
    assert_eq!(address.private.len(), 2, "a private address at the home and at the standby: {address:?}");
    for eni in world.enis.values() {
        assert!(!world.fake.with(|cloud| cloud.has_check(eni)), "packets of pods would be dropped");
        assert_eq!(world.fake.with(|cloud| cloud.private_addresses(eni)).len(), 3, "the primary, and two for VIPs");
    }
    assert_eq!(world.converge().await, [], "nothing is left to do");
}

#[tokio::test]
async fn a_failover_is_one_request_for_each_address_after_two_reads() {
    let mut world = World::new(3).await;
    world.converge().await;
    let observed = world.observe().await;
    world.fail_over();
    world.fake.take_log();
    let plan = plan(&world.desired, &observed);
    for action in &plan.actions {
        world.provider.execute(action, &[]).await.unwrap();
    }
    world.assert_home();
    let log = world.fake.take_log();
    let mut sent = actions(&log);
    // At the same time, so in whatever order.
    sent[..2].sort();
    let expected =
        ["DescribeAddresses", "DescribeNetworkInterfaces", "AssociateAddress", "AssociateAddress", "AssociateAddress"];
    assert_eq!(sent, expected);
    for request in log.iter().filter(|request| action(request) == "AssociateAddress") {
        assert_eq!(parameter(request, "AllowReassociation").as_deref(), Some("true"));
    }
}

#[tokio::test]
async fn from_a_gateway_that_lives_nothing_is_reassociated() {
    let mut world = World::new(1).await;
    world.converge().await;
    world.fake.take_log();
    world.place(1, "b", "a");
    world.converge().await;
    world.assert_home();
    let log = world.fake.take_log();
    let changes: Vec<String> = actions(&log).into_iter().filter(|action| !action.starts_with("Describe")).collect();
    assert_eq!(changes, ["DisassociateAddress", "AssociateAddress"]);
    let forced = log.iter().filter(|request| parameter(request, "AllowReassociation").as_deref() == Some("true"));
    assert_eq!(forced.count(), 0);
}

#[tokio::test]
async fn a_vip_that_is_none_any_more_leaves_nothing_behind() {
    let mut world = World::new(1).await;
    world.converge().await;
    world.desired.vips.clear();
    world.converge().await;
    assert_eq!(world.homes(), [].into());
    let tags = world.fake.with(|cloud| cloud.tags(&world.allocations[0]));
    assert_eq!(tags.keys().collect::<Vec<_>>(), ["team", "vipgate"]);
    for eni in world.enis.values() {
        assert_eq!(world.fake.with(|cloud| cloud.private_addresses(eni)).len(), 1);
    }
}

#[tokio::test]
async fn what_somebody_detached_by_hand_is_attached_again() {
    let world = World::new(1).await;
    world.converge().await;
    world.fake.with(|cloud| cloud.disassociate_by_hand(&world.allocations[0]));
    assert_eq!(world.converge().await, [ActionKind::Attach]);
    world.assert_home();
}

#[tokio::test]
async fn of_a_gateway_that_was_removed_addresses_are_taken_back() {
    let mut world = World::new(1).await;
    world.converge().await;
    world.scope.gateways.remove(0);
    world.desired.gateways.remove("a");
    world.place(1, "b", "a");
    world.converge().await;
    world.assert_home();
}

#[tokio::test]
async fn a_terminated_instance_frees_its_addresses() {
    let mut world = World::new(2).await;
    world.converge().await;
    let instance = world.scope.gateways[0].instance.rsplit('/').next().unwrap().to_owned();
    world.fake.with(|cloud| cloud.terminate(&instance));
    world.fail_over();
    world.converge().await;
    world.assert_home();
}

#[tokio::test]
async fn with_associate_instance_the_primary_address_is_the_vips() {
    let mut world = World::with(1, Associate::Instance, "t3.nano").await;
    world.converge().await;
    let (eni, private) = world.fake.with(|cloud| cloud.routes())[&vip(1)].clone();
    assert_eq!(eni, world.enis["a"]);
    assert_eq!(private, world.fake.with(|cloud| cloud.private_addresses(&eni))[0]);
    world.fail_over();
    assert_eq!(world.converge().await, [ActionKind::Move]);
    world.assert_home();
}

#[tokio::test]
async fn listed_ipv6_addresses_are_assigned_and_moved() {
    let mut world = World::new(0).await;
    world.scope.prefixes = vec!["2001:db8::40/127".parse().unwrap()];
    let first = "2001:db8::40".parse().unwrap();
    let (gateway, standbys) = (Some("a".to_owned()), vec!["b".to_owned()]);
    let wanted = DesiredVip { owner: "Service default/six".to_owned(), gateway, standbys };
    world.desired.vips.insert(first, wanted);
    assert_eq!(world.converge().await, [ActionKind::Attach, ActionKind::Prepare, ActionKind::Prepare]);
    world.assert_home();
    for eni in world.enis.values() {
        assert!(!world.fake.with(|cloud| cloud.has_check(eni)), "packets of pods would be dropped");
    }
    world.fail_over();
    assert_eq!(world.converge().await, [ActionKind::Move]);
    world.assert_home();
    world.desired.vips.clear();
    assert_eq!(world.converge().await, [ActionKind::Detach]);
    assert!(!world.fake.with(|cloud| cloud.routes()).contains_key(&first));
}

#[tokio::test]
async fn the_two_reads_before_a_failover_are_made_at_the_same_time() {
    let mut world = World::new(1).await;
    world.converge().await;
    let observed = world.observe().await;
    world.fail_over();
    let is_read = |request: &vipgate_cloud_testkit::RecordedRequest| action(request).starts_with("Describe");
    world.fake.plan_fault(2, Fault::Delay(Duration::from_millis(500)), is_read);
    let began = Instant::now();
    world.provider.execute(&plan(&world.desired, &observed).actions[0], &[]).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    world.assert_home();
}

#[tokio::test]
async fn every_method_done_twice_is_as_done_once() {
    let world = World::new(1).await;
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/web-1".to_owned() };
    for _ in 0..2 {
        world.provider.claim(&world.address(1).await, &claim).await.unwrap();
    }
    let nic = world.nic("a").await;
    let unprepared = world.address(1).await;
    for _ in 0..2 {
        // As it was observed before, too.
        world.provider.prepare(&nic, std::slice::from_ref(&unprepared), &[]).await.unwrap();
    }
    assert_eq!(world.fake.with(|cloud| cloud.private_addresses(&world.enis["a"])).len(), 2);
    let address = world.address(1).await;
    let binding = vipgate_cloud::Binding { address: address.clone(), private: address.private[&nic.id] };
    for _ in 0..2 {
        world.provider.attach(&nic, std::slice::from_ref(&binding)).await.unwrap();
    }
    let other = world.nic("b").await;
    world.provider.prepare(&other, std::slice::from_ref(&address), &[]).await.unwrap();
    let address = world.address(1).await;
    let moved = vipgate_cloud::Binding { address: address.clone(), private: address.private[&other.id] };
    for _ in 0..2 {
        world.provider.move_from_dead(&nic.id, &other, std::slice::from_ref(&moved)).await.unwrap();
    }
    for _ in 0..2 {
        world.provider.detach(&other.id, std::slice::from_ref(&address)).await.unwrap();
    }
    for _ in 0..2 {
        world.provider.unprepare(&other, std::slice::from_ref(&moved)).await.unwrap();
        world.provider.unprepare(&nic, std::slice::from_ref(&binding)).await.unwrap();
    }
    for _ in 0..2 {
        world.provider.unclaim(&address).await.unwrap();
    }
    assert_eq!(world.fake.with(|cloud| cloud.tags(&world.allocations[0])).len(), 2);
    assert_eq!(world.fake.with(|cloud| cloud.private_addresses(&world.enis["a"])).len(), 1);
}
