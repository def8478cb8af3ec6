//! Faults: lost requests and replies, throttling, conflicts, operations that fail or take long.

use std::time::{Duration, Instant};

use vipgate_cloud::{CloudError, ErrorKind};
use vipgate_cloud_testkit::Fault;
use vipgate_cloud_testkit::azure::error_reply;

use crate::azure::bench::{Bench, VIP_1, is, kind, nic_id, our_claim};
use crate::calls::Calls;

#[tokio::test]
async fn a_lost_request_or_reply_leads_to_the_same_end_at_every_change() {
    for fault in [Fault::LostRequest, Fault::LostReply] {
        let bench = Bench::new().await;
        let address = bench.address(VIP_1).await;
        bench.fault(fault.clone(), "PUT", "vip-1");
        bench.provider.claim(&address, &our_claim()).await.expect("claimed");
        bench.claim_all().await;
        let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
        bench.fault(fault.clone(), "PUT", "gw-1-nic");
        bench.provider.prepare(&nic, &addresses, &[]).await.expect("prepared");
        bench.provider.prepare(&bench.nic("gw-2").await, &addresses, &[]).await.expect("prepared");
        assert_eq!(bench.server.with(|cloud| cloud.private("gw-1-nic")).len(), 3);
        bench.fault(fault.clone(), "PUT", "gw-1-nic");
        bench.attach("gw-1").await.expect("attached");
        bench.fault(fault.clone(), "PUT", "gw-1-nic");
        bench.fault(fault.clone(), "PUT", "gw-2-nic");
        bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
        bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
        bench.fault(fault.clone(), "PUT", "gw-2-nic");
        bench.provider.detach(&nic_id("gw-2-nic"), &addresses).await.expect("detached");
        bench.assert_places(None, None);
        let (nic, bindings) = bench.bindings("gw-2").await;
        bench.fault(fault.clone(), "PUT", "gw-2-nic");
        bench.provider.unprepare(&nic, &bindings).await.expect("taken back");
        assert_eq!(bench.server.with(|cloud| cloud.private("gw-2-nic")).len(), 1);
        bench.fault(fault, "PUT", "vip-1");
        bench.provider.unclaim(&bench.address(VIP_1).await).await.expect("given up");
        assert_eq!(bench.address(VIP_1).await.claim, None);
    }
}

#[tokio::test]
async fn of_a_change_that_is_lost_twice_nothing_is_known() {
    let bench = Bench::prepared().await;
    bench.server.plan_fault(2, Fault::LostRequest, is("PUT", "gw-1-nic"));
    assert_eq!(kind(bench.attach("gw-1").await), ErrorKind::Unknown);
    bench.assert_places(None, None);
}

#[tokio::test]
async fn a_move_that_breaks_off_in_the_middle_is_finished_by_the_next_one() {
    let bench = Bench::attached().await;
    let reply = error_reply(403, "AuthorizationFailed");
    bench.refuse(1, &reply, "PUT", "gw-2-nic");
    assert_eq!(kind(bench.move_to("gw-1-nic", "gw-2").await), ErrorKind::Denied);
    bench.assert_places(None, None);
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    assert_eq!(bench.changes(), ["PUT gw-2-nic"]);
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
}

#[tokio::test]
async fn a_throttled_request_waits_as_long_as_azure_asks() {
    let bench = Bench::prepared().await;
    let reply = error_reply(429, "TooManyRequests").with_header("retry-after", "1");
    bench.refuse(1, &reply, "PUT", "gw-1-nic");
    let began = Instant::now();
    bench.attach("gw-1").await.expect("attached");
    assert!(began.elapsed() >= Duration::from_secs(1));
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
    let throttled: u64 =
        bench.meter.samples().iter().filter(|it| it.code == "TooManyRequests").map(|it| it.count).sum();
    assert_eq!(throttled, 1);
    let reply = error_reply(429, "SubscriptionRequestsThrottled").with_header("retry-after", "600");
    bench.refuse(1, &reply, "PUT", "gw-1-nic");
    let addresses = bench.addresses().await;
    let error = bench.provider.detach(&nic_id("gw-1-nic"), &addresses).await.expect_err("an error");
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Throttled, Some(Duration::from_mins(10))));
}

#[tokio::test]
async fn a_change_of_the_nic_in_between_is_kept() {
    let bench = Bench::prepared().await;
    let (nic, bindings) = bench.bindings("gw-1").await;
    bench.log();
    bench.server.plan_fault(1, Fault::Delay(Duration::from_millis(200)), is("PUT", "gw-1-nic"));
    let meddle = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        bench.server.with(|cloud| cloud.set_tag("gw-1-nic", "cost", Some("7")));
    };
    let (attached, ()) = tokio::join!(bench.provider.attach(&nic, &bindings), meddle);
    attached.expect("attached at the second attempt");
    assert_eq!(bench.changes(), ["PUT gw-1-nic", "PUT gw-1-nic"]);
    assert!(bench.server.with(|cloud| cloud.tags("gw-1-nic")).contains(&"cost=7".to_owned()));
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn two_conflicts_are_a_conflict() {
    let bench = Bench::prepared().await;
    bench.refuse(2, &error_reply(412, "PreconditionFailed"), "PUT", "gw-1-nic");
    assert_eq!(kind(bench.attach("gw-1").await), ErrorKind::Conflict);
    assert_eq!(bench.changes().len(), 2);
}

#[tokio::test]
async fn an_address_that_is_taken_between_read_and_change_does_not_keep_the_others_from_it() {
    let bench = Bench::prepared().await;
    let (nic, bindings) = bench.bindings("gw-1").await;
    bench.log();
    bench.server.plan_fault(1, Fault::Delay(Duration::from_millis(200)), is("PUT", "gw-1-nic"));
    let meddle = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        bench.server.with(|cloud| cloud.attach("vip-1", "other-vm-nic", "primary"));
    };
    let (attached, ()) = tokio::join!(bench.provider.attach(&nic, &bindings), meddle);
    assert_eq!(kind(attached), ErrorKind::InUse);
    assert_eq!(bench.changes(), ["PUT gw-1-nic", "PUT gw-1-nic"]);
    bench.assert_places(Some("other-vm-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn a_busy_nic_is_not_changed() {
    let bench = Bench::prepared().await;
    let (nic, bindings) = bench.bindings("gw-1").await;
    bench.server.with(|cloud| cloud.operation_time = Duration::from_secs(1));
    let other = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        bench.provider.attach(&nic, &bindings[1..]).await
    };
    let (first, second) = tokio::join!(bench.provider.attach(&nic, &bindings[..1]), other);
    first.expect("attached");
    assert_eq!(kind(second), ErrorKind::Busy);
    assert_eq!(bench.changes(), ["PUT gw-1-nic"]);
    bench.assert_places(Some("gw-1-nic"), None);
}

#[tokio::test]
async fn a_change_that_azure_calls_busy_is_sent_again() {
    for (status, code) in [(409, "AnotherOperationInProgress"), (429, "RetryableError")] {
        let bench = Bench::prepared().await;
        bench.refuse(2, &error_reply(status, code), "PUT", "gw-1-nic");
        bench.attach("gw-1").await.expect("attached");
        assert_eq!(bench.changes().len(), 3);
    }
}

/// Attaches, with an operation that ends like this.
async fn attach_with(status: &str, code: &str) -> (Bench, Result<(), CloudError>) {
    let bench = Bench::prepared().await;
    let failure = (status.to_owned(), code.to_owned(), "it isn't possible".to_owned());
    bench.server.with(|cloud| cloud.operation_errors.extend([failure.clone(), failure]));
    let result = bench.attach("gw-1").await;
    (bench, result)
}

#[tokio::test]
async fn an_operation_that_fails_is_an_error_of_its_kind() {
    for (status, code, expected) in [
        ("Failed", "PublicIPAddressInUse", ErrorKind::InUse),
        ("Failed", "SubnetIsFull", ErrorKind::Quota),
        ("Failed", "SomethingNew", ErrorKind::Unknown),
        ("Canceled", "CanceledAndSupersededDueToAnotherOperation", ErrorKind::Unknown),
    ] {
        let (bench, result) = attach_with(status, code).await;
        let error = result.expect_err("an error");
        assert_eq!((error.kind, error.code.as_str()), (expected, code));
        bench.assert_places(None, None);
    }
}

#[tokio::test]
async fn an_operation_that_was_replaced_once_is_repeated() {
    let bench = Bench::prepared().await;
    let failure = ("Canceled".to_owned(), "CanceledAndSupersededDueToAnotherOperation".to_owned(), String::new());
    bench.server.with(|cloud| cloud.operation_errors.push_back(failure));
    bench.attach("gw-1").await.expect("attached at the second attempt");
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn a_slow_operation_is_waited_for_and_a_long_pause_is_not_obeyed() {
    let bench = Bench::prepared().await;
    bench.server.with(|cloud| {
        cloud.operation_time = Duration::from_millis(500);
        cloud.retry_after = Some(10);
        cloud.links = Some("https://management.example.com".to_owned());
    });
    let began = Instant::now();
    bench.attach("gw-1").await.expect("attached");
    assert!((Duration::from_millis(500)..Duration::from_secs(2)).contains(&began.elapsed()));
    let polls = bench.log().iter().filter(|line| *line == "GET operation").count();
    assert!((2..=5).contains(&polls), "{polls} polls");
}

#[tokio::test]
async fn of_an_operation_that_takes_too_long_nothing_is_known() {
    let bench = Bench::prepared().await;
    bench.server.with(|cloud| cloud.operation_time = Duration::from_secs(30));
    let error = bench.attach("gw-1").await.expect_err("an error");
    assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Unknown, "OperationTimeout"));
    assert_eq!(bench.changes(), ["PUT gw-1-nic"]);
}

#[tokio::test]
async fn each_refusal_has_its_class() {
    for (status, code, expected) in [
        (403, "AuthorizationFailed", ErrorKind::Denied),
        (403, "LinkedAuthorizationFailed", ErrorKind::Denied),
        (409, "ScopeLocked", ErrorKind::Denied),
        (400, "InvalidRequestFormat", ErrorKind::Invalid),
        (400, "InvalidResourceReference", ErrorKind::NotFound),
        (404, "ResourceGroupNotFound", ErrorKind::NotFound),
    ] {
        let bench = Bench::prepared().await;
        bench.refuse(1, &error_reply(status, code), "PUT", "gw-1-nic");
        let error = bench.attach("gw-1").await.expect_err("an error");
        assert_eq!((error.kind, error.code.as_str()), (expected, code));
        assert_eq!(bench.changes().len(), 1, "{code}");
    }
}

#[tokio::test]
async fn reads_are_repeated_when_their_reply_is_lost() {
    let bench = Bench::prepared().await;
    bench.fault(Fault::LostReply, "GET", "gw-1-nic");
    bench.fault(Fault::LostReply, "GET", "publicIPAddresses");
    assert_eq!(bench.observe().await.addresses.len(), 2);
}
