//! Any frames are survived and accounted for.

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use vipgate_coverage::property;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::worker::Worker;
use vipgate_testkit::*;

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)]
}

/// Seeds of failures are kept in a file, and tried first.
fn config() -> ProptestConfig {
    let seeds = FileFailurePersistence::Direct("tests/engine/properties.regressions");
    ProptestConfig { cases: 200, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() }
}

/// No frame stops a worker, and each one is accounted for: forwarded, or dropped with a reason.
#[test]
fn arbitrary_frames_are_survived_and_accounted_for() {
    let classes = [
        "sent",
        "malformed",
        "bad_checksum",
        "unknown_protocol",
        "no_service",
        "spoofed_source",
        "not_ours",
        "martian",
        "fragment",
        "ttl",
    ];
    property(config(), &prop::collection::vec(malformed_packets(), 1..80), &classes, |frames, coverage| {
        let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
        gateway.hostile = true;
        gateway.skip_counter_check();
        for (n, (interface, frame)) in frames.iter().enumerate() {
            let before = accounted(&gateway);
            let sent = gateway.receive(n % 2, *interface, frame).len() as u64;
            prop_assert!(sent > 0 || accounted(&gateway) == before + 1, "{:02x?}", frame);
            coverage.add("sent", sent);
        }
        gateway.drops().into_iter().for_each(|(reason, count)| coverage.add(reason.name(), count));
        let valid = packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53"));
        prop_assert_eq!(gateway.receive(0, INSIDE, &valid).len(), 1, "the next valid packet is forwarded");
        Ok(())
    });
}

/// Frames not forwarded: dropped, consumed, or buffered.
fn accounted(gateway: &Gateway) -> u64 {
    let of = |it: &Worker<MemoryIo>| it.counters().consumed.get() + u64::from(it.tables().reassembly.buffered());
    gateway.not_forwarded() + gateway.workers.iter().map(of).sum::<u64>()
}

/// Valid packets with modified bytes, truncated or from the wrong side, and random bytes.
fn malformed_packets() -> impl Strategy<Value = (InterfaceId, Vec<u8>)> {
    let valid = (protocol(), any::<bool>(), any::<bool>()).prop_map(|(protocol, v6, is_reply)| {
        let (pod, remote, vip) = if v6 {
            ("[fd00:244:1::5]:1000", "[2001:db8:51::1]:53", "[2001:db8::10]:20000")
        } else {
            ("10.244.1.5:1000", "198.51.100.10:53", "192.0.2.10:20000")
        };
        if is_reply {
            (OUTSIDE, packet(protocol, at(remote), at(vip)))
        } else {
            (INSIDE, packet(protocol, at(pod), at(remote)))
        }
    });
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let truncation = prop::option::weighted(0.2, any::<prop::sample::Index>());
    // Some have a valid header checksum, to get past the first checks.
    let mutated = (valid, changes, truncation, 0..10_u8, any::<bool>()).prop_map(
        |((mut interface, mut bytes), changes, truncation, variant, valid_checksum)| {
            if variant == 0 {
                set_ttl(&mut bytes, 1);
            } else if variant == 1 && bytes[12] == 8 {
                bytes[20] = 0x20;
                update_header_checksum(&mut bytes);
            } else if variant == 2 {
                interface = if interface == INSIDE { OUTSIDE } else { INSIDE };
                bytes = on_link(interface, bytes);
            }
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if valid_checksum {
                update_header_checksum(&mut bytes);
            }
            bytes.truncate(bytes.len() - truncation.map_or(0, |truncation| truncation.index(bytes.len()) / 4));
            (interface, bytes)
        },
    );
    let side = prop::sample::select(vec![INSIDE, OUTSIDE]);
    prop_oneof![5 => mutated, 1 => (side, prop::collection::vec(any::<u8>(), 0..200))]
}
