//! Command line with a gateway of a group: members, ownership, dry runs, drain and undrain.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use vipgate::heartbeat::LeaseClock;
use vipgate::membership::status::Authority;
use vipgate::membership::{DrainBlock, DrainBlockReason};
use vipgate::state::ControlCommand;
use vipgate::state::group::{GroupStatus, RefusedDrains};
use vipgate::state::lease::GroupLease;
use vipgate_dataplane::replication::lease::Lease;

use crate::gateway::group::{group, sharded_policy};
use crate::gateway::{Gateway, Worker};

fn workers() -> [Worker; 2] {
    [Worker::Replies(vec![], 1), Worker::Replies(vec![], 1)]
}

fn one_of_three(group: GroupStatus) -> Gateway {
    Gateway::start_group(&workers(), &sharded_policy(), group, None)
}

/// A required lease that is valid for this many milliseconds.
fn lease(ms: u32) -> Arc<GroupLease> {
    let lease = GroupLease::new(Arc::new(Lease::unlimited()));
    lease.set_required(true);
    if ms > 0 {
        lease.extend(lease.now().plus(ms));
    }
    Arc::new(lease)
}

#[test]
fn peers_table_has_a_line_per_gateway_and_highlights_faults() {
    let gateway = one_of_three(group(&["gw-a", "gw-b"]));
    let shown = gateway.table(&["peers"]);
    let (head, table) = shown.split_once("\n\n").unwrap();
    let expected = "\
members   2 of 3 active, this one included, view 14
authority policy server
lease     not needed
refused   1 connections of unauthenticated peers
TUNNELS   1 of 2 peers have no key: their packets are not authenticated";
    assert_eq!(head, expected);
    // The uptime of a link depends on the clock.
    let squeezed: Vec<String> =
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(squeezed[0], "GATEWAY ACTIVE EPOCH LINK RTT TUNNEL REPLICATION SENT RECEIVED QUEUED ADDRESS NODE ZONE");
    assert_eq!(squeezed[1], "gw-a yes 3 self - - - - - - 10.2.0.97:4790 node-of-gw-a zone-1");
    assert!(squeezed[2].starts_with("gw-b yes 4 up "), "{shown}");
    assert!(
        squeezed[2].ends_with("180us authenticated SENT BEHIND 120 80 4096 10.2.0.98:4790 node-of-gw-b zone-1"),
        "{shown}"
    );
    assert_eq!(
        squeezed[3],
        "gw-c NO 5 NEVER UP - UNAUTHENTICATED BOTH BEHIND 0 0 0 10.2.0.99:4790 node-of-gw-c zone-1"
    );
    assert!(shown.ends_with("\n\ngw-c: 5 link failures, the last one: connection refused\n"), "{shown}");
}

#[test]
fn peers_json_contains_every_field() {
    let listed = one_of_three(group(&["gw-a", "gw-b"])).json(&["peers"]);
    let group = serde_json::json!({
        "decides": "server", "view": 14, "members": 3, "members_serving": 2, "serving": true, "lease": "not_needed",
        "lease_ms": 0, "draining": false, "shares": 3, "sessions": 41, "standby_sessions": 17,
        "unauthenticated_peers": 1, "tunnels_unauthenticated": 1, "tunnels_refused": 0,
        "drain_refused": "", "drains_refused": 0, "drain_waits_for": "",
    });
    assert_eq!(listed["group"], group, "the shard of gw-c is owned here");
    let peers = listed["peers"].as_array().unwrap();
    assert_eq!((&peers[0]["own"], &peers[0]["link"]), (&true.into(), &serde_json::Value::Null));
    let tunnels: Vec<_> = peers.iter().map(|peer| peer["tunnel"].as_str()).collect();
    assert_eq!(tunnels, [Some(""), Some("authenticated"), Some("address")]);
    let link = serde_json::json!({
        "up": false, "was_up": false, "since_ms": 0, "rtt_us": 0, "heartbeats_missed": 0, "refused": 4, "failures": 5,
        "last_failure": "connection refused", "in_sync_from": false, "in_sync_to": false, "records_sent": 0,
        "records_applied": 0, "records_purged": 0, "queued_bytes": 0, "resyncs": 0, "released": 0,
        "released_by": 0, "version": 0,
    });
    assert_eq!(peers[2]["link"], link);
    assert_eq!((&peers[1]["link"]["rtt_us"], &peers[1]["link"]["released"]), (&180.into(), &14.into()));
    assert_eq!(
        (&peers[1]["heartbeat_received"], &peers[1]["in_policy"], &peers[1]["epoch"]),
        (&true.into(), &true.into(), &4.into())
    );
}

#[test]
fn a_standalone_gateway_is_reported() {
    let gateway = Gateway::start(&workers());
    assert_eq!(gateway.table(&["peers"]), "no VipGateway manifests: this gateway is standalone and owns all VIPs\n");
    assert_eq!(gateway.json(&["status"])["group"], serde_json::Value::Null);
    assert_eq!(gateway.json(&["vips"])["vips"][0]["shares"], serde_json::json!([]));
}

#[test]
fn status_shows_membership_and_lease() {
    let line = |group: GroupStatus| {
        let shown = one_of_three(group).table(&["status"]);
        shown.lines().find(|line| line.starts_with("members")).unwrap().to_owned()
    };
    let renewed = GroupStatus { lease: Some(lease(59_900)), ..group(&["gw-a"]) };
    let renewed = line(renewed);
    assert!(
        renewed.starts_with("members   1 of 3 active, this one included, view 14, lease renewed, 59")
            && renewed.ends_with(" ms left"),
        "{renewed}"
    );
    let expired = GroupStatus { lease: Some(lease(0)), draining: true, ..group(&["gw-a", "gw-b"]) };
    let expected = "members   2 of 3 active, this one included, view 14, lease EXPIRED: \
                    no new sessions until it is renewed, DRAINING";
    assert_eq!(line(expired), expected);
}

#[test]
fn vips_and_endpoints_show_their_owner() {
    let gateway = one_of_three(group(&["gw-b", "gw-c"]));
    let vips = "\
VIP           ANNOUNCE  OWNER               ENDPOINTS  SESSIONS  IN TABLE  NAME                  RESERVED PORTS
203.0.113.10  L2        gw-b for gw-a               1         0         0  Service tenant-a/api  80 443
203.0.113.11  BGP       gw-b 672, gw-c 336          0         0         0  Service tenant-a/api  \
30000 30001 30002 30003 30004 30005 30006 30007 and 2 more
";
    assert_eq!(gateway.table(&["vips"]), vips);
    let shares = gateway.json(&["vips"]);
    let share =
        serde_json::json!({"home": "gw-c", "owner": "gw-c", "blocks": 336, "may_open": false, "replica_target": ""});
    assert_eq!(shares["vips"][1]["shares"][2], share);
    let endpoints = "\
ENDPOINT    POD             OWNER          SESSIONS  REFUSED  VIPS            POLICY
10.1.0.11   tenant-a/api-0  gw-b for gw-a         0        0  203.0.113.10    EgressPolicy tenant-a/out
fd00:1::11  -               any                   0        0  none (dropped)  EgressPolicy tenant-a/out
";
    assert_eq!(gateway.table(&["endpoints"]), endpoints);
    let endpoints = gateway.json(&["endpoints"]);
    assert_eq!(
        (&endpoints["endpoints"][0]["home"], &endpoints["endpoints"][0]["owner"]),
        (&"gw-a".into(), &"gw-b".into())
    );
    let no_owner = one_of_three(group(&["gw-c"]));
    assert!(no_owner.table(&["vips"]).contains("NONE for gw-a"), "{}", no_owner.table(&["vips"]));
}

#[test]
fn a_dry_run_lists_moves_and_changes_nothing() {
    let (commands, mut command_receiver) = mpsc::unbounded_channel();
    let gateway = Gateway::start_group(&workers(), &sharded_policy(), group(&["gw-a", "gw-b"]), Some(commands));
    let expected = "\
VIP           HOME  WOULD MOVE TO  ENDPOINTS
203.0.113.10  gw-a  gw-b                   1
203.0.113.11  gw-a  gw-b                   0
203.0.113.11  gw-c  NONE                   0

1 shard with 0 endpoints would move to NONE
2 shards with 1 endpoint would move to gw-b
the policy server would refuse the drain: no gateway could take over 1 shard
nothing was changed
";
    assert_eq!(gateway.table(&["drain", "--dry-run"]), expected);
    let plan = gateway.json(&["drain", "--dry-run"]);
    assert_eq!(plan["totals"]["gw-b"], serde_json::json!({"shares": 2, "endpoints": 1}));
    assert_eq!(plan["moves"][2], serde_json::json!({"vip": "203.0.113.11", "home": "gw-c", "to": "", "endpoints": 0}));
    assert!(command_receiver.try_recv().is_err(), "no command was sent");
}

#[test]
fn drain_fails_without_peers_or_membership() {
    let fails = |gateway: &Gateway, reason: &str| {
        for command in [&["drain"][..], &["drain", "--dry-run"], &["undrain"]] {
            let (code, stdout, stderr) = gateway.vipgate(command);
            assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
            assert!(stderr.contains(reason), "{stderr}");
        }
    };
    fails(&Gateway::start(&workers()), "no other gateway in the policy");
    fails(
        &one_of_three(GroupStatus { authority: None, ..group(&["gw-a", "gw-b"]) }),
        "no policy server manages membership",
    );
    let files = GroupStatus { authority: Some(Authority::Fixed), ..group(&["gw-a", "gw-b"]) };
    fails(&one_of_three(files), "doesn't manage membership");
}

/// A gateway that executes one control command; `after` is its status then.
fn executing(before: GroupStatus, after: GroupStatus) -> (Gateway, thread::JoinHandle<Option<ControlCommand>>) {
    let (commands, mut command_receiver) = mpsc::unbounded_channel();
    let gateway = Gateway::start_group(&workers(), &sharded_policy(), before, Some(commands));
    let state = gateway.state.clone();
    let control = thread::spawn(move || {
        let order = command_receiver.blocking_recv();
        thread::sleep(Duration::from_millis(300));
        let mut set = vipgate_dataplane::policy::build::Builder::new((**state.network.load()).clone());
        set.with_change(&sharded_policy()).unwrap();
        state.compiled.store(set.with_members(&after.spec).policy);
        state.group.store(Arc::new(after));
        order
    });
    (gateway, control)
}

#[test]
fn a_drain_waits_until_no_shard_is_left() {
    let drained = GroupStatus { draining: true, ..group(&["gw-b", "gw-c"]) };
    let (gateway, control) = executing(group(&["gw-a", "gw-b", "gw-c"]), drained);
    let shown = gateway.table(&["drain"]);
    let expected = "\
gw-a owns 2 shards and has 41 sessions: the order is not processed yet
gw-a is drained (view 14): it owns no shards; 41 sessions are still open here
";
    assert_eq!(shown, expected);
    assert_eq!(control.join().unwrap(), Some(ControlCommand::SetDraining(true)));
}

#[test]
fn a_drain_without_an_active_peer_times_out_with_the_reason() {
    let alone = GroupStatus { draining: true, ..group(&["gw-a"]) };
    let (gateway, control) = executing(group(&["gw-a"]), alone);
    let start = Instant::now();
    let (code, stdout, stderr) = gateway.vipgate(&["drain", "--wait", "1", "-o", "json"]);
    assert!(start.elapsed() < Duration::from_secs(9));
    assert_eq!(code, 1);
    assert!(stderr.contains("gw-a is not drained after 1 s: no other gateway is active"), "{stderr}");
    let progress: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&progress["done"], &progress["shares"]), (&false.into(), &3.into()));
    assert_eq!(control.join().unwrap(), Some(ControlCommand::SetDraining(true)));
}

#[test]
fn a_refused_drain_fails_at_once_with_the_reason_and_is_shown() {
    let reason = "no other gateway could take over the VIP 203.0.113.10: gw-b is not active";
    let refused_drains = RefusedDrains { count: 1, last: Some(reason.into()) };
    let (gateway, control) = executing(group(&["gw-a"]), GroupStatus { refused_drains, ..group(&["gw-a"]) });
    let start = Instant::now();
    let (code, stdout, stderr) = gateway.vipgate(&["drain"]);
    assert!(code == 1 && start.elapsed() < Duration::from_secs(9), "{code}");
    assert!(stdout.ends_with("gw-a stays active: its drain is REFUSED\n"), "{stdout}");
    assert!(stderr.contains(&format!("gw-a is not drained and stays active: {reason}")), "{stderr}");
    assert_eq!(control.join().unwrap(), Some(ControlCommand::SetDraining(true)));
    for command in ["status", "peers"] {
        let shown = gateway.table(&[command]);
        assert!(shown.contains(&format!("REFUSED   {reason}\n")), "{shown}");
        assert_eq!(gateway.json(&[command])["group"]["drain_refused"], reason);
    }
}

#[test]
fn a_drain_that_waits_for_other_gateways_says_so() {
    let gateways = vec!["gw-b".into()];
    let drain_block = Some(DrainBlock { reason: DrainBlockReason::MaxUnavailable(1), gateways });
    let waiting = GroupStatus { draining: true, drain_block, ..group(&["gw-a", "gw-c"]) };
    let (gateway, control) = executing(group(&["gw-a", "gw-c"]), waiting);
    let (code, _, stderr) = gateway.vipgate(&["drain", "--wait", "1"]);
    assert_eq!(code, 1);
    let expected = "gw-a is not drained after 1 s: it waits for gw-b to be active again: the policy server permits 1";
    assert!(stderr.contains(expected), "{stderr}");
    assert_eq!(control.join().unwrap(), Some(ControlCommand::SetDraining(true)));
    assert!(gateway.table(&["status"]).contains("drain     it waits for gw-b"));
}

#[test]
fn undrain_makes_the_gateway_active_again() {
    let drained = GroupStatus { draining: true, ..group(&["gw-b", "gw-c"]) };
    let (gateway, control) = executing(drained, group(&["gw-a", "gw-b", "gw-c"]));
    let progress = gateway.json(&["undrain"]);
    assert_eq!((&progress["done"], &progress["serving"], &progress["shares"]), (&true.into(), &true.into(), &2.into()));
    assert_eq!(control.join().unwrap(), Some(ControlCommand::SetDraining(false)));
}
