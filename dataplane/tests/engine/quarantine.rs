//! What becomes of a session in quarantine whose pod begins again from the same port.

use crate::policy_changes::{add_vip, change, ended_by_policy, endpoint};
use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::PortRange;

/// Who ends a session that has lost its VIP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Itself,
    Answer,
    /// A packet of it that opens no session.
    Before,
}

#[test]
fn whoever_gets_another_vip_begins_anew_with_it_at_once() {
    for (pod, far, moved) in [
        ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.11"),
        ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::11"),
    ] {
        for by in [Ends::Itself, Ends::Answer, Ends::Before] {
            let (pod, far) = (at(pod), at(far));
            let mut both = policy();
            add_vip(&mut both, "2001:db8::11");
            // One port, so that what takes it is seen; .6 has the VIP, too.
            let setup = Setup { range: PortRange::new(20_000, 20_000).unwrap(), ..Setup::default() };
            let mut gateway = Gateway::with(&setup, network(), &both);
            let first = gateway.pod_sends(&tcp(pod, far, "S", 1000, 0));
            let mut other = both.clone();
            endpoint(&mut other, &pod.ip().to_string()).vips = vec![ip(moved)];
            change(&mut gateway, &both, &other);
            match by {
                Ends::Itself => {}
                Ends::Answer => assert!(gateway.arrives(0, OUTSIDE, &answer_to(&first, Protocol::Tcp)).is_empty()),
                Ends::Before => assert!(gateway.arrives(0, INSIDE, &tcp(pod, far, "A", 1001, 5001)).is_empty()),
            }
            let anew = gateway.pod_sends(&tcp(pod, far, "S", 9000, 0));
            assert_eq!(ends(&anew), ((ip(moved), 20_000).into(), far));
            assert_eq!(ends(&gateway.far_sends(&answer_to(&anew, Protocol::Tcp))), (far, pod));
            assert_eq!((gateway.sessions(), ended_by_policy(&gateway)), (1, 1));
            // The port that it had is in quarantine for as long as any, whoever has the VIP.
            let mate = if pod.is_ipv4() { "10.244.1.6:4000" } else { "[fd00:244:1::6]:4000" };
            let mate = tcp(at(mate), far, "S", 1, 0);
            assert!(gateway.arrives(0, INSIDE, &mate).is_empty());
            assert_eq!(gateway.drops().get(&DropReason::PortsExhausted), Some(&1));
            assert!(gateway.arrives(0, OUTSIDE, &answer_to(&first, Protocol::Tcp)).is_empty(), "an old answer");
            gateway.pass(3_000);
            assert_eq!(ends(&gateway.pod_sends(&mate)).0, ends(&first).0);
            gateway.counts_vary();
        }
    }
}

/// Whoever is refused loses nothing: when the VIP is the pod's again, so is the port.
#[test]
fn whoever_finds_no_room_with_another_vip_keeps_the_port_that_it_had() {
    for (pod, mate, far, moved) in [
        ("10.244.1.5:4000", "10.244.1.6", "198.51.100.10:53", "192.0.2.11"),
        ("[fd00:244:1::5]:4000", "fd00:244:1::6", "[2001:db8:51::10]:53", "2001:db8::11"),
    ] {
        let (pod, far) = (at(pod), at(far));
        let mut both = policy();
        add_vip(&mut both, "2001:db8::11");
        let mut other = both.clone();
        endpoint(&mut other, &pod.ip().to_string()).vips = vec![ip(moved)];
        let setup = Setup { capacity: 32, reserve: Some(0), ..Setup::default() };
        let mut gateway = Gateway::with(&setup, network(), &both);
        let first = gateway.pod_sends(&tcp(pod, far, "S", 1000, 0));
        change(&mut gateway, &both, &other);
        assert!(gateway.arrives(0, INSIDE, &tcp(pod, far, "A", 1001, 5001)).is_empty());
        // With the one in quarantine, these fill the table.
        for n in 0..31 {
            gateway.pod_sends(&packet(Protocol::Udp, (ip(mate), 5000 + n).into(), far));
        }
        let anew = tcp(pod, far, "S", 9000, 0);
        assert!(gateway.arrives(0, INSIDE, &anew).is_empty(), "no room");
        change(&mut gateway, &other, &both);
        assert_eq!(ends(&gateway.pod_sends(&anew)), ends(&first));
        gateway.assert_delta("egress 33, drop no_session 1, drop session_table_full 1, ended policy 1, created 33");
    }
}
