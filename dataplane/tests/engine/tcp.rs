//! TCP tracking: all ways to open and to close, retransmissions, and spoofed segments. RFC 5382 REQ-2, RFC 7857 section
//! 2, RFC 5961.

use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_testkit::cluster::{REMOTE, three_gateways};
use vipgate_testkit::*;

/// The transitory timeout of the setup, and a round of the expiry sweep.
const TRANSITORY: u32 = 4_000;
const ROUND: u32 = 600;

fn syn_sent(ends: (&str, &str)) -> Connection {
    Connection::syn_sent(Gateway::new(&Setup::default()), ends)
}

fn established(ends: (&str, &str)) -> Connection {
    Connection::established(Gateway::new(&Setup::default()), ends)
}

/// Whether the connection counts as open, and so outlives the transitory timeout.
fn outlives_the_transitory_timer(mut it: Connection, expected: &str) -> bool {
    it.gateway.advance(TRANSITORY + ROUND);
    it.gateway.assert_delta(expected);
    it.gateway.sessions() == 1
}

#[test]
fn a_closed_connection_ends_after_the_transitory_timeout() {
    for ends in POD_AND_REMOTE {
        let orders: [fn(&mut Connection); 4] = [
            |it| {
                it.pod_sends("FA", 1001, 5001);
                it.remote_sends("A", 5001, 1002);
                it.remote_sends("FA", 5001, 1002);
                it.pod_sends("A", 1002, 5002);
            },
            |it| {
                it.remote_sends("FA", 5001, 1001);
                it.pod_sends("FA", 1001, 5002);
                it.remote_sends("A", 5002, 1002);
            },
            // Simultaneous close: each sends its FIN before it receives the other's.
            |it| {
                it.pod_sends("FA", 1001, 5001);
                it.remote_sends("FA", 5001, 1001);
                it.pod_sends("A", 1002, 5002);
                it.remote_sends("A", 5002, 1002);
            },
            // In one segment with the last data, sent twice.
            |it| {
                it.remote_sends("FPA", 5001, 1001);
                it.remote_sends("FPA", 5001, 1001);
                it.pod_sends("FPA", 1001, 5002);
                it.pod_sends("FPA", 1001, 5002);
            },
        ];
        for (n, close) in orders.iter().enumerate() {
            let mut it = established(ends);
            close(&mut it);
            assert_eq!(it.gateway.sessions(), 1, "order {n}: kept for retransmissions");
            let sent = ["egress 4, reply 3", "egress 3, reply 3"][usize::from(n == 1)];
            assert!(!outlives_the_transitory_timer(it, &format!("{sent}, ended closed 1, created 1")), "order {n}");
        }
    }
}

#[test]
fn handshake_retransmissions_are_forwarded() {
    for ends in POD_AND_REMOTE {
        // The SYN-ACK is lost after the gateway, then the last ACK before it.
        let mut it = syn_sent(ends);
        it.remote_sends("SA", 5000, 1001);
        it.gateway.advance(1_000);
        it.pod_sends("S", 1000, 0);
        it.remote_sends("SA", 5000, 1001);
        it.gateway.advance(3_000);
        it.remote_sends("SA", 5000, 1001);
        it.pod_sends("A", 1001, 5001);
        it.gateway.advance(TRANSITORY + ROUND);
        it.pod_sends("PA", 1001, 5001);
        it.remote_sends("PA", 5001, 1001);
        it.gateway.assert_delta("egress 4, reply 4, created 1");
    }
}

#[test]
fn a_simultaneous_open_establishes_the_connection() {
    for ends in POD_AND_REMOTE {
        let mut it = syn_sent(ends);
        it.remote_sends("S", 5000, 0);
        it.pod_sends("SA", 1000, 5001);
        it.remote_sends("SA", 5000, 1001);
        it.pod_sends("A", 1001, 5001);
        assert!(outlives_the_transitory_timer(it, "egress 3, reply 2, created 1"));
    }
}

#[test]
fn old_retransmissions_are_forwarded() {
    for ends in POD_AND_REMOTE {
        let mut it = established(ends);
        let mut sequence = 1001_u32;
        for _ in 0..50 {
            it.pod_sends("PA", sequence, 5001);
            sequence = sequence.wrapping_add(1400);
            it.remote_sends("A", 5001, sequence);
        }
        it.pod_sends("PA", 1001, 5001);
        it.remote_sends("A", 5001, sequence);
        it.gateway.assert_delta("egress 53, reply 52, created 1");
    }
}

#[test]
fn a_refused_connection_ends_the_session() {
    for ends in POD_AND_REMOTE {
        let mut it = syn_sent(ends);
        it.remote_sends("RA", 0, 1001);
        assert!(!outlives_the_transitory_timer(it, "egress 1, reply 1, ended reset 1, created 1"));
    }
}

#[test]
fn a_reset_requires_the_exact_sequence_number() {
    for ends in POD_AND_REMOTE {
        // At the exact sequence number: the connection ends.
        let mut it = established(ends);
        it.remote_sends("R", 5001, 0);
        assert!(!outlives_the_transitory_timer(it, "egress 2, reply 2, ended reset 1, created 1"));
        // Anywhere else it is left to the pod (RFC 5961 section 3.2); the session stays open.
        for sequence in [0, 4999, 5000, 5002, 70_000, u32::MAX] {
            let mut it = established(ends);
            it.remote_sends("R", sequence, 0);
            it.remote_sends("RA", sequence, 1001);
            it.pod_sends("A", 1001, 5001);
            assert!(
                outlives_the_transitory_timer(it, "egress 3, reply 3, created 1, out of window 2"),
                "a reset at {sequence}"
            );
        }
        // In reply to a SYN, an RST with another acknowledgment number is a guess.
        let mut it = syn_sent(ends);
        it.remote_sends("RA", 0, 999);
        it.remote_sends("SA", 5000, 1001);
        it.pod_sends("A", 1001, 5001);
        assert!(outlives_the_transitory_timer(it, "egress 2, reply 2, created 1, out of window 1"));
    }
}

/// No off-path segment moves the exact sequence number of a reset.
#[test]
fn blind_segments_do_not_move_the_exact_sequence_number() {
    let prepare: [(&str, u32, u32, u32); 6] = [
        // Flags, sequence and acknowledgment numbers, and the sequence number of a reset that continues there.
        ("S", 700_000, 0, 700_001),
        ("A", 700_000, 900_000, 700_000),
        ("PA", 3_000_000_000, 1, 3_000_000_000),
        ("FA", 700_000, 900_000, 700_001),
        ("SA", 700_000, 900_000, 700_001),
        ("", 700_000, 0, 700_000),
    ];
    for ends in POD_AND_REMOTE {
        for (flags, sequence, ack, reset) in prepare {
            let mut it = established(ends);
            for _ in 0..2 {
                it.remote_sends(flags, sequence, ack);
            }
            it.remote_sends("R", reset, 0);
            it.remote_sends("RA", reset, ack);
            it.pod_sends("A", 1001, 5001);
            assert!(
                outlives_the_transitory_timer(it, "egress 3, reply 5, created 1, out of window 4"),
                "{flags} at {sequence}, then a reset at {reset}"
            );
        }
    }
}

#[test]
fn out_of_window_segments_do_not_refresh_a_session() {
    for ends in POD_AND_REMOTE {
        let mut it = established(ends);
        for _ in 0..4 {
            it.gateway.advance(8_000);
            it.gateway.receive(0, OUTSIDE, &tcp(it.remote, it.vip, "A", 3_000_000_000, 7));
        }
        assert_eq!(it.gateway.sessions(), 0, "30 seconds after the last valid segment");
        it.gateway.skip_counter_check();
    }
}

/// An open connection that was idle for longer than sequence numbers are trusted without the other direction: 60
/// seconds.
fn idle(ends: (&str, &str)) -> Connection {
    let setup = Setup::default();
    let timeouts = Timeouts { tcp_established: 100_000, ..setup.timeouts };
    let mut it = Connection::established(Gateway::new(&Setup { timeouts, ..setup }), ends);
    it.gateway.advance(70_000);
    it
}

#[test]
fn out_of_window_segments_do_not_refresh_an_idle_session() {
    for ends in POD_AND_REMOTE {
        let mut it = idle(ends);
        // Each continues from the last one, too.
        for _ in 0..4 {
            it.remote_sends("A", 3_000_000_000, 7);
            it.gateway.advance(7_000);
        }
        it.remote_sends("FA", 3_000_000_000, 7);
        assert_eq!(it.gateway.sessions(), 1, "two seconds are left");
        it.gateway.advance(2_000 + ROUND);
        assert_eq!(it.gateway.sessions(), 0, "100 seconds after the last valid segment");
        it.gateway.assert_delta("egress 2, reply 6, ended idle 1, created 1, out of window 5");
    }
}

#[test]
fn an_idle_connection_survives_forged_segments() {
    for ends in POD_AND_REMOTE {
        for remote_first in [false, true] {
            let mut it = idle(ends);
            it.remote_sends("A", 3_000_000_000, 7);
            it.remote_sends("FA", 3_000_000_000, 7);
            if remote_first {
                it.remote_sends("PA", 5001, 1001);
            }
            it.pod_sends("PA", 1001, 5001);
            it.remote_sends("A", 5001, 1001);
            it.gateway.advance(90_000);
            assert_eq!(it.gateway.sessions(), 1, "open: 100 seconds here");
            it.remote_sends("R", 5001, 0);
            let forwarded = ["egress 3, reply 5", "egress 3, reply 6"][usize::from(remote_first)];
            let expected = format!("{forwarded}, ended reset 1, created 1, out of window 2");
            assert!(!outlives_the_transitory_timer(it, &expected));
        }
    }
}

#[test]
fn an_idle_connection_is_resynchronized_by_both_directions() {
    for ends in POD_AND_REMOTE {
        // Each side has sent gigabytes meanwhile: one number has advanced by more than half of the space, the other by
        // less.
        let (own, other) = (3_000_000_000, 2_000_000_000);
        let orders: [fn(&mut Connection, u32, u32); 2] = [
            |it, own, other| {
                it.pod_sends("PA", own, other);
                it.remote_sends("A", other, own);
            },
            |it, own, other| {
                it.remote_sends("PA", other, own);
                it.pod_sends("A", own, other);
            },
        ];
        for exchange in orders {
            let mut it = idle(ends);
            exchange(&mut it, own, other);
            exchange(&mut it, own, other);
            it.gateway.advance(90_000);
            assert_eq!(it.gateway.sessions(), 1, "open: 100 seconds here");
            it.remote_sends("R", other, 0);
            let expected = "egress 4, reply 4, ended reset 1, created 1, out of window 1";
            assert!(!outlives_the_transitory_timer(it, expected));
        }
    }
}

#[test]
fn out_of_window_segments_do_not_refresh_a_session_after_failover() {
    let mut cluster = three_gateways();
    let (pod, remote) = (at("10.244.1.5:4000"), at(REMOTE));
    let vip = cluster.connect(0, pod, remote);
    cluster.advance(200);
    cluster.kill(0);
    cluster.drops_replication = true;
    for _ in 0..4 {
        cluster.remote_sends(1, 1, &tcp(remote, vip, "A", 3_000_000_000, 7));
        cluster.advance(7_000);
    }
    assert_eq!(cluster.gateways[1].sessions(), 1, "failed over by the first segment, 28 seconds ago");
    cluster.advance(3_000);
    assert_eq!(cluster.gateways[1].sessions(), 0, "30 seconds here");
    cluster.assert_delta(&[
        "egress 2, reply 1, ended idle 1, created 1",
        "reply 4, ended idle 1, failed over 1, out of window 4",
        "",
    ]);
}

#[test]
fn a_handshake_in_one_batch_establishes_the_connection() {
    for ends in POD_AND_REMOTE {
        // The pod's segments after the SYN-ACK don't overtake it.
        let mut it = syn_sent(ends);
        let all = [
            (OUTSIDE, tcp(it.remote, it.vip, "SA", 5000, 1001)),
            (INSIDE, tcp(it.pod, it.remote, "A", 1001, 5001)),
            (INSIDE, tcp(it.pod, it.remote, "PA", 1001, 5001)),
            (OUTSIDE, tcp(it.remote, it.vip, "A", 5001, 1001)),
        ];
        for (interface, packet) in all {
            assert!(it.gateway.workers[0].io().inject(interface, &packet));
        }
        assert_eq!(it.gateway.run().len(), 4);
        assert!(outlives_the_transitory_timer(it, "egress 3, reply 2, created 1"));
    }
}

#[test]
fn a_closed_connection_is_reopened_only_from_inside() {
    for ends in POD_AND_REMOTE {
        let mut it = established(ends);
        it.pod_sends("FA", 1001, 5001);
        it.remote_sends("FA", 5001, 1002);
        // A SYN from outside is forwarded in the session, and opens none.
        it.remote_sends("S", 9000, 0);
        it.pod_sends("S", 90_000, 0);
        it.remote_sends("SA", 70_000, 90_001);
        it.pod_sends("A", 90_001, 70_001);
        assert!(
            outlives_the_transitory_timer(it, "egress 5, reply 4, created 1, out of window 1"),
            "a new connection with the same ends and port"
        );
    }
}

#[test]
fn syn_data_and_sequence_wraparound_are_tracked() {
    for (pod, remote) in POD_AND_REMOTE {
        let mut gateway = Gateway::new(&Setup::default());
        let mut syn = tcp(at(pod), at(remote), "S", u32::MAX - 1, 0);
        syn.extend(*b"fast open!");
        let vip = ends(&gateway.pod_sends(&with_tcp_checksums(syn))).0;
        let mut it = Connection { gateway, pod: at(pod), remote: at(remote), vip };
        // SYN and ten bytes of data: the sequence number wraps.
        it.remote_sends("SA", u32::MAX, 9);
        it.pod_sends("A", 9, 0);
        it.remote_sends("R", 0, 0);
        assert!(
            !outlives_the_transitory_timer(it, "egress 2, reply 2, ended reset 1, created 1"),
            "the reset has the exact sequence number after the wrap"
        );
    }
}

#[test]
fn invalid_flag_combinations_open_no_session() {
    for (pod, remote) in POD_AND_REMOTE {
        for flags in ["", "F", "R", "P", "A", "FP", "SF", "SR", "SA", "FPR", "SFRPA"] {
            let mut gateway = Gateway::new(&Setup::default());
            assert_eq!(gateway.receive(0, INSIDE, &tcp(at(pod), at(remote), flags, 1000, 1)), vec![], "{flags}");
            assert_eq!(gateway.sessions(), 0, "{flags}");
            gateway.assert_delta("drop no_session 1");
        }
    }
}

#[test]
fn tcp_options_are_forwarded_unchanged() {
    // MSS, SACK permitted, timestamps, window scale; then an unknown option, and that of AccECN (RFC 9768).
    let options: [&[u8]; 3] = [
        &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7],
        &[253, 8, 0xde, 0xad, 0xbe, 0xef, 1, 2],
        &[172, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1],
    ];
    for (pod, remote) in POD_AND_REMOTE {
        for options in options {
            let mut gateway = Gateway::new(&Setup::default());
            let mut syn = tcp(at(pod), at(remote), "S", 1000, 0);
            let l4 = if at(pod).is_ipv4() { 34 } else { 54 };
            syn.truncate(l4 + 20);
            syn.extend(options);
            syn[l4 + 12] = (5 + options.len() as u8 / 4) << 4;
            // CWR and ECE, as in an AccECN SYN, and DSCP and ECN of the IP header.
            syn[l4 + 13] |= 0xc0;
            if l4 == 34 {
                syn[15] = 0xb9;
            } else {
                syn[14..18].copy_from_slice(&[0x6b, 0x91, 0x23, 0x45]);
            }
            // `pod_sends` checks that only addresses, ports, TTL and checksums differ.
            gateway.pod_sends(&with_tcp_checksums(syn));
            gateway.assert_delta("egress 1, created 1");
        }
    }
}
