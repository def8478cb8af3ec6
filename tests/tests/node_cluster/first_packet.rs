//! The first packets of pods that come and go: translated soon, and never with the pod's address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vipgate_lab::reflector::HTTP;
use vipgate_tests::cluster::{Cluster, SERVER};
use vipgate_tests::wait_for;

use crate::api_objects::{BATCHES, create_pod, delete_pod, write_addresses};
use crate::cluster::NodeCluster;

/// Pods of the test, over all nodes.
const PODS: usize = 200;
/// Port of the remote.
const REMOTE_PORT: u16 = 5400;
/// A pod sends this often.
const INTERVAL: Duration = Duration::from_millis(5);
/// Interval of ARP requests in milliseconds, of the namespace of the thread.
const ARP_RETRANSMISSION: &str = "/proc/sys/net/ipv4/neigh/eth0/retrans_time_ms";
/// Generous: builds of other tests may share the machine.
const MAX_P99: Duration = Duration::from_secs(2);

/// What the remote has received of a pod.
#[derive(Debug)]
struct Received {
    first: Instant,
    datagrams: u64,
    sources: BTreeSet<String>,
}

/// A remote that records pods' datagrams by the number in them.
#[derive(Debug)]
struct Remote {
    received: Arc<Mutex<BTreeMap<u32, Received>>>,
    stop: Arc<AtomicBool>,
}

impl Remote {
    fn start(cluster: &Cluster) -> Self {
        let (received, stop) = (Arc::<Mutex<BTreeMap<u32, Received>>>::default(), Arc::<AtomicBool>::default());
        let (map, flag) = (received.clone(), stop.clone());
        let bound = Arc::<AtomicBool>::default();
        let is_bound = bound.clone();
        drop(cluster.server.run(move || {
            let socket = UdpSocket::bind((SERVER[0].parse::<IpAddr>().unwrap(), REMOTE_PORT))?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            is_bound.store(true, Relaxed);
            let mut buffer = [0; 4];
            while !flag.load(Relaxed) {
                let Ok((4, peer)) = socket.recv_from(&mut buffer) else { continue };
                let now = Instant::now();
                let mut map = map.lock().unwrap();
                let first = Received { first: now, datagrams: 0, sources: BTreeSet::new() };
                let entry = map.entry(u32::from_be_bytes(buffer)).or_insert(first);
                entry.datagrams += 1;
                entry.sources.insert(peer.ip().to_string());
            }
            Ok(())
        }));
        assert!(wait_for(Duration::from_secs(5), || bound.load(Relaxed)));
        Self { received, stop }
    }

    fn first(&self, number: u32) -> Option<Instant> {
        self.received.lock().unwrap().get(&number).map(|received| received.first)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// Times of a pod.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// The kernel has accepted its first datagram: it has an address and a route.
    sent: Instant,
    /// Its addresses are in the API.
    written: Instant,
    /// The remote has received a datagram.
    received: Instant,
    /// It has a TCP connection.
    connected: Instant,
}

/// Sends datagrams from a pod until `stop`, from before it has an address; the time of the first that the kernel accepted.
fn send_datagrams(number: u32, stop: &AtomicBool) -> std::io::Result<Instant> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let (remote, mut first) = (SocketAddr::new(SERVER[0].parse().unwrap(), REMOTE_PORT), None);
    let mut is_impatient = false;
    while !stop.load(Relaxed) {
        // It sends before the plugin has finished: an ARP request that the node doesn't answer yet would cost a second.
        is_impatient = is_impatient || std::fs::write(ARP_RETRANSMISSION, "20").is_ok();
        match (socket.send_to(&number.to_be_bytes(), remote), first) {
            (Ok(_), None) => first = Some(Instant::now()),
            (Err(_), None) => {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            (Ok(_) | Err(_), Some(_)) => {}
        }
        thread::sleep(INTERVAL);
    }
    first.ok_or_else(|| std::io::Error::other("the pod never had an address"))
}

/// Connects from a pod, from before it has an address; when it was connected. A lost SYN is retransmitted after a second.
fn connect() -> std::io::Result<Instant> {
    let remote = SocketAddr::new(SERVER[0].parse().unwrap(), HTTP);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match TcpStream::connect_timeout(&remote, Duration::from_secs(10)) {
            Ok(_) => return Ok(Instant::now()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The life of a pod.
fn run_pod(cluster: &NodeCluster, remote: &Remote, node: usize, number: u32) -> Times {
    let namespace = BATCHES[number as usize % BATCHES.len()].0;
    let name = format!("batch-{number}");
    let host = &cluster.nodes[node];
    create_pod(&cluster.api, namespace, &name, &host.node.name);
    let pod = cluster.cluster.add_host(&name);
    let stop = Arc::<AtomicBool>::default();
    let flag = stop.clone();
    let sender = pod.run(move || send_datagrams(number, &flag));
    let connection = pod.run(connect);
    let addresses = host.network.add(&host.node.host, &pod);
    write_addresses(&cluster.api, namespace, &name, &addresses);
    let written = Instant::now();
    let arrived = wait_for(Duration::from_secs(20), || remote.first(number).is_some());
    assert!(arrived, "nothing of {name}, {addresses:?}, has arrived: {}", cluster.evidence(node));
    let connected = connection.join().unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
    stop.store(true, Relaxed);
    let sent = sender.join().unwrap().unwrap();
    host.network.del(&host.node.host, &pod);
    delete_pod(&cluster.api, namespace, &name);
    cluster.cluster.remove_host(&pod);
    Times { sent, written, received: remote.first(number).unwrap(), connected }
}

/// 50th, 99th and 100th percentile.
fn percentiles(times: &[Times], from: impl Fn(&Times) -> Instant, to: impl Fn(&Times) -> Instant) -> [Duration; 3] {
    let mut durations: Vec<Duration> = times.iter().map(|it| to(it).saturating_duration_since(from(it))).collect();
    durations.sort_unstable();
    [50, 99, 100].map(|percent| durations[(durations.len() * percent).div_ceil(100) - 1])
}

#[test]
fn two_hundred_pods_come_and_go_and_their_first_packets_are_translated() {
    let cluster = NodeCluster::start("nc-first");
    let leaks = cluster.start_leak_verifier();
    let remote = Remote::start(&cluster.cluster);
    // A node may know a pod before the gateways do.
    cluster.cluster.accounting.allow(["no_policy"]);
    let began = Instant::now();
    let times: Vec<Times> = thread::scope(|scope| {
        let (cluster, remote) = (&cluster, &remote);
        let of_node = |node: usize| {
            let numbers = (0..PODS).filter(move |number| number % 3 == node);
            scope.spawn(move || numbers.map(|number| run_pod(cluster, remote, node, number as u32)).collect::<Vec<_>>())
        };
        let threads = [0, 1, 2].map(of_node);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    println!("{PODS} pods over three nodes in {:.1} s", began.elapsed().as_secs_f64());
    leaks.check();
    let received = remote.received.lock().unwrap();
    for (number, received) in &*received {
        let vip = BATCHES[*number as usize % BATCHES.len()].1[0];
        assert_eq!(received.sources, [vip.to_owned()].into(), "pod {number}");
    }
    let print = |name: &str, [p50, p99, max]: [Duration; 3]| {
        println!(
            "{name}: {} ms at p50, {} ms at p99, {} ms at most",
            p50.as_millis(),
            p99.as_millis(),
            max.as_millis()
        );
    };
    let first = percentiles(&times, |it| it.sent, |it| it.received);
    print("address usable to its first datagram translated at the remote", first);
    print("address usable to address in the API", percentiles(&times, |it| it.sent, |it| it.written));
    print("address in the API to first datagram", percentiles(&times, |it| it.written, |it| it.received));
    print("address usable to a TCP connection", percentiles(&times, |it| it.sent, |it| it.connected));
    println!("{} packets reached a gateway before it knew the pod", cluster.cluster.drop_count("no_policy"));
    assert!(first[1] < MAX_P99, "{first:?}");
    cluster.check_kernels_agree();
    for node in &cluster.nodes {
        node.node.wait_for_pods(4);
    }
}
