//! Quarantined sessions whose pod reopens the connection from the same port.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::*;

use crate::policy_changes::{add_vip, ended_by_policy, endpoint, publish_change};

/// What ends a session that has lost its VIP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EndedBy {
    Reopening,
    Reply,
    /// A segment of the session that opens none.
    Segment,
}

#[test]
fn a_reopened_connection_uses_the_new_vip_at_once() {
    for (pod, remote, other_vip) in [
        ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.11"),
        ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::11"),
    ] {
        for ended_by in [EndedBy::Reopening, EndedBy::Reply, EndedBy::Segment] {
            let (pod, remote) = (at(pod), at(remote));
            let mut initial = policy();
            add_vip(&mut initial, "2001:db8::11");
            // The range has one port, so each allocation is visible; .6 has the VIP, too.
            let setup = Setup { range: PortRange::new(20_000, 20_000).unwrap(), ..Setup::default() };
            let mut gateway = Gateway::with(&setup, network(), &initial);
            let first = gateway.pod_sends(&tcp(pod, remote, "S", 1000, 0));
            let mut moved = initial.clone();
            endpoint(&mut moved, &pod.ip().to_string()).vips = vec![ip(other_vip)];
            publish_change(&mut gateway, &initial, &moved);
            match ended_by {
                EndedBy::Reopening => {}
                EndedBy::Reply => assert!(gateway.receive(0, OUTSIDE, &reply_to(&first, Protocol::Tcp)).is_empty()),
                EndedBy::Segment => assert!(gateway.receive(0, INSIDE, &tcp(pod, remote, "A", 1001, 5001)).is_empty()),
            }
            let reopened = gateway.pod_sends(&tcp(pod, remote, "S", 9000, 0));
            assert_eq!(ends(&reopened), ((ip(other_vip), 20_000).into(), remote));
            assert_eq!(ends(&gateway.remote_sends(&reply_to(&reopened, Protocol::Tcp))), (remote, pod));
            assert_eq!((gateway.sessions(), ended_by_policy(&gateway)), (1, 1));
            // The former port is in quarantine for the full time, for any pod of the VIP.
            let other_pod = if pod.is_ipv4() { "10.244.1.6:4000" } else { "[fd00:244:1::6]:4000" };
            let other_pod = tcp(at(other_pod), remote, "S", 1, 0);
            assert!(gateway.receive(0, INSIDE, &other_pod).is_empty());
            assert_eq!(gateway.drops().get(&DropReason::PortsExhausted), Some(&1));
            assert!(gateway.receive(0, OUTSIDE, &reply_to(&first, Protocol::Tcp)).is_empty(), "a late reply");
            gateway.advance(3_000);
            assert_eq!(ends(&gateway.pod_sends(&other_pod)).0, ends(&first).0);
            gateway.skip_counter_check();
        }
    }
}

/// A rejected pod loses nothing: once the VIP is assigned to it again, so is the port.
#[test]
fn a_rejected_reopening_keeps_the_quarantined_port() {
    for (pod, other_pod, remote, other_vip) in [
        ("10.244.1.5:4000", "10.244.1.6", "198.51.100.10:53", "192.0.2.11"),
        ("[fd00:244:1::5]:4000", "fd00:244:1::6", "[2001:db8:51::10]:53", "2001:db8::11"),
    ] {
        let (pod, remote) = (at(pod), at(remote));
        let mut initial = policy();
        add_vip(&mut initial, "2001:db8::11");
        let mut moved = initial.clone();
        endpoint(&mut moved, &pod.ip().to_string()).vips = vec![ip(other_vip)];
        let setup = Setup { capacity: 32, reserve: Some(0), ..Setup::default() };
        let mut gateway = Gateway::with(&setup, network(), &initial);
        let first = gateway.pod_sends(&tcp(pod, remote, "S", 1000, 0));
        publish_change(&mut gateway, &initial, &moved);
        assert!(gateway.receive(0, INSIDE, &tcp(pod, remote, "A", 1001, 5001)).is_empty());
        // With the quarantined session, these fill the table.
        for n in 0..31 {
            gateway.pod_sends(&packet(Protocol::Udp, (ip(other_pod), 5000 + n).into(), remote));
        }
        let reopened = tcp(pod, remote, "S", 9000, 0);
        assert!(gateway.receive(0, INSIDE, &reopened).is_empty(), "the table is full");
        publish_change(&mut gateway, &moved, &initial);
        assert_eq!(ends(&gateway.pod_sends(&reopened)), ends(&first));
        gateway.assert_delta("egress 33, drop no_session 1, drop session_table_full 1, ended policy 1, created 33");
    }
}
