//! Shared code of the fuzz targets: the gateway that packets are injected into, and the invariants of its output.
#![forbid(unsafe_code)]

pub mod state;

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{HealthSpec, ServiceSpec};
use vipgate_testkit::services::{backend, both_pods, service, terminating, with_services};
use vipgate_testkit::{Gateway, INSIDE, OUTSIDE, PolicySet, Protocol, Setup};

/// Pod prefixes in network order: 10.244.1.0/24 and fd00:244:1::/64.
const PODS_V4: [u8; 3] = [10, 244, 1];
const PODS_V6: [u8; 8] = [0xfd, 0, 0x02, 0x44, 0, 1, 0, 0];

/// Egress packets sent after the fuzzed input: protocol, source, destination.
pub const EGRESS_PACKETS: [(Protocol, &str, &str); 4] = [
    (Protocol::Udp, "10.244.1.5:4000", "198.51.100.10:53"),
    (Protocol::Tcp, "10.244.1.6:4000", "198.51.100.10:443"),
    (Protocol::Udp, "[fd00:244:1::5]:4000", "[2001:db8:51::10]:53"),
    (Protocol::Echo, "10.244.1.21:7", "192.0.2.200:0"),
];

/// Egress policies of pods, and a Service with some of them as backends; one backend is uncovered, one terminating.
pub fn policy() -> PolicySet {
    let backends = [both_pods(), vec![backend("10.244.1.7"), terminating("10.244.1.21")]].concat();
    let health = Some(HealthSpec { port: 30_000, local_endpoints: 1 });
    with_services(&[ServiceSpec { health, affinity: Some(3), ..service(&backends) }])
}

/// The same policy without one of the pods, as endpoint and as backend.
pub fn policy_without(index: usize) -> PolicySet {
    let mut set = policy();
    let removed = set.endpoints.remove(index % set.endpoints.len()).address;
    set.services[0].backends.retain(|backend| backend.address != removed);
    set
}

/// A gateway with [`policy`].
pub fn gateway(setup: &Setup) -> Gateway {
    let mut gateway = Gateway::new(setup);
    gateway.skip_counter_check();
    gateway.set_policy(&policy());
    gateway
}

/// Checks that no frame sent outside has the address of a covered pod as source. (Allowed are 10.244.1.21, whose policy
/// excludes 198.51.100.128/25, and 10.244.1.7, which no policy covers.)
///
/// # Panics
/// When a pod's address has leaked.
pub fn check_no_leak(sent: &[(InterfaceId, Vec<u8>)]) {
    for (interface, frame) in sent.iter().filter(|(interface, _)| *interface == OUTSIDE) {
        let source = match frame.get(12..14) {
            Some([0x08, 0x00]) => {
                frame.get(26..30).map(|source| source[..3] == PODS_V4 && ![21, 7].contains(&source[3]))
            }
            Some([0x86, 0xdd]) => frame.get(22..38).map(|source| source[..8] == PODS_V6),
            _ => None,
        };
        assert_ne!(source, Some(true), "a pod's address leaks on {interface:?}: {frame:02x?}");
    }
}

/// Injects a frame into a worker, and checks and returns the frames sent.
pub fn inject(gateway: &mut Gateway, worker: usize, inside: bool, frame: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
    if !gateway.workers[worker].io().inject(if inside { INSIDE } else { OUTSIDE }, frame) {
        return Vec::new();
    }
    let sent = gateway.run();
    check_no_leak(&sent);
    sent
}

#[cfg(test)]
mod tests {
    //! Seed corpus of the packet targets. `WRITE_CORPUS=1 cargo test` regenerates it.

    use std::fs;
    use std::net::SocketAddr;
    use std::path::Path;

    use vipgate_dataplane::flow::address::V6;
    use vipgate_dataplane::wire::icmp_error::{IcmpError, compose_v4, compose_v6};
    use vipgate_testkit::*;

    const SEED_FLOWS: [(&str, &str); 2] =
        [("10.244.1.5:4000", "198.51.100.10:53"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53")];

    /// Names and contents of corpus files.
    type Inputs = Vec<(String, Vec<u8>)>;

    fn packets() -> Inputs {
        let mut inputs = Vec::new();
        for (pod, remote) in SEED_FLOWS {
            let (pod, remote): (SocketAddr, SocketAddr) = (at(pod), at(remote));
            let family = if pod.is_ipv4() { "v4" } else { "v6" };
            for (name, protocol) in [("tcp", Protocol::Tcp), ("udp", Protocol::Udp), ("echo", Protocol::Echo)] {
                inputs.push((format!("{family}-{name}"), packet(protocol, pod, remote)));
            }
        }
        inputs
    }

    fn icmp_errors() -> Inputs {
        let mut inputs = Vec::new();
        for (name, frame) in packets() {
            for (kind, error) in [("ttl", IcmpError::TtlExceeded), ("big", IcmpError::PacketTooBig { mtu: 1400 })] {
                let mut bytes = [0; 1280];
                let length = if name.starts_with("v4") {
                    compose_v4(&mut bytes, &frame[14..], error, 0xcb00_714d)
                } else {
                    compose_v6(&mut bytes, &frame[14..], error, V6 { high: 0x2001_0db8_0077_0000, low: 1 })
                };
                let l4 = if name.starts_with("v4") { 20 } else { 40 };
                inputs.push((format!("{name}-{kind}"), [&[l4], &bytes[..length.unwrap()]].concat()));
            }
        }
        inputs
    }

    /// A frame in the input format of the target `frames`.
    fn frames_input(frame: &[u8]) -> Vec<u8> {
        [&[0, u8::try_from(frame.len()).unwrap()], frame].concat()
    }

    #[test]
    fn the_seed_corpus_is_up_to_date() {
        let frames = packets().into_iter().map(|(name, frame)| (name, frames_input(&frame)));
        let error_frames = icmp_errors().into_iter().map(|(name, error)| {
            let kind = if name.starts_with("v4") { [8, 0] } else { [0x86, 0xdd] };
            let frame = [&[2, 0, 0, 0, 0, 0x20, 2, 0, 0, 0, 2, 1], &kind[..], &error[1..]].concat();
            (format!("{name}-frame"), [&[1, u8::try_from(frame.len()).unwrap()], &frame[..]].concat())
        });
        let flows = (0..8_u8).map(|n| {
            let steps = [
                [0, n, 0, 0],
                [2, 0, 0, 1],
                [3, n * 9, 0, n],
                [4, 200, 0, 0],
                [6, n, 0, 0],
                [7, n * 9, 8 * n, 0],
                [8, 0, n, 1],
                [0, n, 0, 1],
            ];
            (format!("steps-{n}"), steps.concat())
        });
        let corpora: [(&str, Inputs); 3] = [
            ("frames", frames.chain(error_frames).collect()),
            ("flows", flows.collect()),
            ("icmp_error", icmp_errors()),
        ];
        for (target, inputs) in corpora {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
            for (name, bytes) in inputs {
                let file = directory.join(name);
                if std::env::var_os("WRITE_CORPUS").is_some() {
                    fs::create_dir_all(&directory).unwrap();
                    fs::write(&file, &bytes).unwrap();
                }
                assert_eq!(fs::read(&file).unwrap(), bytes, "{}", file.display());
            }
        }
    }
}
