//! Traffic that notices what happens to it: numbered datagrams of flows that last, connections that are held open, new
//! sessions all the time, and a capture of what must never be seen outside.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vipgate::lab::{Host, Process, peers};

use crate::{Capture, POD_PACKETS, SERVER, VIP_A, VIP_B, World, wait_for};

/// Where the far side tells a datagram's sender how it is seen, and what it sent.
const ECHO: u16 = 7000;
/// Between two datagrams of a flow, and between two new sessions.
const PACE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(100));
/// Connections that are held open.
const CONNECTIONS: u32 = 20;

/// Starts the far side of flows; it ends with the process.
pub(crate) fn start_echo(server: &Host) {
    for address in SERVER {
        let address: IpAddr = address.parse().unwrap();
        let bound = server.run(move || UdpSocket::bind((address, ECHO))).join();
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

/// Traffic of tenants A and B through a gateway.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    flows: Vec<(&'static str, JoinHandle<io::Result<Seen>>)>,
    new_sessions: JoinHandle<NewSessions>,
    connections: Connections,
    _echo: Process,
    capture: Capture,
}

/// What a flow has seen.
#[derive(Debug)]
struct Seen {
    sent: u32,
    answered: u32,
    /// The addresses and ports that the far side saw.
    sources: BTreeSet<SocketAddr>,
}

/// What became of new sessions.
#[derive(Debug, Default)]
struct NewSessions {
    good: u32,
    failed: Vec<String>,
    /// With another identity than they should have.
    strange: Vec<String>,
}

impl Traffic {
    /// Begins, and returns when all of it flows.
    pub fn start(world: &World) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        // Nobody covers p4, but where a test says so.
        let capture = world.capture(&format!("{POD_PACKETS} and not host 10.1.0.31 and not host fd00:1::31"));
        let echo = echo_server(world);
        let connections = Connections::open(world, &world.pods[0], SERVER[0], CONNECTIONS);
        let answered: Arc<[AtomicU32; 3]> = Arc::default();
        let flows = [(0, SERVER[0], VIP_A[0]), (1, SERVER[1], VIP_A[1]), (2, SERVER[0], VIP_B[0])];
        let flows = flows.into_iter().enumerate().map(|(n, (pod, server, vip))| {
            let (stop, answered) = (stop.clone(), answered.clone());
            let server = SocketAddr::new(server.parse().unwrap(), ECHO);
            (vip, world.pods[pod].run(move || flow(server, &stop, &answered[n])))
        });
        let flows = flows.collect();
        let flow = || answered.iter().all(|answered| answered.load(Relaxed) > 0);
        assert!(wait_for(Duration::from_secs(5), flow), "no answers: {:?}", world.ask(&["drops"]));
        let (pods, end) = ([world.pods[0].clone(), world.pods[2].clone()], stop.clone());
        let new_sessions = thread::spawn(move || new_sessions(&pods, &end));
        Self { stop, flows, new_sessions, connections, _echo: echo, capture }
    }

    /// Ends it. Nothing was lost: no packet, no session, no question, and no pod's address left.
    pub fn end(self) {
        self.finish(true);
    }

    /// Ends it after a time in which no gateway was there: packets were lost, but no session, and no pod's address left.
    pub fn end_after_absence(self) {
        self.finish(false);
    }

    fn finish(self, strict: bool) {
        self.stop.store(true, Relaxed);
        for (vip, thread) in self.flows {
            let seen = thread.join().unwrap().unwrap();
            assert!(!strict || seen.answered == seen.sent, "packets were lost: {seen:?}");
            assert!(seen.sources.len() == 1, "the session was lost: {seen:?}");
            assert!(seen.sources.iter().all(|source| source.ip().to_string() == vip), "{vip}: {seen:?}");
        }
        let new = self.new_sessions.join().unwrap();
        assert!(new.good > 0 && new.strange.is_empty(), "{new:?}");
        assert!(!strict || new.failed.is_empty(), "{new:?}");
        let held = self.connections.end();
        assert!(held.alive == CONNECTIONS && held.changed == 0, "{held:?}");
        assert_eq!(self.capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    }
}

/// Sends numbered datagrams from one socket until told to stop.
fn flow(server: SocketAddr, stop: &AtomicBool, answered: &AtomicU32) -> io::Result<Seen> {
    let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(server)?;
    let mut seen = Seen { sent: 0, answered: 0, sources: BTreeSet::new() };
    let hear = |seen: &mut Seen, until: Instant| -> io::Result<()> {
        let mut answer = [0; 128];
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left))?;
            // Nothing came, or word came that the far side can't be reached: then the answer is missing.
            let Ok(length) = socket.recv(&mut answer) else { continue };
            let text = String::from_utf8_lossy(&answer[..length]).into_owned();
            let source = text.split(' ').nth(1).and_then(|source| source.parse().ok());
            seen.sources.insert(source.ok_or_else(|| io::Error::other(text))?);
            seen.answered += 1;
            answered.store(seen.answered, Relaxed);
        }
        Ok(())
    };
    while !stop.load(Relaxed) {
        // Refused while nobody is there: a datagram that is missed at the end.
        let _ = socket.send(seen.sent.to_string().as_bytes());
        seen.sent += 1;
        hear(&mut seen, Instant::now() + PACE.0)?;
    }
    let patience = Instant::now() + Duration::from_secs(2);
    while seen.answered < seen.sent && Instant::now() < patience {
        hear(&mut seen, Instant::now() + PACE.0)?;
    }
    Ok(seen)
}

/// Opens sessions of tenants A and B until told to stop.
fn new_sessions(pods: &[Host; 2], stop: &AtomicBool) -> NewSessions {
    let mut outcome = NewSessions::default();
    let server: IpAddr = SERVER[0].parse().unwrap();
    while !stop.load(Relaxed) {
        for (pod, vip) in pods.iter().zip([VIP_A[0], VIP_B[0]]) {
            for (what, answer) in [("UDP", peers::ask_udp(pod, server)), ("TCP", peers::ask_http(pod, server))] {
                match answer {
                    Ok(seen) if seen == vip => outcome.good += 1,
                    Ok(seen) => outcome.strange.push(format!("{what} from {} is seen as {seen}", pod.name())),
                    Err(error) => outcome.failed.push(format!("{what} from {}: {error}", pod.name())),
                }
            }
        }
        thread::sleep(PACE.1);
    }
    outcome
}

/// Connections that are held open, and asked on all the time.
#[derive(Debug)]
pub struct Connections {
    process: Process,
    log: PathBuf,
}

/// What became of them.
#[derive(Debug)]
pub struct Outcome {
    /// Those that still answer.
    pub alive: u32,
    /// Those that the far side saw change their port.
    pub changed: u32,
    /// The longest time in which no answer came on any of them.
    pub longest_ms: u32,
}

impl Connections {
    /// Opens them from a pod to the server's [`echo_server`].
    pub fn open(world: &World, pod: &Host, server: &str, count: u32) -> Self {
        let log = world.folder.path().join(format!("clients-{}.log", pod.name()));
        let script = script("echo_clients.py");
        let process = pod.spawn(&["python3", &script, server, "7777", &count.to_string()], &log).unwrap();
        let stand = || fs::read_to_string(&log).unwrap().contains("open ");
        assert!(wait_for(Duration::from_secs(30), stand), "{}", fs::read_to_string(&log).unwrap());
        Self { process, log }
    }

    /// Ends them, after time for what is under way.
    pub fn end(mut self) -> Outcome {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(40)).expect("the clients end");
        let text = fs::read_to_string(&self.log).unwrap();
        let last = text.lines().last().unwrap_or_default();
        let number = |word: &str| {
            let at = last.split(' ').position(|other| other == word).unwrap_or_else(|| panic!("{text}"));
            last.split(' ').nth(at + 1).unwrap().parse().unwrap()
        };
        Outcome { alive: number("alive"), changed: number("changed"), longest_ms: number("longest_ms") }
    }
}

/// The far side of [`Connections`].
pub fn echo_server(world: &World) -> Process {
    let log = world.folder.path().join("echo.log");
    let process = world.server.spawn(&["python3", &script("echo_server.py"), "7777"], &log).unwrap();
    assert!(wait_for(Duration::from_secs(10), || fs::read_to_string(&log).unwrap().contains("listening")));
    process
}

/// A script of these tests.
pub fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name).display().to_string()
}
