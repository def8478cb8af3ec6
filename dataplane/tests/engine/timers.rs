//! Session timeouts, each to the half second that a round of the expiry sweep takes. Minimums and rules: RFC 4787
//! section 4.3, RFC 5382 section 5, RFC 5508 section 3.2, RFC 7857 section 2.

use vipgate_dataplane::flow::address::V6;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_testkit::*;

use crate::fragments::udp_fragments;

/// More than a round of the expiry sweep.
const ROUND: u32 = 600;

fn gateway() -> Gateway {
    Gateway::new(&Setup::default())
}

#[test]
fn udp_and_icmp_sessions_expire_without_packets() {
    for (pod, remote) in POD_AND_REMOTE {
        for (protocol, timeout) in [(Protocol::Udp, 5_000), (Protocol::Echo, 3_000)] {
            let mut gateway = gateway();
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(remote)));
            gateway.advance(timeout - 1_000);
            gateway.remote_sends(&reply_to(&seen, protocol));
            // The reply refreshes the session.
            gateway.advance(timeout - 1_000);
            gateway.remote_sends(&reply_to(&seen, protocol));
            gateway.advance(timeout + ROUND);
            assert_eq!(gateway.sessions(), 0, "{protocol:?}");
            assert_eq!(gateway.receive(0, OUTSIDE, &reply_to(&seen, protocol)), vec![]);
            gateway.assert_delta("egress 1, reply 2, drop no_service 1, ended idle 1, created 1");
        }
    }
}

#[test]
fn outbound_packets_alone_keep_a_udp_or_icmp_session() {
    for (pod, remote) in POD_AND_REMOTE {
        for protocol in [Protocol::Udp, Protocol::Echo] {
            let mut gateway = gateway();
            let request = packet(protocol, at(pod), at(remote));
            let first = ends(&gateway.pod_sends(&request)).0;
            for _ in 0..10 {
                gateway.advance(2_500);
                assert_eq!(ends(&gateway.pod_sends(&request)).0, first, "{protocol:?}");
            }
            gateway.assert_delta("egress 11, created 1");
        }
    }
}

/// Each worker receives more of one session's packets.
fn inject_load(gateway: &mut Gateway, packets: usize) {
    for (worker, port) in gateway.workers.iter_mut().zip(9_000_u16..) {
        let load = packet(Protocol::Udp, (ip("10.244.1.21"), port).into(), at("198.51.100.10:53"));
        for _ in 0..packets {
            assert!(worker.io().inject(INSIDE, &load));
        }
    }
}

/// Advances the clock while every worker receives a full batch in each turn.
fn advance_under_load(gateway: &mut Gateway, ms: u32) {
    for _ in 0..ms / 10 {
        gateway.now = gateway.now.plus(10);
        inject_load(gateway, BATCH_SIZE);
        gateway.turn();
        for worker in &mut gateway.workers {
            while worker.io().pop_sent().is_some() {}
        }
    }
}

/// After a gap between turns, the queue of a worker may never be empty again.
#[test]
fn fragments_sessions_and_quarantined_ports_expire_under_permanent_full_load() {
    for workers in [1, 2] {
        let mut gateway = Gateway::new(&Setup { workers, ..Setup::default() });
        for (pod, remote) in POD_AND_REMOTE {
            gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
            let later_fragment = &udp_fragments(at(pod), at(remote), 1400, 5)[1];
            assert_eq!(gateway.receive(0, INSIDE, later_fragment), vec![]);
        }
        inject_load(&mut gateway, 100);
        gateway.now = gateway.now.plus(200);
        advance_under_load(&mut gateway, 2_100);
        assert_eq!(gateway.drops(), [(DropReason::Fragment, 2)].into(), "their timeout is two seconds");
        assert_eq!(gateway.sessions(), 2 + u64::from(workers));
        advance_under_load(&mut gateway, 2_900 + ROUND);
        assert_eq!(gateway.sessions(), u64::from(workers), "the load's own");
        advance_under_load(&mut gateway, 2_000 + ROUND);
        for worker in &gateway.workers {
            let sessions = &worker.tables().sessions;
            assert_eq!((u32::table(sessions).occupied(), V6::table(sessions).occupied()), (2, 0), "both directions");
        }
        gateway.skip_counter_check();
    }
}

#[test]
fn an_unanswered_connection_has_the_transitory_timeout() {
    for (pod, remote) in POD_AND_REMOTE {
        let mut gateway = gateway();
        let seen = gateway.pod_sends(&packet(Protocol::Tcp, at(pod), at(remote)));
        gateway.advance(4_000 + ROUND);
        assert_eq!(gateway.sessions(), 0);
        assert_eq!(gateway.receive(0, OUTSIDE, &reply_to(&seen, Protocol::Tcp)), vec![], "the session has expired");
        gateway.assert_delta("egress 1, drop no_service 1, ended unanswered 1, created 1");
    }
}

#[test]
fn an_open_connection_has_the_established_timeout() {
    for ends in POD_AND_REMOTE {
        let mut it = Connection::established(gateway(), ends);
        it.gateway.advance(29_000);
        it.remote_sends("PA", 5001, 1001);
        it.gateway.advance(30_000 + ROUND);
        assert_eq!(it.gateway.receive(0, INSIDE, &tcp(it.pod, it.remote, "PA", 1001, 5001)), vec![]);
        it.gateway.assert_delta("egress 2, reply 2, drop no_session 1, ended idle 1, created 1");
    }
}

#[test]
fn default_timeouts_meet_the_rfc_minimums() {
    let timeouts = Timeouts::default();
    for (pod, remote) in POD_AND_REMOTE {
        let gateway = Gateway::new(&Setup { timeouts, ..Setup::default() });
        let mut it = Connection::established(gateway, (pod, remote));
        let gateway = &mut it.gateway;
        let mut other = at(pod);
        other.set_port(4001);
        let udp = gateway.pod_sends(&packet(Protocol::Udp, other, at(remote)));
        let echo = gateway.pod_sends(&packet(Protocol::Echo, other, at(remote)));
        let half_open = gateway.pod_sends(&packet(Protocol::Tcp, other, at(remote)));
        gateway.advance(59_000);
        gateway.remote_sends(&reply_to(&echo, Protocol::Echo));
        gateway.advance(180_000);
        gateway.remote_sends(&reply_to(&half_open, Protocol::Tcp));
        gateway.advance(60_000);
        gateway.remote_sends(&reply_to(&udp, Protocol::Udp));
        gateway.advance(7_430_000 - 299_000);
        it.remote_sends("PA", 5001, 1001);
        it.gateway.assert_delta("egress 5, reply 5, ended idle 3, created 4");
    }
}

#[test]
fn a_closed_connection_is_kept_for_retransmissions() {
    for ends in POD_AND_REMOTE {
        let mut it = Connection::established(gateway(), ends);
        it.pod_sends("FA", 1001, 5001);
        it.remote_sends("FA", 5001, 1002);
        // The last ACK is lost; the remote repeats its FIN.
        it.gateway.advance(2_000);
        it.remote_sends("FA", 5001, 1002);
        it.pod_sends("A", 1002, 5002);
        it.gateway.advance(4_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0);
        it.gateway.assert_delta("egress 4, reply 3, ended closed 1, created 1");
    }
}

#[test]
fn a_reset_connection_forwards_packets_in_flight_and_quarantines_its_port() {
    for (pod, remote) in POD_AND_REMOTE {
        let range = PortRange::new(30_001, 30_001).unwrap();
        let gateway = Gateway::new(&Setup { range, ..Setup::default() });
        let mut it = Connection::established(gateway, (pod, remote));
        it.remote_sends("R", 5001, 0);
        it.gateway.advance(1_000);
        it.pod_sends("PA", 1001, 5001);
        let Connection { mut gateway, vip, .. } = it;
        // The other pod doesn't get the port while packets for the first one may be in flight.
        let mut other_pod = at(&pod.replace(".5:", ".6:").replace("::5]", "::6]"));
        other_pod.set_port(4000);
        let request = packet(Protocol::Tcp, other_pod, at(remote));
        assert_eq!(gateway.receive(0, INSIDE, &request), vec![]);
        assert_eq!(gateway.drops(), [(DropReason::PortsExhausted, 1)].into());
        gateway.advance(4_000 + 2 * ROUND);
        assert_eq!(
            gateway.receive(0, OUTSIDE, &tcp(at(remote), vip, "PA", 5001, 1001)),
            vec![],
            "expired after silence"
        );
        gateway.advance(2_000 + ROUND);
        assert_eq!(ends(&gateway.pod_sends(&request)).0, vip);
        gateway.assert_delta("egress 4, reply 2, drop no_service 1, drop ports_exhausted 1, ended reset 1, created 2");
    }
}

#[test]
fn a_half_closed_connection_has_the_established_timeout() {
    for ends in POD_AND_REMOTE {
        let mut it = Connection::established(gateway(), ends);
        it.pod_sends("FA", 1001, 5001);
        for n in 0..4 {
            it.gateway.advance(8_000);
            it.remote_sends("PA", 5001 + n, 1002);
            it.pod_sends("A", 1002, 5002 + n);
        }
        it.gateway.advance(25_000);
        it.remote_sends("FA", 5005, 1002);
        it.gateway.advance(4_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0);
        it.gateway.assert_delta("egress 7, reply 6, ended closed 1, created 1");
    }
}
