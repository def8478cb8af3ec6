//! Faults: lost requests and replies, limits of rate, slow and failed operations.

use std::time::{Duration, Instant};

use vipgate_cloud::{Allocation, ErrorKind, NicId, Tags};
use vipgate_cloud_testkit::Fault;
use vipgate_cloud_testkit::gcp::error_reply;

use crate::calls::Calls;
use crate::gcp::bench::{Bench, NIC_1, NIC_2, ip, kind, our_claim};

/// Claim, attach, move, detach, unclaim, allocate, release: each change of the API once at least.
async fn all_changes(bench: &Bench) {
    let provider = &bench.provider;
    provider.claim(&bench.address("vip-1").await, &our_claim()).await.expect("claimed");
    let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
    provider.attach(&nic, &[binding]).await.expect("attached");
    let (binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    provider.move_from_dead(&NicId(NIC_1.to_owned()), &nic, &[binding]).await.expect("moved");
    assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
    let address = bench.address("vip-1").await;
    provider.detach(&NicId(NIC_2.to_owned()), std::slice::from_ref(&address)).await.expect("detached");
    provider.unclaim(&address).await.expect("unclaimed");
    let tags = Tags::from([("pool".to_owned(), "edge".to_owned())]);
    let allocation = Allocation { tags, claim: our_claim(), is_ipv6: false, zone: None, token: "t1".to_owned() };
    let address = provider.allocate(&allocation).await.expect("allocated");
    provider.release(&address).await.expect("released");
}

/// With the same request id, the API carries out a request once that comes twice.
#[tokio::test]
async fn a_lost_reply_or_request_changes_nothing_but_the_number_of_requests() {
    for fault in [Fault::LostReply, Fault::LostRequest] {
        for end in ["/setLabels", "/addAccessConfig", "/deleteAccessConfig", "/wait", "POST/addresses", "DELETE"] {
            let bench = Bench::new().await;
            let before = bench.server.with(|cloud| cloud.state.addresses.clone());
            bench.server.plan_fault(1, fault.clone(), move |request| {
                let line = format!("{}{}", request.method, &request.path[request.path.rfind('/').unwrap_or(0)..]);
                line.ends_with(end) || line.starts_with(end)
            });
            all_changes(&bench).await;
            let (mut after, allocated) =
                bench.server.with(|cloud| (cloud.state.addresses.clone(), cloud.state.allocated));
            assert_eq!(allocated, 1, "{fault:?} at {end}");
            assert_eq!(after["vip-1"].label_version, 3, "{fault:?} at {end}: two changes of labels");
            after.get_mut("vip-1").expect("there").label_version = 1;
            assert_eq!(after, before, "{fault:?} at {end}");
            assert_eq!(bench.route(), None);
        }
    }
}

#[tokio::test]
async fn a_repeated_change_has_the_same_request_id_and_another_change_another_one() {
    let bench = Bench::claimed().await;
    bench.fault(1, Fault::LostReply, "/addAccessConfig");
    bench.attach(NIC_1).await.expect("attached");
    let ids = |bench: &Bench| -> Vec<String> {
        bench.requests().iter().filter_map(|it| it.parameter("requestId").map(str::to_owned)).collect()
    };
    let first = ids(&bench);
    assert_eq!(first.len(), 2);
    assert_eq!(first[0], first[1]);
    bench.detach(NIC_1).await.expect("detached");
    assert_ne!(ids(&bench), first[..1]);
}

#[tokio::test]
async fn a_change_without_any_answer_is_unknown() {
    let bench = Bench::claimed().await;
    bench.fault(3, Fault::LostReply, "/addAccessConfig");
    assert_eq!(kind(bench.attach(NIC_1).await), ErrorKind::Unknown);
    // It was carried out: the next attempt finds that.
    bench.log();
    bench.attach(NIC_1).await.expect("it is there");
    assert_eq!(bench.writes(), [""; 0]);
}

#[tokio::test]
async fn a_limit_of_rate_is_waited_for() {
    for (status, reason) in [(403, "rateLimitExceeded"), (429, "rateLimitExceeded"), (503, "backendError")] {
        let bench = Bench::claimed().await;
        bench.fault(1, Fault::Reply(error_reply(status, reason)), "/addAccessConfig");
        bench.attach(NIC_1).await.expect("attached at the second attempt");
        assert_eq!(bench.writes(), ["POST addAccessConfig", "POST addAccessConfig"]);
        let sample = bench.meter.samples().into_iter().find(|it| it.code == reason).expect("it is counted");
        assert_eq!((sample.operation, sample.count), ("instances.addAccessConfig", 1));
    }
}

#[tokio::test]
async fn retry_after_is_obeyed_or_passed_on() {
    let bench = Bench::claimed().await;
    let slow = error_reply(429, "rateLimitExceeded").with_header("retry-after", "1");
    bench.fault(1, Fault::Reply(slow), "/addAccessConfig");
    let began = Instant::now();
    bench.attach(NIC_1).await.expect("attached");
    assert!(began.elapsed() >= Duration::from_secs(1));
    let endless = error_reply(429, "rateLimitExceeded").with_header("retry-after", "600");
    bench.fault(1, Fault::Reply(endless), "/deleteAccessConfig");
    let error = bench.detach(NIC_1).await.expect_err("an error");
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Throttled, Some(Duration::from_mins(10))));
}

#[tokio::test]
async fn what_another_attempt_would_not_change_is_passed_on() {
    for (status, reason, expected) in [
        (403, "forbidden", ErrorKind::Denied),
        (403, "quotaExceeded", ErrorKind::Quota),
        (404, "notFound", ErrorKind::NotFound),
        // An organization policy, constraints/compute.vmExternalIpAccess.
        (412, "conditionNotMet", ErrorKind::Denied),
        (400, "invalid", ErrorKind::Invalid),
    ] {
        let bench = Bench::claimed().await;
        bench.fault(9, Fault::Reply(error_reply(status, reason)), "/addAccessConfig");
        assert_eq!(kind(bench.attach(NIC_1).await), expected);
        assert_eq!(bench.writes(), ["POST addAccessConfig"]);
    }
}

#[tokio::test]
async fn operations_are_awaited() {
    let bench = Bench::claimed().await;
    bench.server.with(|cloud| cloud.operation_time = Duration::from_millis(250));
    bench.attach(NIC_1).await.expect("attached");
    assert_eq!(bench.route(), Some((NIC_1.to_owned(), ip("10.0.0.11"))));
    assert!(bench.log().iter().filter(|line| *line == "POST wait").count() > 1);
}

#[tokio::test]
async fn an_operation_that_is_not_done_in_time_is_unknown_and_its_resource_busy() {
    let bench = Bench::claimed().await;
    bench.server.with(|cloud| cloud.operation_time = Duration::from_mins(1));
    let error = bench.attach(NIC_1).await.expect_err("an error");
    assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Unknown, "OperationTimeout"));
    assert_eq!(kind(bench.attach(NIC_1).await), ErrorKind::Busy);
    assert_eq!(bench.route(), None);
}

#[tokio::test]
async fn errors_of_operations_are_errors() {
    for (code, expected) in [
        ("QUOTA_EXCEEDED", ErrorKind::Quota),
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", ErrorKind::InUse),
        ("RESOURCE_NOT_FOUND", ErrorKind::NotFound),
        ("INTERNAL_ERROR", ErrorKind::Unknown),
        ("PERMISSIONS_ERROR", ErrorKind::Denied),
    ] {
        let bench = Bench::claimed().await;
        bench.server.with(|cloud| cloud.operation_errors.push_back((code.to_owned(), "m".to_owned())));
        assert_eq!(kind(bench.attach(NIC_1).await), expected, "{code}");
        bench.attach(NIC_1).await.expect("the next attempt is another one");
    }
}

/// The API refuses while the detachment isn't seen everywhere: later, not in use.
#[tokio::test]
async fn a_move_that_the_api_does_not_see_yet_is_busy() {
    let bench = Bench::attached().await;
    let (binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    bench.fault(1, Fault::Reply(error_reply(400, "invalid")), "/addAccessConfig");
    bench.server.with(|cloud| cloud.lag = 1);
    let from = NicId(NIC_1.to_owned());
    // What is read before is one change old as well: that of the attachment, so make one more.
    bench.server.with(|cloud| cloud.add_address("unrelated", "203.0.113.77", &[]));
    assert_eq!(kind(bench.provider.move_from_dead(&from, &nic, std::slice::from_ref(&binding)).await), ErrorKind::Busy);
    bench.server.with(|cloud| cloud.lag = 0);
    bench.provider.move_from_dead(&from, &nic, &[binding]).await.expect("moved");
    assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
}
