//! What the fuzz targets share: the gateway of the engine's own tests, and what must be true of everything that it sends.

#[path = "../../dataplane/tests/engine/support/mod.rs"]
pub mod support;

pub mod state;

use support::services::{backend, both_pods, service, terminating, with_services};
use support::{Gateway, INSIDE, OUTSIDE, Protocol, Setup};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{HealthSpec, PolicySet, ServiceSpec};

/// Pods' addresses as they stand in a packet: 10.244.1.0/24 and fd00:244:1::/64.
const PODS_V4: [u8; 3] = [10, 244, 1];
const PODS_V6: [u8; 8] = [0xfd, 0, 0x02, 0x44, 0, 1, 0, 0];

/// Pods' packets that are sent after whatever came in.
pub const CALLS: [(Protocol, &str, &str); 4] = [
    (Protocol::Udp, "10.244.1.5:4000", "198.51.100.10:53"),
    (Protocol::Tcp, "10.244.1.6:4000", "198.51.100.10:443"),
    (Protocol::Udp, "[fd00:244:1::5]:4000", "[2001:db8:51::10]:53"),
    (Protocol::Echo, "10.244.1.21:7", "192.0.2.200:0"),
];

/// Pods that call out, and a Service that some of them serve: one without a policy, and one that drains, too.
pub fn policy() -> PolicySet {
    let backends = [both_pods(), vec![backend("10.244.1.7"), terminating("10.244.1.21")]].concat();
    let health = Some(HealthSpec { port: 30_000, local_endpoints: 1 });
    with_services(&[ServiceSpec { health, affinity: Some(3), ..service(&backends) }])
}

/// The same without one of the pods, which is nobody's backend either.
pub fn policy_without(which: usize) -> PolicySet {
    let mut less = policy();
    let gone = less.endpoints.remove(which % less.endpoints.len()).address;
    less.services[0].backends.retain(|backend| backend.address != gone);
    less
}

/// A gateway with all of them.
pub fn gateway(setup: &Setup) -> Gateway {
    let mut gateway = Gateway::new(setup);
    gateway.counts_vary();
    gateway.set_policy(&policy());
    gateway
}

/// Checks what the gateway has sent: nothing leaves on the outside with a covered pod's address. (What policy excludes for one of them
/// may: 198.51.100.128/25 from 10.244.1.21; and 10.244.1.7 is covered by no policy.)
///
/// # Panics
/// When something has leaked.
pub fn check_sent(sent: &[(InterfaceId, Vec<u8>)]) {
    for (interface, frame) in sent.iter().filter(|(interface, _)| *interface == OUTSIDE) {
        let source = match frame.get(12..14) {
            Some([0x08, 0x00]) => {
                frame.get(26..30).map(|source| source[..3] == PODS_V4 && ![21, 7].contains(&source[3]))
            }
            Some([0x86, 0xdd]) => frame.get(22..38).map(|source| source[..8] == PODS_V6),
            _ => None,
        };
        assert_ne!(source, Some(true), "a pod's address leaves by {interface:?}: {frame:02x?}");
    }
}

/// Lets a frame arrive at a worker, whatever it is, and checks what is sent because of it.
pub fn arrives(gateway: &mut Gateway, worker: usize, inside: bool, frame: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
    if !gateway.workers[worker].io().inject(if inside { INSIDE } else { OUTSIDE }, frame) {
        return Vec::new();
    }
    let sent = gateway.run();
    check_sent(&sent);
    sent
}

#[cfg(test)]
mod tests {
    //! The first inputs of the fuzzers, byte by byte. `WRITE_CORPUS=1 cargo test` writes them anew.

    use std::fs;
    use std::net::SocketAddr;
    use std::path::Path;

    use vipgate_dataplane::address::V6;
    use vipgate_dataplane::wire::icmp_error::{Error, compose_v4, compose_v6};

    use super::support::*;

    const ENDS: [(&str, &str); 2] =
        [("10.244.1.5:4000", "198.51.100.10:53"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53")];

    /// Names and bytes.
    type Inputs = Vec<(String, Vec<u8>)>;

    fn packets() -> Inputs {
        let mut all = Vec::new();
        for (pod, far) in ENDS {
            let (pod, far): (SocketAddr, SocketAddr) = (at(pod), at(far));
            let family = if pod.is_ipv4() { "v4" } else { "v6" };
            for (name, protocol) in [("tcp", Protocol::Tcp), ("udp", Protocol::Udp), ("echo", Protocol::Echo)] {
                all.push((format!("{family}-{name}"), packet(protocol, pod, far)));
            }
        }
        all
    }

    fn errors() -> Inputs {
        let mut all = Vec::new();
        for (name, frame) in packets() {
            for (kind, error) in [("ttl", Error::TtlExceeded), ("big", Error::PacketTooBig { mtu: 1400 })] {
                let mut bytes = [0; 1280];
                let length = if name.starts_with("v4") {
                    compose_v4(&mut bytes, &frame[14..], error, 0xcb00_714d)
                } else {
                    compose_v6(&mut bytes, &frame[14..], error, V6 { high: 0x2001_0db8_0077_0000, low: 1 })
                };
                let l4 = if name.starts_with("v4") { 20 } else { 40 };
                all.push((format!("{name}-{kind}"), [&[l4], &bytes[..length.unwrap()]].concat()));
            }
        }
        all
    }

    /// A frame as the target `frames` reads it.
    fn placed(frame: &[u8]) -> Vec<u8> {
        [&[0, u8::try_from(frame.len()).unwrap()], frame].concat()
    }

    #[test]
    fn the_corpus_is_what_these_functions_make() {
        let frames = packets().into_iter().map(|(name, frame)| (name, placed(&frame)));
        let about = errors().into_iter().map(|(name, error)| {
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
        let all: [(&str, Inputs); 3] =
            [("frames", frames.chain(about).collect()), ("flows", flows.collect()), ("icmp_error", errors())];
        for (target, inputs) in all {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
            for (name, bytes) in inputs {
                let file = folder.join(name);
                if std::env::var_os("WRITE_CORPUS").is_some() {
                    fs::create_dir_all(&folder).unwrap();
                    fs::write(&file, &bytes).unwrap();
                }
                assert_eq!(fs::read(&file).unwrap(), bytes, "{}", file.display());
            }
        }
    }
}
