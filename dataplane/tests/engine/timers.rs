//! How long sessions live, by what they last heard: each timer to the half second that a round of the sweep takes. Floors
//! and rules: RFC 4787 section 4.3, RFC 5382 section 5, RFC 5508 section 3.2, RFC 7857 section 2.

use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::timeout::Timeouts;

/// More than a round of the sweep.
const ROUND: u32 = 600;

fn gateway() -> Gateway {
    Gateway::new(&Setup::default())
}

#[test]
fn a_query_is_over_when_its_time_without_packets_is() {
    for (pod, far) in POD_AND_FAR {
        for (protocol, timeout) in [(Protocol::Udp, 5_000), (Protocol::Echo, 3_000)] {
            let mut gateway = gateway();
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(far)));
            gateway.pass(timeout - 1_000);
            gateway.far_sends(&answer_to(&seen, protocol));
            // The answer counts as a sign of life.
            gateway.pass(timeout - 1_000);
            gateway.far_sends(&answer_to(&seen, protocol));
            gateway.pass(timeout + ROUND);
            assert_eq!(gateway.sessions(), 0, "{protocol:?}");
            assert_eq!(gateway.arrives(0, OUTSIDE, &answer_to(&seen, protocol)), vec![]);
            assert_eq!(gateway.drops(), [(DropReason::NoService, 1)].into());
            gateway.assert_delta("egress 1, reply 2, drop no_service 1, ended idle 1, created 1");
        }
    }
}

#[test]
fn whoever_asks_again_and_again_keeps_the_port_though_nobody_answers() {
    for (pod, far) in POD_AND_FAR {
        for protocol in [Protocol::Udp, Protocol::Echo] {
            let mut gateway = gateway();
            let question = packet(protocol, at(pod), at(far));
            let first = ends(&gateway.pod_sends(&question)).0;
            for _ in 0..10 {
                gateway.pass(2_500);
                assert_eq!(ends(&gateway.pod_sends(&question)).0, first, "{protocol:?}");
            }
            gateway.assert_delta("egress 11, created 1");
        }
    }
}

#[test]
fn a_connection_that_nobody_answers_ends_after_the_shorter_time() {
    for (pod, far) in POD_AND_FAR {
        let mut gateway = gateway();
        let seen = gateway.pod_sends(&packet(Protocol::Tcp, at(pod), at(far)));
        gateway.pass(4_000 + ROUND);
        assert_eq!(gateway.sessions(), 0);
        assert_eq!(gateway.arrives(0, OUTSIDE, &answer_to(&seen, Protocol::Tcp)), vec![], "too late");
        assert_eq!(gateway.drops(), [(DropReason::NoService, 1)].into());
        gateway.assert_delta("egress 1, drop no_service 1, ended unanswered 1, created 1");
    }
}

#[test]
fn an_open_connection_outlives_the_shorter_time_and_not_the_longer_one() {
    for ends in POD_AND_FAR {
        let mut it = Connection::established(gateway(), ends);
        it.gateway.pass(29_000);
        it.far_says("PA", 5001, 1001);
        it.gateway.pass(30_000 + ROUND);
        assert_eq!(it.gateway.arrives(0, INSIDE, &tcp(it.pod, it.far, "PA", 1001, 5001)), vec![]);
        assert_eq!(it.gateway.drops(), [(DropReason::NoSession, 1)].into());
        it.gateway.assert_delta("egress 2, reply 2, drop no_session 1, ended idle 1, created 1");
    }
}

#[test]
fn by_default_nothing_ends_before_the_rfcs_let_it() {
    let timeouts = Timeouts::default();
    for (pod, far) in POD_AND_FAR {
        let gateway = Gateway::new(&Setup { timeouts, ..Setup::default() });
        let mut it = Connection::established(gateway, (pod, far));
        let gateway = &mut it.gateway;
        let mut other = at(pod);
        other.set_port(4001);
        let udp = gateway.pod_sends(&packet(Protocol::Udp, other, at(far)));
        let echo = gateway.pod_sends(&packet(Protocol::Echo, other, at(far)));
        let half_open = gateway.pod_sends(&packet(Protocol::Tcp, other, at(far)));
        gateway.pass(59_000);
        gateway.far_sends(&answer_to(&echo, Protocol::Echo));
        gateway.pass(180_000);
        gateway.far_sends(&answer_to(&half_open, Protocol::Tcp));
        gateway.pass(60_000);
        gateway.far_sends(&answer_to(&udp, Protocol::Udp));
        gateway.pass(7_430_000 - 299_000);
        it.far_says("PA", 5001, 1001);
        it.gateway.assert_delta("egress 5, reply 5, ended idle 3, created 4");
    }
}

#[test]
fn a_closed_connection_is_still_there_for_what_was_lost() {
    for ends in POD_AND_FAR {
        let mut it = Connection::established(gateway(), ends);
        it.pod_says("FA", 1001, 5001);
        it.far_says("FA", 5001, 1002);
        // The last ACK is lost; the far side says FIN again.
        it.gateway.pass(2_000);
        it.far_says("FA", 5001, 1002);
        it.pod_says("A", 1002, 5002);
        it.gateway.pass(4_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0);
        it.gateway.assert_delta("egress 4, reply 3, ended closed 1, created 1");
    }
}

#[test]
fn a_reset_connection_still_carries_what_was_on_its_way_and_its_port_rests() {
    for (pod, far) in POD_AND_FAR {
        let range = PortRange::new(30_001, 30_001).unwrap();
        let gateway = Gateway::new(&Setup { range, ..Setup::default() });
        let mut it = Connection::established(gateway, (pod, far));
        it.far_says("R", 5001, 0);
        it.gateway.pass(1_000);
        it.pod_says("PA", 1001, 5001);
        let Connection { mut gateway, vip, .. } = it;
        // The other pod can't have the port while it may still be meant for the first one.
        let mut neighbour = at(&pod.replace(".5:", ".6:").replace("::5]", "::6]"));
        neighbour.set_port(4000);
        let question = packet(Protocol::Tcp, neighbour, at(far));
        assert_eq!(gateway.arrives(0, INSIDE, &question), vec![]);
        assert_eq!(gateway.drops(), [(DropReason::PortsExhausted, 1)].into());
        gateway.pass(4_000 + 2 * ROUND);
        assert_eq!(gateway.arrives(0, OUTSIDE, &tcp(at(far), vip, "PA", 5001, 1001)), vec![], "silence, then nothing");
        gateway.pass(2_000 + ROUND);
        assert_eq!(ends(&gateway.pod_sends(&question)).0, vip);
        gateway.assert_delta("egress 4, reply 2, drop no_service 1, drop ports_exhausted 1, ended reset 1, created 2");
    }
}

#[test]
fn a_half_closed_connection_lives_as_long_as_an_open_one() {
    for ends in POD_AND_FAR {
        let mut it = Connection::established(gateway(), ends);
        it.pod_says("FA", 1001, 5001);
        for n in 0..4 {
            it.gateway.pass(8_000);
            it.far_says("PA", 5001 + n, 1002);
            it.pod_says("A", 1002, 5002 + n);
        }
        it.gateway.pass(25_000);
        it.far_says("FA", 5005, 1002);
        it.gateway.pass(4_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0);
        it.gateway.assert_delta("egress 7, reply 6, ended closed 1, created 1");
    }
}
