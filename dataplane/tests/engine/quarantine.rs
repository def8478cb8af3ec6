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
