//! The command line asks a gateway that is one of three: who serves, who has what, what would move; and lets it drain.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod gateway;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gateway::group::{dealt, group};
use gateway::{Gateway, Worker};
use tokio::sync::mpsc;
use vipgate::gateway::group::{GroupLease, GroupStatus};
use vipgate::gateway::state::Order;
use vipgate::members::{Authority, LeaseClock};
use vipgate_dataplane::link::lease::Lease;

fn workers() -> [Worker; 2] {
    [Worker::Answers(vec![], 1), Worker::Answers(vec![], 1)]
}

fn one_of_three(group: GroupStatus) -> Gateway {
    Gateway::start_in(&workers(), &dealt(), group, None)
}

/// One whose lease is needed, and good for so many milliseconds.
fn lease(ms: u32) -> Arc<GroupLease> {
    let lease = GroupLease::new(Arc::new(Lease::free()));
    lease.need(true);
    if ms > 0 {
        lease.extend(lease.now().plus(ms));
    }
    Arc::new(lease)
}

#[test]
fn every_gateway_has_a_line_and_what_is_wrong_stands_out() {
    let gateway = one_of_three(group(&["gw-a", "gw-b"]));
    let shown = gateway.table(&["peers"]);
    let (head, table) = shown.split_once("\n\n").unwrap();
    let expected = "\
serving   2 of 3, this one too, view 14
decides   the policy server
lease     not needed
refused   1 connections of nobody known
TUNNELS   1 of 2 others show no key: their packets have no tags";
    assert_eq!(head, expected);
    // How long a link has stood, the machine's clock says.
    let squeezed: Vec<String> =
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(squeezed[0], "GATEWAY SERVING EPOCH LINK RTT TUNNEL COPIES SENT TAKEN QUEUED REACHED AT NODE ZONE");
    assert_eq!(squeezed[1], "gw-a yes 3 this one - - - - - - 10.2.0.97:4790 node-of-gw-a zone-1");
    assert!(squeezed[2].starts_with("gw-b yes 4 up "), "{shown}");
    assert!(
        squeezed[2].ends_with("180us tags TO BEHIND, from in sync 120 80 4096 10.2.0.98:4790 node-of-gw-b zone-1"),
        "{shown}"
    );
    assert_eq!(squeezed[3], "gw-c NO 5 NEVER UP - NO TAGS BOTH BEHIND 0 0 0 10.2.0.99:4790 node-of-gw-c zone-1");
    assert!(shown.ends_with("\n\ngw-c: last failure of 5: connection refused\n"), "{shown}");
}

#[test]
fn peers_as_json_have_everything() {
    let listed = one_of_three(group(&["gw-a", "gw-b"])).json(&["peers"]);
    let group = serde_json::json!({
        "decides": "server", "view": 14, "members": 3, "members_serving": 2, "serving": true, "lease": "not_needed",
        "lease_ms": 0, "draining": false, "shares": 3, "sessions": 41, "copies": 17, "strangers": 1,
        "tunnels_unauthenticated": 1, "tunnels_refused": 0,
    });
    assert_eq!(listed["group"], group, "the share of gw-c is served here");
    let peers = listed["peers"].as_array().unwrap();
    assert_eq!((&peers[0]["own"], &peers[0]["link"]), (&true.into(), &serde_json::Value::Null));
    let tunnels: Vec<_> = peers.iter().map(|peer| peer["tunnel"].as_str()).collect();
    assert_eq!(tunnels, [Some(""), Some("authenticated"), Some("address")]);
    let link = serde_json::json!({
        "up": false, "was_up": false, "since_ms": 0, "rtt_us": 0, "beats_missed": 0, "refused": 4, "failures": 5,
        "last_failure": "connection refused", "in_sync_from": false, "in_sync_to": false, "copies_sent": 0,
        "copies_taken": 0, "copies_forgotten": 0, "copies_queued_bytes": 0, "resyncs": 0, "released": 0,
        "released_by": 0, "version": 0,
    });
    assert_eq!(peers[2]["link"], link);
    assert_eq!((&peers[1]["link"]["rtt_us"], &peers[1]["link"]["released"]), (&180.into(), &14.into()));
    assert_eq!(
        (&peers[1]["heard"], &peers[1]["in_policy"], &peers[1]["epoch"]),
        (&true.into(), &true.into(), &4.into())
    );
}

#[test]
fn a_gateway_without_others_says_so() {
    let gateway = Gateway::start(&workers());
    assert_eq!(gateway.table(&["peers"]), "no Gateway has a manifest: this one is alone and owns everything\n");
    assert_eq!(gateway.json(&["status"])["group"], serde_json::Value::Null);
    assert_eq!(gateway.json(&["vips"])["vips"][0]["shares"], serde_json::json!([]));
}

#[test]
fn status_says_how_the_gateway_stands() {
    let line = |group: GroupStatus| {
        let shown = one_of_three(group).table(&["status"]);
        shown.lines().find(|line| line.starts_with("serving")).unwrap().to_owned()
    };
    let held = GroupStatus { lease: Some(lease(59_900)), ..group(&["gw-a"]) };
    let held = line(held);
    assert!(
        held.starts_with("serving   1 of 3, this one too, view 14, lease held, 59") && held.ends_with(" ms left"),
        "{held}"
    );
    let lapsed = GroupStatus { lease: Some(lease(0)), draining: true, ..group(&["gw-a", "gw-b"]) };
    let expected =
        "serving   2 of 3, this one too, view 14, lease LAPSED: no new sessions until it is held again, DRAINING";
    assert_eq!(line(lapsed), expected);
}

#[test]
fn vips_and_endpoints_say_whose_they_are() {
    let gateway = one_of_three(group(&["gw-b", "gw-c"]));
    let vips = "\
VIP           ANNOUNCE  OWNER               ENDPOINTS  SESSIONS  IN TABLE  NAME                  RESERVED PORTS
203.0.113.10  L2        gw-b for gw-a               1         0         0  Service tenant-a/api  80 443
203.0.113.11  BGP       gw-b 672, gw-c 336          0         0         0  Service tenant-a/api  30000 30001 30002 30003 30004 30005 30006 30007 and 2 more
";
    assert_eq!(gateway.table(&["vips"]), vips);
    let shares = gateway.json(&["vips"]);
    let share = serde_json::json!({"home": "gw-c", "owner": "gw-c", "blocks": 336, "may_open": false, "copies_to": ""});
    assert_eq!(shares["vips"][1]["shares"][2], share);
    let endpoints = "\
ENDPOINT    POD             GATEWAY        SESSIONS  REFUSED  VIPS            POLICY
10.1.0.11   tenant-a/api-0  gw-b for gw-a         0        0  203.0.113.10    EgressPolicy tenant-a/out
fd00:1::11  -               any                   0        0  none (dropped)  EgressPolicy tenant-a/out
";
    assert_eq!(gateway.table(&["endpoints"]), endpoints);
    let endpoints = gateway.json(&["endpoints"]);
    assert_eq!(
        (&endpoints["endpoints"][0]["home"], &endpoints["endpoints"][0]["owner"]),
        (&"gw-a".into(), &"gw-b".into())
    );
    let nobody = one_of_three(group(&["gw-c"]));
    assert!(nobody.table(&["vips"]).contains("NOBODY for gw-a"), "{}", nobody.table(&["vips"]));
}

#[test]
fn a_dry_run_says_what_would_move_and_changes_nothing() {
    let (orders, mut ordered) = mpsc::unbounded_channel();
    let gateway = Gateway::start_in(&workers(), &dealt(), group(&["gw-a", "gw-b"]), Some(orders));
    let expected = "\
VIP           HOME  WOULD MOVE TO  ENDPOINTS
203.0.113.10  gw-a  gw-b                   1
203.0.113.11  gw-a  gw-b                   0
203.0.113.11  gw-c  NOBODY                 0

1 shares with 0 endpoints would move to NOBODY
2 shares with 1 endpoints would move to gw-b
nothing was changed
";
    assert_eq!(gateway.table(&["drain", "--dry-run"]), expected);
    let plan = gateway.json(&["drain", "--dry-run"]);
    assert_eq!(plan["totals"]["gw-b"], serde_json::json!({"shares": 2, "endpoints": 1}));
    assert_eq!(plan["moves"][2], serde_json::json!({"vip": "203.0.113.11", "home": "gw-c", "to": "", "endpoints": 0}));
    assert!(ordered.try_recv().is_err(), "nothing was ordered");
}

#[test]
fn who_cannot_be_replaced_is_not_drained() {
    let fails = |gateway: &Gateway, reason: &str| {
        for command in [&["drain"][..], &["drain", "--dry-run"], &["undrain"]] {
            let (code, stdout, stderr) = gateway.vipgate(command);
            assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
            assert!(stderr.contains(reason), "{stderr}");
        }
    };
    fails(&Gateway::start(&workers()), "no other gateway in the policy");
    fails(&one_of_three(GroupStatus { authority: None, ..group(&["gw-a", "gw-b"]) }), "no policy server decides");
    let files = GroupStatus { authority: Some(Authority::None), ..group(&["gw-a", "gw-b"]) };
    fails(&one_of_three(files), "doesn't decide who serves");
}

/// The gateway does what it is told: `ends` is how it stands when it has.
fn obedient(begins: GroupStatus, ends: GroupStatus) -> (Gateway, thread::JoinHandle<Option<Order>>) {
    let (orders, mut ordered) = mpsc::unbounded_channel();
    let gateway = Gateway::start_in(&workers(), &dealt(), begins, Some(orders));
    let state = gateway.state.clone();
    let control = thread::spawn(move || {
        let order = ordered.blocking_recv();
        thread::sleep(Duration::from_millis(300));
        let mut set = vipgate_dataplane::snapshot::build::Builder::new((**state.network.load()).clone());
        set.with_policy(&dealt()).unwrap();
        state.compiled.store(set.with_members(&ends.spec).policy);
        state.group.store(Arc::new(ends));
        order
    });
    (gateway, control)
}

#[test]
fn a_drain_waits_until_no_share_is_left() {
    let drained = GroupStatus { draining: true, ..group(&["gw-b", "gw-c"]) };
    let (gateway, control) = obedient(group(&["gw-a", "gw-b", "gw-c"]), drained);
    let shown = gateway.table(&["drain"]);
    let expected = "\
gw-a has 2 shares and 41 sessions: it has not taken the order yet
gw-a serves no more (view 14): no share is left here; 41 sessions are still open here
";
    assert_eq!(shown, expected);
    assert_eq!(control.join().unwrap(), Some(Order::Drain(true)));
}

#[test]
fn a_drain_that_nobody_takes_over_fails_in_time_and_says_why() {
    let alone = GroupStatus { draining: true, ..group(&["gw-a"]) };
    let (gateway, control) = obedient(group(&["gw-a"]), alone);
    let begun = Instant::now();
    let (code, stdout, stderr) = gateway.vipgate(&["drain", "--wait", "1", "-o", "json"]);
    assert!(begun.elapsed() < Duration::from_secs(9));
    assert_eq!(code, 1);
    assert!(stderr.contains("gw-a has not handed over everything within 1 s: no other gateway serves"), "{stderr}");
    let progress: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&progress["done"], &progress["shares"]), (&false.into(), &3.into()));
    assert_eq!(control.join().unwrap(), Some(Order::Drain(true)));
}

#[test]
fn an_undrained_gateway_serves_again() {
    let drained = GroupStatus { draining: true, ..group(&["gw-b", "gw-c"]) };
    let (gateway, control) = obedient(drained, group(&["gw-a", "gw-b", "gw-c"]));
    let progress = gateway.json(&["undrain"]);
    assert_eq!((&progress["done"], &progress["serving"], &progress["shares"]), (&true.into(), &true.into(), &2.into()));
    assert_eq!(control.join().unwrap(), Some(Order::Drain(false)));
}
