//! Next hops that the kernel doesn't know: how long the first packet takes, and how many of a burst are kept.
//!
//! ```text
//!   [source] eth0 ---- gw-in [gateway] gw-out ---- eth0 [sink]
//! ```
//! Before each trial the gateway's entry of the sink is deleted. The sink answers ARP and neighbour discovery at once, as Linux does, so
//! what is measured is the gateway: a ping by UDP, there and back, beside one with the entry in place.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;
use serde::Serialize;
use tempfile::TempDir;

use crate::failover::quantile;
use crate::netns::{self, Namespace};
use crate::path::{median, round2};
use crate::process::Process;
use crate::wire::Machine;
use crate::wire::subject::{Placement, Setting, Subject};
use crate::wire::vipgate::{Policy, Vipgate};

/// What a burst consists of.
const BURSTS: [usize; 2] = [64, 400];
/// After a deletion everybody comes to rest; longer than the gateway leaves between two questions for one next hop.
const REST: Duration = Duration::from_millis(150);
/// A ping that takes longer is lost.
const PATIENCE: Duration = Duration::from_secs(1);
/// What is kept of a burst has come when nothing has for this long.
const QUIET: Duration = Duration::from_millis(200);
const PORT: u16 = 7;
const POD: [&str; 2] = ["10.1.4.1", "fd00:1::4:1"];
const SINK: [&str; 2] = ["203.0.113.254", "2001:db8:113::fe"];

/// What `vipgate-bench neighbor` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Pings to a next hop that isn't known, of each subject and family
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// Bursts of each length; the median is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    bursts: u32,
    #[command(flatten)]
    machine: Machine,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// A line of the report.
#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    subject: Subject,
    family: &'static str,
    trials: u32,
    /// Of pings, there and back: the first one to an unknown next hop, and one to a known one.
    first_p50_us: f64,
    first_p99_us: f64,
    first_worst_us: f64,
    known_p50_us: f64,
    known_p99_us: f64,
    /// First pings without an answer within a second.
    lost: usize,
    /// Packets of a burst to an unknown next hop that came through.
    kept_of_64: f64,
    kept_of_400: f64,
}

/// Measures both subjects in turn, over both families.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let setting = Setting { gateway: options.machine.program()?, core: cores[1], placement: Placement::Source };
    netns::prepare()?;
    netns::output(&["nft", "--version"]).context("nft is needed: install nftables")?;
    for subject in [Subject::Vipgate, Subject::Nft] {
        let bench = Bench::start(subject, &setting, cores[0])?;
        for (family, name) in ["ipv4", "ipv6"].into_iter().enumerate() {
            let line = bench.measure(options, subject, (family, name));
            println!("{}", serde_json::to_string(&line.with_context(|| format!("{subject:?}, {name}"))?)?);
        }
    }
    Ok(())
}

/// A subject that runs, and the sockets at both of its sides, IPv4 first.
struct Bench {
    /// Ends before the namespaces do.
    _process: Option<Process>,
    gateway: Namespace,
    pods: [UdpSocket; 2],
    sinks: [UdpSocket; 2],
    _others: [Namespace; 2],
    _folder: TempDir,
}

impl Bench {
    fn start(subject: Subject, setting: &Setting, core: usize) -> Result<Self> {
        let [source, gateway, sink] =
            [Namespace::create("source")?, Namespace::create("gateway")?, Namespace::create("sink")?];
        for host in [&source, &gateway, &sink] {
            let v6 = "net.ipv6.conf.default";
            host.exec(&["sysctl", "-q", "-w", &format!("{v6}.disable_ipv6=0"), &format!("{v6}.accept_dad=0")])?;
        }
        link((&source, "eth0"), (&gateway, "gw-in"))?;
        link((&gateway, "gw-out"), (&sink, "eth0"))?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])?;
        for (host, interface, addresses) in [
            (&source, "eth0", [format!("{}/16", POD[0]), format!("{}/64", POD[1])]),
            (&gateway, "gw-in", ["10.1.0.1/16", "fd00:1::1/64"].map(str::to_owned)),
            (&gateway, "gw-out", ["203.0.113.1/24", "2001:db8:113::1/64"].map(str::to_owned)),
            (&sink, "eth0", [format!("{}/24", SINK[0]), format!("{}/64", SINK[1])]),
        ] {
            for address in &addresses {
                host.exec(&["ip", "address", "add", address, "dev", interface])?;
            }
        }
        for router in ["10.1.0.1", "fd00:1::1"] {
            source.exec(&["ip", "route", "add", "default", "via", router])?;
        }
        let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for configuration")?;
        let process = match subject {
            Subject::Vipgate => {
                let vipgate = Vipgate::configure(setting, 65_536, None, &Policy::Pods, folder.path())?;
                fs::write(folder.path().join("policy.yaml"), manifests())?;
                Some(Process::from(vipgate.start(&gateway)?))
            }
            Subject::Nft | Subject::Ovs => {
                let rules = "table inet bench { chain out { type nat hook postrouting priority srcnat; oifname \"gw-out\" masquerade; }; }";
                gateway.exec(&["nft", rules])?;
                None
            }
        };
        let open = |host: &Namespace, address: IpAddr, port| -> Result<UdpSocket> {
            host.run(core, || {
                let socket = UdpSocket::bind((address, port)).with_context(|| format!("cannot use {address}"))?;
                socket.set_read_timeout(Some(PATIENCE))?;
                // A whole burst fits.
                setsockopt(&socket, RcvBufForce, &(4 << 20))?;
                Ok(socket)
            })
        };
        let pods = [open(&source, POD[0].parse()?, 0)?, open(&source, POD[1].parse()?, 0)?];
        let sinks = [open(&sink, SINK[0].parse()?, PORT)?, open(&sink, SINK[1].parse()?, PORT)?];
        Ok(Self { _process: process, gateway, pods, sinks, _others: [source, sink], _folder: folder })
    }

    fn measure(&self, options: &Options, subject: Subject, (family, name): (usize, &'static str)) -> Result<Line> {
        // Everybody but the gateway comes to know everybody.
        for _ in 0..3 {
            self.ping(family)?;
        }
        ensure!(self.ping(family)?.is_some(), "nothing comes through");
        let (mut first, mut known) = (Vec::new(), Vec::new());
        for _ in 0..options.trials {
            self.forget(family)?;
            first.push(self.ping(family)?);
            sleep(REST);
            known.extend(self.ping(family)?);
        }
        let lost = first.iter().filter(|took| took.is_none()).count();
        let first: Vec<f64> = first.into_iter().flatten().collect();
        let mut kept = BURSTS.map(|_| Vec::new());
        for _ in 0..options.bursts {
            for (kept, packets) in kept.iter_mut().zip(BURSTS) {
                self.forget(family)?;
                kept.push(self.burst(family, packets)? as f64);
            }
        }
        let [kept_of_64, kept_of_400] = kept.map(median);
        Ok(Line {
            benchmark: "neighbor",
            subject,
            family: name,
            trials: options.trials,
            first_p50_us: round2(quantile(&first, 50)),
            first_p99_us: round2(quantile(&first, 99)),
            first_worst_us: round2(quantile(&first, 100)),
            known_p50_us: round2(quantile(&known, 50)),
            known_p99_us: round2(quantile(&known, 99)),
            lost,
            kept_of_64,
            kept_of_400,
        })
    }

    /// Makes the gateway's kernel forget the sink, and waits until everybody is at rest.
    fn forget(&self, family: usize) -> Result<()> {
        self.gateway.exec(&["ip", "neighbour", "delete", SINK[family], "dev", "gw-out"])?;
        sleep(REST);
        Ok(())
    }

    /// Sends a packet and its answer; microseconds from one end to the same end again.
    fn ping(&self, family: usize) -> Result<Option<f64>> {
        let (pod, sink) = (&self.pods[family], &self.sinks[family]);
        let mut buffer = [0; 64];
        let began = Instant::now();
        pod.send_to(b"ping", (SINK[family].parse::<IpAddr>()?, PORT))?;
        let Some(from) = receive(sink, &mut buffer)? else { return Ok(None) };
        sink.send_to(b"pong", from)?;
        let answer = receive(pod, &mut buffer)?;
        Ok(answer.map(|_| began.elapsed().as_secs_f64() * 1e6))
    }

    /// Sends so many packets back to back; how many come through.
    fn burst(&self, family: usize, packets: usize) -> Result<usize> {
        let (pod, sink) = (&self.pods[family], &self.sinks[family]);
        let to = SocketAddr::new(SINK[family].parse()?, PORT);
        for _ in 0..packets {
            pod.send_to(b"burst", to)?;
        }
        sink.set_read_timeout(Some(QUIET))?;
        let mut kept = 0;
        while receive(sink, &mut [0; 64])?.is_some() {
            kept += 1;
        }
        sink.set_read_timeout(Some(PATIENCE))?;
        Ok(kept)
    }
}

/// Waits for a packet; `None`: none came in time.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<Option<SocketAddr>> {
    match socket.recv_from(buffer) {
        Ok((_, from)) => Ok(Some(from)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A cable with one queue and without offloads: a frame on it is what a frame on a wire would be.
fn link(one: (&Namespace, &str), other: (&Namespace, &str)) -> Result<()> {
    let queues = ["numtxqueues", "1", "numrxqueues", "1"];
    let [first, second] =
        [one, other].map(|(host, name)| [&["name", name, "netns", host.name()][..], &queues].concat());
    netns::output(&[&["ip", "link", "add"], &first[..], &["type", "veth", "peer"], &second].concat())?;
    for (host, interface) in [one, other] {
        let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
        host.exec(&[&["ethtool", "-K", interface], &off[..]].concat())?;
        host.exec(&["ip", "link", "set", interface, "up"])?;
    }
    Ok(())
}

/// One pod with a VIP of each family.
fn manifests() -> String {
    let slice = |family: &str, address: &str| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: api-{}, namespace: bench, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: {family}\nports: [{{name: http, port: 8080, protocol: TCP}}]\n\
             endpoints: [{{addresses: [\"{address}\"], conditions: {{ready: true}}}}]\n",
            family.to_lowercase()
        )
    };
    "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n---\n\
     apiVersion: v1\nkind: Service\n\
     metadata: {name: api, namespace: bench, annotations: {vipgate.io/egress: \"true\"}}\n\
     spec: {type: LoadBalancer, ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]}\n\
     status: {loadBalancer: {ingress: [{ip: 203.0.113.10}, {ip: \"2001:db8:113::10\"}]}}\n"
        .to_owned()
        + &slice("IPv4", POD[0])
        + &slice("IPv6", POD[1])
}
