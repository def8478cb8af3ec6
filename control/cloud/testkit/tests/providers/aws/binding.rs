//! Private addresses of VIPs: each is bound to one VIP, and is never nobody's.

use std::net::IpAddr;

use vipgate_cloud::plan::plan;
use vipgate_cloud::{Associate, Binding, Claim, ErrorKind, Nic, Provider, PublicAddress};
use vipgate_cloud_testkit::Fault;
use vipgate_cloud_testkit::aws::error_reply;

use crate::aws::world::{World, action, vip};
use crate::calls::Calls;

fn binding(address: &PublicAddress, nic: &Nic) -> Binding {
    Binding { address: address.clone(), private: address.private[&nic.id] }
}

fn key(eni: &str) -> String {
    format!("vipgate.io/private/{eni}")
}

impl World {
    /// Private addresses beside the primary one.
    fn secondaries(&self, gateway: &str) -> Vec<IpAddr> {
        self.fake.with(|cloud| cloud.private_addresses(&self.enis[gateway]))[1..].to_vec()
    }

    /// The private address at a gateway that the tags of an address have.
    fn bound(&self, allocation: usize, gateway: &str) -> Option<IpAddr> {
        let tags = self.fake.with(|cloud| cloud.tags(&self.allocations[allocation]));
        tags.get(&key(&self.enis[gateway])).map(|text| text.parse().unwrap())
    }

    /// Claims the address `1`, and returns it.
    async fn claimed(&self) -> PublicAddress {
        let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/web-1".to_owned() };
        self.provider.claim(&self.address(1).await, &claim).await.unwrap();
        self.address(1).await
    }

    async fn prepare(&self, gateway: &str, address: &PublicAddress) {
        self.provider.prepare(&self.nic(gateway).await, std::slice::from_ref(address), &[]).await.unwrap();
    }
}

fn denied() -> Fault {
    Fault::Reply(error_reply(403, "UnauthorizedOperation"))
}

#[tokio::test]
async fn with_the_claim_go_the_private_addresses_also_at_a_former_gateway() {
    let mut world = World::new(1).await;
    world.converge().await;
    // The gateway of the standby isn't one any more, and then the VIP isn't.
    world.scope.gateways.pop();
    world.desired.gateways.remove("b");
    world.desired.vips.clear();
    world.converge().await;
    assert_eq!((world.secondaries("a"), world.secondaries("b")), (vec![], vec![]));
    assert_eq!(world.fake.with(|cloud| cloud.tags(&world.allocations[0])).len(), 2);
}

#[tokio::test]
async fn a_private_address_that_stays_keeps_its_tag_when_the_claim_goes() {
    let world = World::new(1).await;
    world.converge().await;
    let address = world.address(1).await;
    let private = world.secondaries("a")[0];
    world.fake.with(|cloud| {
        let theirs = cloud.add_address(vip(99), &[]);
        cloud.disassociate_by_hand(&world.allocations[0]);
        cloud.associate_by_hand(&theirs, &world.enis["a"], private);
    });
    world.provider.unclaim(&address).await.unwrap();
    assert_eq!(world.fake.with(|cloud| cloud.routes())[&vip(99)].1, private);
    assert_eq!((world.bound(0, "a"), world.bound(0, "b")), (Some(private), None));
    let tags = world.fake.with(|cloud| cloud.tags(&world.allocations[0]));
    assert!(!tags.contains_key("vipgate.io/cluster"), "{tags:?}");
}

#[tokio::test]
async fn without_the_right_to_unassign_the_tags_stay() {
    let world = World::new(1).await;
    world.converge().await;
    world.fake.with(|cloud| cloud.disassociate_by_hand(&world.allocations[0]));
    let address = world.address(1).await;
    world.fake.plan_fault(99, denied(), |request| action(request) == "UnassignPrivateIpAddresses");
    world.provider.unclaim(&address).await.unwrap();
    assert_eq!(world.address(1).await.claim, None);
    for gateway in ["a", "b"] {
        assert_eq!(world.secondaries(gateway), [world.bound(0, gateway).unwrap()]);
    }
}

#[tokio::test]
async fn an_old_read_loses_no_private_address_of_another_eni() {
    let world = World::new(1).await;
    let address = world.claimed().await;
    world.fake.with(|cloud| cloud.freeze_addresses(2));
    world.provider.prepare(&world_nic(&world, "a").await, std::slice::from_ref(&address), &[]).await.unwrap();
    world.provider.prepare(&world_nic(&world, "b").await, std::slice::from_ref(&address), &[]).await.unwrap();
    for gateway in ["a", "b"] {
        assert_eq!(world.secondaries(gateway), [world.bound(0, gateway).unwrap()]);
    }
}

/// A NIC that is observed without a read of addresses.
async fn world_nic(world: &World, gateway: &str) -> Nic {
    let scope = vipgate_cloud::Scope { tags: [].into(), ..world.scope.clone() };
    world.provider.observe(&scope).await.unwrap().nic_of(gateway).unwrap().clone()
}

#[tokio::test]
async fn two_writers_that_do_not_see_each_other_come_to_the_same_private_address() {
    let world = World::new(1).await;
    let (address, nic) = (world.claimed().await, world.nic("a").await);
    let prepare = || world.provider.prepare(&nic, std::slice::from_ref(&address), &[]);
    // Neither what the first one wrote nor what it assigned is seen by the second one.
    world.fake.with(|cloud| cloud.set_lag(3));
    prepare().await.unwrap();
    prepare().await.unwrap();
    assert_eq!(world.secondaries("a"), [world.bound(0, "a").unwrap()]);
}

#[tokio::test]
async fn what_is_assigned_already_waits_for_its_tag_to_be_seen() {
    let world = World::new(1).await;
    let (address, nic) = (world.claimed().await, world.nic("a").await);
    let prepare = || world.provider.prepare(&nic, std::slice::from_ref(&address), &[]);
    world.fake.with(|cloud| cloud.freeze_addresses(4));
    prepare().await.unwrap();
    prepare().await.unwrap();
    assert_eq!(world.secondaries("a"), [world.bound(0, "a").unwrap()]);
}

#[tokio::test]
async fn a_pods_address_at_the_same_eni_is_never_taken_for_a_vips() {
    let first = World::new(1).await;
    first.prepare("a", &first.claimed().await).await;
    // What would be chosen is a pod's.
    let pod = first.secondaries("a")[0];
    let world = World::new(1).await;
    world.fake.with(|cloud| cloud.assign_by_hand(&world.enis["a"], pod));
    world.prepare("a", &world.claimed().await).await;
    let bound = world.bound(0, "a").unwrap();
    assert_ne!(bound, pod);
    assert_eq!(world.secondaries("a"), [pod, bound]);
}

#[tokio::test]
async fn an_address_that_is_taken_elsewhere_in_the_subnet_is_passed_over() {
    let first = World::new(1).await;
    first.prepare("a", &first.claimed().await).await;
    let taken = first.secondaries("a")[0];
    let world = World::new(1).await;
    let (_, other) = world.fake.with(|cloud| cloud.add_instance("t3.medium", "eu-west-1a"));
    world.fake.with(|cloud| cloud.assign_by_hand(&other, taken));
    let address = world.claimed().await;
    for _ in 0..2 {
        world.prepare("a", &address).await;
    }
    assert_ne!(world.bound(0, "a"), Some(taken));
    assert_eq!(world.secondaries("a"), [world.bound(0, "a").unwrap()]);
}

#[tokio::test]
async fn delegated_prefixes_take_room_and_nothing_of_them_is_chosen() {
    let world = World::new(6).await;
    let eni = &world.enis["a"];
    world.fake.with(|cloud| {
        for start in (16..240).step_by(32) {
            cloud.delegate(eni, format!("10.0.0.{start}/28").parse().unwrap());
        }
        cloud.delegate(eni, "2001:db8:0:0:f::/80".parse().unwrap());
    });
    let capacity = world.nic("a").await.capacity;
    assert_eq!((capacity.v4, capacity.v6), (7, 13), "fifteen, without the primary one and the prefixes");
    world.converge().await;
    world.assert_home();
    let in_prefix = |it: &IpAddr| matches!(it, IpAddr::V4(it) if it.octets()[3] < 240 && it.octets()[3] / 16 % 2 == 1);
    let secondaries = world.secondaries("a");
    assert_eq!((secondaries.len(), secondaries.iter().filter(|it| in_prefix(it)).count()), (6, 0), "{secondaries:?}");
}

#[tokio::test]
async fn with_associate_instance_there_is_room_for_one_vip_whatever_else_the_eni_has() {
    let world = World::with(1, Associate::Instance, "t3.nano").await;
    world.fake.with(|cloud| cloud.assign_by_hand(&world.enis["a"], [10, 0, 0, 100].into()));
    assert_eq!(world.nic("a").await.capacity.v4, 1);
}

#[tokio::test]
async fn a_binding_that_has_changed_since_it_was_read_is_not_used() {
    let world = World::new(1).await;
    world.converge().await;
    world.fake.with(|cloud| cloud.disassociate_by_hand(&world.allocations[0]));
    let (address, nic) = (world.address(1).await, world.nic("a").await);
    world.fake.with(|cloud| cloud.remove_tag(&world.allocations[0], &key(&world.enis["a"])));
    let attached = world.provider.attach(&nic, &[binding(&address, &nic)]).await.unwrap_err();
    assert_eq!((attached.kind, &*attached.code), (ErrorKind::Conflict, "BindingChanged"));
    assert!(!world.fake.with(|cloud| cloud.routes()).contains_key(&vip(1)));
}

#[tokio::test]
async fn of_two_vips_with_one_private_address_one_gets_another() {
    for is_attached in [true, false] {
        let world = World::new(2).await;
        world.converge().await;
        let private = world.bound(0, "a").unwrap().to_string();
        world.fake.with(|cloud| {
            cloud.disassociate_by_hand(&world.allocations[1]);
            if !is_attached {
                cloud.disassociate_by_hand(&world.allocations[0]);
            }
            cloud.set_tag(&world.allocations[1], &key(&world.enis["a"]), &private);
        });
        world.converge().await;
        world.assert_home();
        assert_ne!(world.bound(0, "a"), world.bound(1, "a"));
        assert_eq!(plan(&world.desired, &world.observe().await).problems, [].into());
    }
}

#[tokio::test]
async fn an_address_is_released_without_leaving_a_private_address_behind() {
    let world = World::new(1).await;
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/new".to_owned() };
    let tags = world.scope.tags.clone();
    let allocation = vipgate_cloud::Allocation { tags, claim, is_ipv6: false, zone: None, token: "prod-1".to_owned() };
    let address = world.provider.allocate(&allocation).await.unwrap();
    world.prepare("a", &address).await;
    world.fake.plan_fault(2, denied(), |request| action(request) == "UnassignPrivateIpAddresses");
    world.provider.unclaim(&address).await.unwrap();
    let refused = world.provider.release(&address).await.unwrap_err();
    assert_eq!((refused.kind, world.secondaries("a").len()), (ErrorKind::InUse, 1));
    world.provider.release(&address).await.unwrap();
    assert_eq!(world.secondaries("a"), Vec::<IpAddr>::new());
    assert_eq!(world.fake.with(|cloud| cloud.tags(&address.id.0)), [].into());
}
