//! Requests that fail, get lost, or are answered late.

use std::time::{Duration, Instant};

use vipgate_cloud::{Claim, ErrorKind, Provider};
use vipgate_cloud_testkit::Fault;
use vipgate_cloud_testkit::aws::error_reply;

use crate::aws::world::{World, action, actions};
use crate::calls::Calls;

/// All changes that the life of a VIP makes.
const CHANGES: [&str; 7] = [
    "CreateTags",
    "AssignPrivateIpAddresses",
    "ModifyNetworkInterfaceAttribute",
    "AssociateAddress",
    "DisassociateAddress",
    "UnassignPrivateIpAddresses",
    "DeleteTags",
];

/// Brings a VIP up, hands it over, fails it over, and gives it up, with a fault at each change once.
async fn live_with(fault: Fault) {
    for change in CHANGES {
        let mut world = World::new(2).await;
        for moment in 0..4 {
            world.fake.plan_fault(1, fault.clone(), move |request| action(request) == change);
            match moment {
                0 => {}
                1 => world.place(1, "b", "a"),
                2 => world.fail_over(),
                _ => world.desired.vips.clear(),
            }
            world.converge().await;
            world.assert_home();
        }
        for (eni, allocation) in world.enis.values().zip(&world.allocations) {
            assert_eq!(world.fake.with(|cloud| cloud.private_addresses(eni)).len(), 1, "{change}");
            assert_eq!(world.fake.with(|cloud| cloud.tags(allocation)).len(), 2, "{change}");
        }
    }
}

#[tokio::test]
async fn changes_whose_reply_is_lost_are_found_done() {
    live_with(Fault::LostReply).await;
}

#[tokio::test]
async fn changes_that_get_lost_are_made_again() {
    live_with(Fault::LostRequest).await;
}

#[tokio::test]
async fn changes_that_fail_are_made_again() {
    live_with(Fault::Reply(error_reply(500, "InternalError"))).await;
}

#[tokio::test]
async fn reads_that_are_older_than_changes_lead_to_the_same() {
    let mut world = World::new(2).await;
    world.fake.with(|cloud| cloud.set_lag(3));
    world.converge().await;
    world.assert_home();
    world.fail_over();
    world.converge().await;
    world.assert_home();
    world.fake.with(|cloud| cloud.set_lag(0));
    assert_eq!(world.converge().await, []);
}

#[tokio::test]
async fn a_throttled_request_is_sent_again_after_the_time_that_the_provider_wants() {
    let world = World::new(1).await;
    let throttled = error_reply(503, "RequestLimitExceeded").with_header("retry-after", "1");
    world.fake.plan_fault(1, Fault::Reply(throttled), |request| action(request) == "DescribeAddresses");
    let began = Instant::now();
    world.observe().await;
    assert!(began.elapsed() >= Duration::from_secs(1));
    let reads = actions(&world.fake.take_log()).iter().filter(|action| *action == "DescribeAddresses").count();
    assert_eq!(reads, 2);
}

#[tokio::test]
async fn what_is_denied_is_not_sent_again() {
    let world = World::new(1).await;
    let denied = error_reply(403, "UnauthorizedOperation");
    world.fake.plan_fault(9, Fault::Reply(denied), |request| action(request) == "DescribeAddresses");
    world.fake.take_log();
    let error = world.provider.observe(&world.scope).await.unwrap_err();
    assert_eq!((error.kind, &*error.code), (ErrorKind::Denied, "UnauthorizedOperation"));
    let reads = actions(&world.fake.take_log()).iter().filter(|action| *action == "DescribeAddresses").count();
    assert_eq!(reads, 1);
}

#[tokio::test]
async fn without_the_right_to_switch_the_check_off_it_is_reported() {
    let world = World::new(1).await;
    let denied = error_reply(403, "UnauthorizedOperation");
    let is_modify =
        |request: &vipgate_cloud_testkit::RecordedRequest| action(request) == "ModifyNetworkInterfaceAttribute";
    world.fake.plan_fault(99, Fault::Reply(denied), is_modify);
    world.converge().await;
    world.assert_home();
    let missing = world.nic("a").await.missing;
    assert_eq!(missing.len(), 1);
    assert!(missing[0].contains("source/destination check"), "{missing:?}");
}

#[tokio::test]
async fn a_provider_that_is_not_reachable_says_so() {
    let world = World::new(1).await;
    let keys = vipgate_cloud::aws::CredentialSource::Keys {
        access_key: "x".to_owned(),
        secret_key: "s3cret".to_owned(),
        session_token: None,
    };
    let provider = crate::aws::world::provider("http://127.0.0.1:1", vipgate_cloud::Associate::Nic, keys);
    let error = provider.observe(&world.scope).await.unwrap_err();
    assert_eq!((error.kind, &*error.code), (ErrorKind::Unavailable, "NotReachable"));
    assert!(error.to_string().contains("refused") && !error.to_string().contains("s3cret"), "{error}");
}

/// Tags have no condition: what was read before the first attempt says nothing about the second one.
#[tokio::test]
async fn a_claim_is_sent_once_for_each_read() {
    let world = World::new(1).await;
    let address = world.address(1).await;
    let claim = Claim { cluster: "prod".to_owned(), owner: "default/web".to_owned() };
    world.fake.plan_fault(1, Fault::Reply(error_reply(503, "RequestLimitExceeded")), |it| action(it) == "CreateTags");
    world.fake.take_log();
    assert_eq!(world.provider.claim(&address, &claim).await.unwrap_err().kind, ErrorKind::Throttled);
    assert_eq!(actions(&world.fake.take_log()), ["DescribeAddresses", "CreateTags"]);
    world.provider.claim(&address, &claim).await.unwrap();
    assert_eq!(world.address(1).await.claim, Some(claim));
}
