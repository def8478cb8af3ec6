//! TCP as it really goes: every way to open and to close, what is lost and said again, and who only pretends. RFC 5382
//! REQ-2, RFC 7857 section 2, RFC 5961.

use crate::support::cluster::{FAR, only, three};
use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::session::timeout::Timeouts;

/// The connection's timers, as the setup has them, and a round of the sweep.
const TRANSITORY: u32 = 4_000;
const ROUND: u32 = 600;

fn begun(ends: (&str, &str)) -> Connection {
    Connection::begun(Gateway::new(&Setup::default()), ends)
}

fn established(ends: (&str, &str)) -> Connection {
    Connection::established(Gateway::new(&Setup::default()), ends)
}

/// Whether it is taken for open: then it outlives the shorter timer.
fn outlives_the_transitory_timer(mut it: Connection, counted: &str) -> bool {
    it.gateway.pass(TRANSITORY + ROUND);
    it.gateway.assert_delta(counted);
    it.gateway.sessions() == 1
}

#[test]
fn whoever_closes_first_the_session_ends_a_while_later() {
    for ends in POD_AND_FAR {
        let orders: [fn(&mut Connection); 4] = [
            |it| {
                it.pod_says("FA", 1001, 5001);
                it.far_says("A", 5001, 1002);
                it.far_says("FA", 5001, 1002);
                it.pod_says("A", 1002, 5002);
            },
            |it| {
                it.far_says("FA", 5001, 1001);
                it.pod_says("FA", 1001, 5002);
                it.far_says("A", 5002, 1002);
            },
            // Both at once: each has said FIN before it hears the other's.
            |it| {
                it.pod_says("FA", 1001, 5001);
                it.far_says("FA", 5001, 1001);
                it.pod_says("A", 1002, 5002);
                it.far_says("A", 5002, 1002);
            },
            // In one segment with the last data, said twice.
            |it| {
                it.far_says("FPA", 5001, 1001);
                it.far_says("FPA", 5001, 1001);
                it.pod_says("FPA", 1001, 5002);
                it.pod_says("FPA", 1001, 5002);
            },
        ];
        for (n, close) in orders.iter().enumerate() {
            let mut it = established(ends);
            close(&mut it);
            assert_eq!(it.gateway.sessions(), 1, "order {n}: for what was lost");
            let sent = ["egress 4, reply 3", "egress 3, reply 3"][usize::from(n == 1)];
            assert!(!outlives_the_transitory_timer(it, &format!("{sent}, ended closed 1, created 1")), "order {n}");
        }
    }
}

#[test]
fn what_is_lost_while_opening_is_said_again_and_passes() {
    for ends in POD_AND_FAR {
        // The answer to the SYN was lost behind the gateway, then the last ACK before it.
        let mut it = begun(ends);
        it.far_says("SA", 5000, 1001);
        it.gateway.pass(1_000);
        it.pod_says("S", 1000, 0);
        it.far_says("SA", 5000, 1001);
        it.gateway.pass(3_000);
        it.far_says("SA", 5000, 1001);
        it.pod_says("A", 1001, 5001);
        it.gateway.pass(TRANSITORY + ROUND);
        it.pod_says("PA", 1001, 5001);
        it.far_says("PA", 5001, 1001);
        it.gateway.assert_delta("egress 4, reply 4, created 1");
    }
}

#[test]
fn both_may_open_at_once() {
    for ends in POD_AND_FAR {
        let mut it = begun(ends);
        it.far_says("S", 5000, 0);
        it.pod_says("SA", 1000, 5001);
        it.far_says("SA", 5000, 1001);
        it.pod_says("A", 1001, 5001);
        assert!(outlives_the_transitory_timer(it, "egress 3, reply 2, created 1"));
    }
}

#[test]
fn what_was_acknowledged_long_ago_still_passes() {
    for ends in POD_AND_FAR {
        let mut it = established(ends);
        let mut sequence = 1001_u32;
        for _ in 0..50 {
            it.pod_says("PA", sequence, 5001);
            sequence = sequence.wrapping_add(1400);
            it.far_says("A", 5001, sequence);
        }
        it.pod_says("PA", 1001, 5001);
        it.far_says("A", 5001, sequence);
        assert!(it.gateway.drops().is_empty());
        it.gateway.assert_delta("egress 53, reply 52, created 1");
    }
}

#[test]
fn a_refusal_reaches_the_pod_and_ends_the_session() {
    for ends in POD_AND_FAR {
        let mut it = begun(ends);
        it.far_says("RA", 0, 1001);
        assert!(!outlives_the_transitory_timer(it, "egress 1, reply 1, ended reset 1, created 1"));
    }
}

#[test]
fn a_reset_counts_only_where_nobody_else_can_stand() {
    for ends in POD_AND_FAR {
        // Right at what the pod has acknowledged: the connection is over.
        let mut it = established(ends);
        it.far_says("R", 5001, 0);
        assert!(!outlives_the_transitory_timer(it, "egress 2, reply 2, ended reset 1, created 1"));
        // Anywhere else it is the pod's business (RFC 5961 section 3.2); the session lives on.
        for sequence in [0, 4999, 5000, 5002, 70_000, u32::MAX] {
            let mut it = established(ends);
            it.far_says("R", sequence, 0);
            it.far_says("RA", sequence, 1001);
            it.pod_says("A", 1001, 5001);
            assert!(
                outlives_the_transitory_timer(it, "egress 3, reply 3, created 1, out of window 2"),
                "a reset at {sequence}"
            );
        }
        // In answer to a SYN, one that acknowledges something else is a guess.
        let mut it = begun(ends);
        it.far_says("RA", 0, 999);
        it.far_says("SA", 5000, 1001);
        it.pod_says("A", 1001, 5001);
        assert!(outlives_the_transitory_timer(it, "egress 2, reply 2, created 1, out of window 1"));
    }
}

/// Of what somebody says who doesn't see the connection, nothing makes a reset that isn't exact count.
#[test]
fn blind_segments_do_not_prepare_a_reset() {
    let prepare: [(&str, u32, u32, u32); 6] = [
        // Flags, sequence, acknowledgement, and where the reset stands then.
        ("S", 700_000, 0, 700_001),
        ("A", 700_000, 900_000, 700_000),
        ("PA", 3_000_000_000, 1, 3_000_000_000),
        ("FA", 700_000, 900_000, 700_001),
        ("SA", 700_000, 900_000, 700_001),
        ("", 700_000, 0, 700_000),
    ];
    for ends in POD_AND_FAR {
        for (flags, sequence, ack, reset) in prepare {
            let mut it = established(ends);
            for _ in 0..2 {
                it.far_says(flags, sequence, ack);
            }
            it.far_says("R", reset, 0);
            it.far_says("RA", reset, ack);
            it.pod_says("A", 1001, 5001);
            assert!(
                outlives_the_transitory_timer(it, "egress 3, reply 5, created 1, out of window 4"),
                "{flags} at {sequence}, then a reset at {reset}"
            );
        }
    }
}

#[test]
fn what_is_out_of_the_window_keeps_nothing_alive() {
    for ends in POD_AND_FAR {
        let mut it = established(ends);
        for _ in 0..4 {
            it.gateway.pass(8_000);
            it.gateway.arrives(0, OUTSIDE, &tcp(it.far, it.vip, "A", 3_000_000_000, 7));
        }
        assert_eq!(it.gateway.sessions(), 0, "30 seconds after its last own segment");
        it.gateway.counts_vary();
    }
}

/// An open connection of which nothing is heard for longer than numbers are believed without the other direction: 60 seconds.
fn silent(ends: (&str, &str)) -> Connection {
    let setup = Setup::default();
    let timeouts = Timeouts { tcp_established: 100_000, ..setup.timeouts };
    let mut it = Connection::established(Gateway::new(&Setup { timeouts, ..setup }), ends);
    it.gateway.pass(70_000);
    it
}

#[test]
fn what_is_out_of_the_window_of_a_silent_connection_keeps_nothing_alive() {
    for ends in POD_AND_FAR {
        let mut it = silent(ends);
        // Each goes on where the last one ended, too.
        for _ in 0..4 {
            it.far_says("A", 3_000_000_000, 7);
            it.gateway.pass(7_000);
        }
        it.far_says("FA", 3_000_000_000, 7);
        assert_eq!(it.gateway.sessions(), 1, "two seconds are left");
        it.gateway.pass(2_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0, "100 seconds after its last own segment");
        it.gateway.assert_delta("egress 2, reply 6, ended idle 1, created 1, out of window 5");
    }
}

#[test]
fn a_silent_connection_that_somebody_forges_goes_on_where_it_was() {
    for ends in POD_AND_FAR {
        for far_first in [false, true] {
            let mut it = silent(ends);
            it.far_says("A", 3_000_000_000, 7);
            it.far_says("FA", 3_000_000_000, 7);
            if far_first {
                it.far_says("PA", 5001, 1001);
            }
            it.pod_says("PA", 1001, 5001);
            it.far_says("A", 5001, 1001);
            it.gateway.pass(90_000);
            assert_eq!(it.gateway.sessions(), 1, "open: 100 seconds here");
            it.far_says("R", 5001, 0);
            let passed = ["egress 3, reply 5", "egress 3, reply 6"][usize::from(far_first)];
            let counted = format!("{passed}, ended reset 1, created 1, out of window 2");
            assert!(!outlives_the_transitory_timer(it, &counted));
        }
    }
}

#[test]
fn a_connection_that_went_another_way_for_long_is_known_again_by_what_both_sides_say() {
    for ends in POD_AND_FAR {
        // Each has sent gigabytes meanwhile: one number is more than half of all further, the other one less.
        let (own, other) = (3_000_000_000, 2_000_000_000);
        let orders: [fn(&mut Connection, u32, u32); 2] = [
            |it, own, other| {
                it.pod_says("PA", own, other);
                it.far_says("A", other, own);
            },
            |it, own, other| {
                it.far_says("PA", other, own);
                it.pod_says("A", own, other);
            },
        ];
        for say in orders {
            let mut it = silent(ends);
            say(&mut it, own, other);
            say(&mut it, own, other);
            it.gateway.pass(90_000);
            assert_eq!(it.gateway.sessions(), 1, "open: 100 seconds here");
            it.far_says("R", other, 0);
            let counted = "egress 4, reply 4, ended reset 1, created 1, out of window 1";
            assert!(!outlives_the_transitory_timer(it, counted));
        }
    }
}

#[test]
fn what_is_out_of_the_window_keeps_nothing_alive_after_a_failover() {
    let mut cluster = three();
    let (pod, far) = (at("10.244.1.5:4000"), at(FAR));
    let seen = only(cluster.arrives(0, INSIDE, &tcp(pod, far, "S", 1000, 0)), 0, OUTSIDE, &cluster);
    let vip = ends(&seen).0;
    only(cluster.arrives(0, OUTSIDE, &tcp(far, vip, "SA", 5000, 1001)), 0, INSIDE, &cluster);
    only(cluster.arrives(0, INSIDE, &tcp(pod, far, "A", 1001, 5001)), 0, OUTSIDE, &cluster);
    cluster.pass(200);
    cluster.kill(0);
    cluster.deaf = true;
    for _ in 0..4 {
        only(cluster.arrives(1, OUTSIDE, &tcp(far, vip, "A", 3_000_000_000, 7)), 1, INSIDE, &cluster);
        cluster.pass(7_000);
    }
    assert_eq!(cluster.gateways[1].sessions(), 1, "taken over by the first one, 28 seconds ago");
    cluster.pass(3_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "30 seconds here");
    cluster.assert_delta(&[
        "egress 2, reply 1, ended idle 1, created 1",
        "reply 4, ended idle 1, taken over 1, out of window 4",
        "",
    ]);
}

#[test]
fn a_handshake_in_one_batch_is_one() {
    for ends in POD_AND_FAR {
        // What the pod says behind the answer overtakes nothing.
        let mut it = begun(ends);
        let all = [
            (OUTSIDE, tcp(it.far, it.vip, "SA", 5000, 1001)),
            (INSIDE, tcp(it.pod, it.far, "A", 1001, 5001)),
            (INSIDE, tcp(it.pod, it.far, "PA", 1001, 5001)),
            (OUTSIDE, tcp(it.far, it.vip, "A", 5001, 1001)),
        ];
        for (interface, packet) in all {
            assert!(it.gateway.workers[0].io().inject(interface, &packet));
        }
        assert_eq!(it.gateway.run().len(), 4);
        assert!(outlives_the_transitory_timer(it, "egress 3, reply 2, created 1"));
    }
}

#[test]
fn an_ended_connection_opens_anew_from_inside_only() {
    for ends in POD_AND_FAR {
        let mut it = established(ends);
        it.pod_says("FA", 1001, 5001);
        it.far_says("FA", 5001, 1002);
        // A SYN from outside is translated like anything of the session, and opens nothing.
        it.far_says("S", 9000, 0);
        it.pod_says("S", 90_000, 0);
        it.far_says("SA", 70_000, 90_001);
        it.pod_says("A", 90_001, 70_001);
        assert!(
            outlives_the_transitory_timer(it, "egress 5, reply 4, created 1, out of window 1"),
            "the same ends and the same port, a new connection"
        );
    }
}

#[test]
fn a_syn_may_bring_data_and_a_sequence_may_wrap() {
    for (pod, far) in POD_AND_FAR {
        let mut gateway = Gateway::new(&Setup::default());
        let mut syn = tcp(at(pod), at(far), "S", u32::MAX - 1, 0);
        syn.extend(*b"fast open!");
        let vip = ends(&gateway.pod_sends(&sealed_tcp(syn))).0;
        let mut it = Connection { gateway, pod: at(pod), far: at(far), vip };
        // SYN and ten bytes: the sequence number wraps.
        it.far_says("SA", u32::MAX, 9);
        it.pod_says("A", 9, 0);
        it.far_says("R", 0, 0);
        assert!(
            !outlives_the_transitory_timer(it, "egress 2, reply 2, ended reset 1, created 1"),
            "the reset stands where it must, behind the wrap"
        );
    }
}

#[test]
fn what_no_stack_sends_opens_nothing() {
    for (pod, far) in POD_AND_FAR {
        for flags in ["", "F", "R", "P", "A", "FP", "SF", "SR", "SA", "FPR", "SFRPA"] {
            let mut gateway = Gateway::new(&Setup::default());
            assert_eq!(gateway.arrives(0, INSIDE, &tcp(at(pod), at(far), flags, 1000, 1)), vec![], "{flags}");
            assert_eq!(gateway.drops(), [(DropReason::NoSession, 1)].into(), "{flags}");
            assert_eq!(gateway.sessions(), 0, "{flags}");
            gateway.assert_delta("drop no_session 1");
        }
    }
}

#[test]
fn options_are_carried_as_they_are() {
    // MSS, SACK permitted, timestamps, window scale; then an unknown one, and AccECN's (RFC 9768).
    let options: [&[u8]; 3] = [
        &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7],
        &[253, 8, 0xde, 0xad, 0xbe, 0xef, 1, 2],
        &[172, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1],
    ];
    for (pod, far) in POD_AND_FAR {
        for options in options {
            let mut gateway = Gateway::new(&Setup::default());
            let mut syn = tcp(at(pod), at(far), "S", 1000, 0);
            let l4 = if at(pod).is_ipv4() { 34 } else { 54 };
            syn.truncate(l4 + 20);
            syn.extend(options);
            syn[l4 + 12] = (5 + options.len() as u8 / 4) << 4;
            // CWR and ECE, as AccECN asks, and codepoints of the IP header.
            syn[l4 + 13] |= 0xc0;
            if l4 == 34 {
                syn[15] = 0xb9;
            } else {
                syn[14..18].copy_from_slice(&[0x6b, 0x91, 0x23, 0x45]);
            }
            // That nothing but addresses, ports, hops and checksums differs is looked at here.
            gateway.pod_sends(&sealed_tcp(syn));
            gateway.assert_delta("egress 1, created 1");
        }
    }
}
