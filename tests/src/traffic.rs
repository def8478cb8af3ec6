//! Continuous traffic that detects interruptions: numbered datagrams of long-lived flows, held connections, new
//! sessions at an interval, and a capture of leaked pod addresses.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vipgate_lab::{Host, reflector};

use crate::cluster::{ClientConfig, Clients, LINE_PORT, LineServer};
use crate::{Capture, POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, wait_for};

/// Port of the UDP echo: replies with the datagram's number and the source that the server sees.
const ECHO_PORT: u16 = 7000;
/// Interval between two datagrams of a flow.
const DATAGRAM_INTERVAL: Duration = Duration::from_millis(10);
/// Interval between two rounds of new sessions.
const SESSION_INTERVAL: Duration = Duration::from_millis(100);
/// Number of held connections.
const HELD_CONNECTIONS: u32 = 20;

/// Starts the UDP echo on the server; it ends with the process.
pub(crate) fn start_udp_echo(server: &Host) {
    for address in SERVER {
        let address: IpAddr = address.parse().unwrap();
        let bound = server.run(move || UdpSocket::bind((address, ECHO_PORT))).join();
        let socket = bound.expect("binding doesn't panic").expect("the server has a port for its echo");
        drop(thread::spawn(move || -> io::Result<()> {
            let mut datagram = [0; 64];
            loop {
                let (length, from) = socket.recv_from(&mut datagram)?;
                let number = String::from_utf8_lossy(&datagram[..length]).into_owned();
                socket.send_to(format!("{number} {from}").as_bytes(), from)?;
            }
        }));
    }
}

/// Running traffic of tenants A and B through a gateway.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    flows: Vec<(&'static str, JoinHandle<io::Result<FlowStats>>)>,
    new_sessions: JoinHandle<NewSessions>,
    connections: Clients,
    lines: LineServer,
    capture: Capture,
}

/// Result of a flow.
#[derive(Debug)]
struct FlowStats {
    sent: u32,
    answered: u32,
    /// Source addresses and ports that the server saw.
    sources: BTreeSet<SocketAddr>,
}

/// Results of new sessions.
#[derive(Debug, Default)]
struct NewSessions {
    succeeded: u32,
    failed: Vec<String>,
    /// Seen with an unexpected source address.
    wrong_source: Vec<String>,
}

impl Traffic {
    /// Starts all traffic, and returns when every flow gets replies.
    pub fn start(testbed: &Testbed) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        // p4 is uncovered in most tests, so its address may be seen outside.
        let capture = testbed.capture(&format!("{POD_FILTER} and not host 10.1.0.31 and not host fd00:1::31"));
        let lines = start_line_server(testbed);
        let connections = hold_connections(testbed, 0, SERVER[0], HELD_CONNECTIONS);
        let answered: Arc<[AtomicU32; 3]> = Arc::default();
        let flows = [(0, SERVER[0], VIP_A[0]), (1, SERVER[1], VIP_A[1]), (2, SERVER[0], VIP_B[0])];
        let flows = flows.into_iter().enumerate().map(|(n, (pod, server, vip))| {
            let (stop, answered) = (stop.clone(), answered.clone());
            let server = SocketAddr::new(server.parse().unwrap(), ECHO_PORT);
            (vip, testbed.pods[pod].run(move || run_flow(server, &stop, &answered[n])))
        });
        let flows = flows.collect();
        let all_answered = || answered.iter().all(|answered| answered.load(Relaxed) > 0);
        assert!(wait_for(Duration::from_secs(5), all_answered), "no replies: {:?}", testbed.query(&["drops"]));
        let (pods, end) = ([testbed.pods[0].clone(), testbed.pods[2].clone()], stop.clone());
        let new_sessions = thread::spawn(move || open_sessions(&pods, &end));
        Self { stop, flows, new_sessions, connections, lines, capture }
    }

    /// Stops the traffic and asserts that no packet, session or request was lost, and no pod address leaked.
    pub fn end(self) {
        self.finish(true);
    }

    /// Stops the traffic after an outage of the gateway: packets may be lost, but no session, and no pod address may
    /// have leaked.
    pub fn end_after_outage(self) {
        self.finish(false);
    }

    fn finish(self, strict: bool) {
        self.stop.store(true, Relaxed);
        for (vip, thread) in self.flows {
            let flow = thread.join().unwrap().unwrap();
            assert!(!strict || flow.answered == flow.sent, "packets were lost: {flow:?}");
            assert!(flow.sources.len() == 1, "the session was lost: {flow:?}");
            assert!(flow.sources.iter().all(|source| source.ip().to_string() == vip), "{vip}: {flow:?}");
        }
        let new = self.new_sessions.join().unwrap();
        assert!(new.succeeded > 0 && new.wrong_source.is_empty(), "{new:?}");
        assert!(!strict || new.failed.is_empty(), "{new:?}");
        self.connections.end().check_all_succeeded();
        let records = self.lines.end();
        assert!(records.iter().all(|record| record.errors == 0), "{records:?}");
        assert_eq!(self.capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    }
}

/// Sends numbered datagrams from one socket until `stop`.
fn run_flow(server: SocketAddr, stop: &AtomicBool, answered: &AtomicU32) -> io::Result<FlowStats> {
    let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(server)?;
    let mut stats = FlowStats { sent: 0, answered: 0, sources: BTreeSet::new() };
    let receive = |stats: &mut FlowStats, until: Instant| -> io::Result<()> {
        let mut reply = [0; 128];
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left))?;
            // A timeout or an ICMP error: the reply counts as lost.
            let Ok(length) = socket.recv(&mut reply) else { continue };
            let text = String::from_utf8_lossy(&reply[..length]).into_owned();
            let source = text.split(' ').nth(1).and_then(|source| source.parse().ok());
            stats.sources.insert(source.ok_or_else(|| io::Error::other(text))?);
            stats.answered += 1;
            answered.store(stats.answered, Relaxed);
        }
        Ok(())
    };
    while !stop.load(Relaxed) {
        // Fails after an ICMP error: the datagram counts as lost.
        let _ = socket.send(stats.sent.to_string().as_bytes());
        stats.sent += 1;
        receive(&mut stats, Instant::now() + DATAGRAM_INTERVAL)?;
    }
    let deadline = Instant::now() + Duration::from_secs(2);
    while stats.answered < stats.sent && Instant::now() < deadline {
        receive(&mut stats, Instant::now() + DATAGRAM_INTERVAL)?;
    }
    Ok(stats)
}

/// Opens sessions of tenants A and B until `stop`.
fn open_sessions(pods: &[Host; 2], stop: &AtomicBool) -> NewSessions {
    let mut outcome = NewSessions::default();
    let server: IpAddr = SERVER[0].parse().unwrap();
    while !stop.load(Relaxed) {
        for (pod, vip) in pods.iter().zip([VIP_A[0], VIP_B[0]]) {
            for (protocol, reply) in
                [("UDP", reflector::query_udp(pod, server)), ("TCP", reflector::query_http(pod, server))]
            {
                match reply {
                    Ok(observed) if observed == vip => outcome.succeeded += 1,
                    Ok(observed) => {
                        outcome.wrong_source.push(format!("{protocol} from {} is seen as {observed}", pod.name()));
                    }
                    Err(error) => outcome.failed.push(format!("{protocol} from {}: {error}", pod.name())),
                }
            }
        }
        thread::sleep(SESSION_INTERVAL);
    }
    outcome
}

/// Starts the line server on the testbed's server.
pub fn start_line_server(testbed: &Testbed) -> LineServer {
    LineServer::start(testbed.folder.path(), &testbed.server)
}

/// Opens connections from a pod to the line server that send until they are stopped, and waits until all are
/// established.
pub fn hold_connections(testbed: &Testbed, pod: usize, server: &str, count: u32) -> Clients {
    let config = ClientConfig {
        server: (server, LINE_PORT),
        count,
        intervals: vec![(100, 0.05, 0.1)],
        // TCP doubles its timeout with each loss in a row (RFC 6298 section 5.5): beside restarts it may be half a minute.
        timeout: 50,
        ..ClientConfig::default()
    };
    let (name, first) = (format!("held-{pod}"), 10_000_000 * (pod as u32 + 1));
    let mut clients = Clients::start(testbed.folder.path(), &testbed.pods[pod], &name, first, &config);
    clients.wait_established(Duration::from_secs(30));
    clients
}

/// Path of a script of these tests.
pub fn script_path(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name).display().to_string()
}
