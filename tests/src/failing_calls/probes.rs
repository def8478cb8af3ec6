//! Probes: requests of pods to a server outside, one after the other, each a session of its own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vipgate_lab::{Host, reflector};

/// Time between two requests of a flow.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time for a reply.
const TIMEOUT: Duration = Duration::from_millis(250);

/// Requests of a pod.
#[derive(Clone, Debug)]
pub struct Flow {
    pub pod: Host,
    /// The address of the server, which replies with the source that it sees.
    pub server: &'static str,
    /// The source that it has to see.
    pub source: &'static str,
    /// Another one that it may see: such an answer doesn't count.
    pub alternative: Option<&'static str>,
}

/// What is known of a flow.
#[derive(Clone, Debug, Default)]
struct Answers {
    /// When the last request that was answered was sent.
    last: Option<Instant>,
    /// Other sources that the server has seen.
    wrong: Vec<String>,
}

/// Running flows. They end on drop.
#[derive(Debug)]
pub struct Probes {
    stop: Arc<AtomicBool>,
    answers: Arc<Mutex<Vec<Answers>>>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Probes {
    /// Starts these flows.
    pub fn start(flows: &[Flow]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let answers = Arc::new(Mutex::new(vec![Answers::default(); flows.len()]));
        let threads = flows.iter().enumerate().map(|(number, flow)| {
            let server = SocketAddr::new(flow.server.parse().unwrap(), reflector::UDP);
            let (source, alternative) = (flow.source, flow.alternative);
            let (stop, answers) = (stop.clone(), answers.clone());
            flow.pod.run(move || {
                while !stop.load(Relaxed) {
                    let sent = Instant::now();
                    if let Ok(seen) = request(server) {
                        let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
                        if seen == source {
                            answers[number].last = Some(sent);
                        } else if alternative != Some(&*seen) {
                            answers[number].wrong.push(format!("{seen} instead of {source}"));
                        }
                    }
                    thread::sleep(INTERVAL);
                }
                Ok(())
            })
        });
        let threads = threads.collect();
        Self { stop, answers, threads }
    }

    /// Forgets all answers so far.
    pub fn forget(&self) {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).fill(Answers::default());
    }

    /// When the last request of a flow was sent that was answered.
    pub fn last_answered(&self, flow: usize) -> Option<Instant> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)[flow].last
    }

    /// Sources that the server has seen and must not see, of all flows.
    pub fn wrong(&self) -> Vec<String> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.iter().flat_map(|answers| answers.wrong.clone()).collect()
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Sends a request from a new port; returns the source that the server sees.
fn request(server: SocketAddr) -> io::Result<String> {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.send_to(b"who am I?", server)?;
    let mut reply = [0; 64];
    let (length, _) = socket.recv_from(&mut reply)?;
    Ok(String::from_utf8_lossy(&reply[..length]).into_owned())
}
