//! Neighbor resolution benchmark: latency of the first packet to an unresolved next hop, and how many packets of a
//! burst are queued until resolution.
//!
//! ```text
//!   [source] eth0 ---- gw-in [gateway] gw-out ---- eth0 [sink]
//! ```
//! Before each trial the gateway's neighbor entry of the sink is deleted. The sink is a Linux host, which replies to
//! ARP and neighbor discovery at once, so the difference is the gateway's: round-trip time of a UDP ping without the
//! entry, and of one with it.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;
use serde::Serialize;
use tempfile::TempDir;

use crate::failover::quantile;
use crate::netns::{self, Namespace};
use crate::path::{median, round2};
use crate::process::Process;
use crate::wire::HostOptions;
use crate::wire::system_under_test::{SutConfig, SystemUnderTest};
use crate::wire::vipgate::{PolicySource, Vipgate};

/// Packets per burst.
const BURSTS: [usize; 2] = [64, 400];
/// Pause after a deletion; longer than the gateway's interval between resolution requests for one next hop.
const PAUSE: Duration = Duration::from_millis(150);
/// A ping without a reply for this long is lost.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// A burst is complete when no packet has arrived for this long.
const BURST_TIMEOUT: Duration = Duration::from_millis(200);
const PORT: u16 = 7;
const POD: [&str; 2] = ["10.1.4.1", "fd00:1::4:1"];
const SINK: [&str; 2] = ["203.0.113.254", "2001:db8:113::fe"];

/// Options of `vipgate-testbed neighbor`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Pings to an unresolved next hop, per system under test and address family
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// Bursts of each length; the median is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    bursts: u32,
    #[command(flatten)]
    machine: HostOptions,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// The result, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    subject: SystemUnderTest,
    family: &'static str,
    trials: u32,
    /// Round-trip time of the first ping to an unresolved next hop, and of a ping to a resolved one.
    first_p50_us: f64,
    first_p99_us: f64,
    first_worst_us: f64,
    #[serde(rename = "known_p50_us")]
    resolved_p50_us: f64,
    #[serde(rename = "known_p99_us")]
    resolved_p99_us: f64,
    /// First pings without a reply within a second.
    lost: usize,
    /// Packets of a burst to an unresolved next hop that were forwarded.
    #[serde(rename = "kept_of_64")]
    forwarded_of_64: f64,
    #[serde(rename = "kept_of_400")]
    forwarded_of_400: f64,
}

/// Measures both systems under test, with both address families.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let config = SutConfig::on_core(options.machine.gateway_binary()?, cores[1]);
    netns::prepare()?;
    netns::run_command(&["nft", "--version"]).context("nft is needed: install nftables")?;
    for subject in [SystemUnderTest::Vipgate, SystemUnderTest::Nft] {
        let testbed = Testbed::start(subject, &config, cores[0])?;
        for (family, name) in ["ipv4", "ipv6"].into_iter().enumerate() {
            let report = testbed.measure(options, subject, family, name);
            println!("{}", serde_json::to_string(&report.with_context(|| format!("{subject:?}, {name}"))?)?);
        }
    }
    Ok(())
}

/// A running system under test, and sockets of the hosts on both sides, IPv4 first.
struct Testbed {
    /// Dropped before the namespaces.
    _process: Option<Process>,
    gateway: Namespace,
    pods: [UdpSocket; 2],
    sinks: [UdpSocket; 2],
    _hosts: [Namespace; 2],
    _directory: TempDir,
}

impl Testbed {
    fn start(subject: SystemUnderTest, config: &SutConfig, core: usize) -> Result<Self> {
        let [source, gateway, sink] =
            [Namespace::create("source")?, Namespace::create("gateway")?, Namespace::create("sink")?];
        for host in [&source, &gateway, &sink] {
            let v6 = "net.ipv6.conf.default";
            host.exec(&["sysctl", "-q", "-w", &format!("{v6}.disable_ipv6=0"), &format!("{v6}.accept_dad=0")])?;
        }
        add_veth_pair((&source, "eth0"), (&gateway, "gw-in"))?;
        add_veth_pair((&gateway, "gw-out"), (&sink, "eth0"))?;
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
        let directory =
            TempDir::with_prefix(netns::run_name("")).context("cannot create a directory for the configuration")?;
        let process = match subject {
            SystemUnderTest::Vipgate => {
                let vipgate = Vipgate::configure(config, 65_536, None, &PolicySource::File, directory.path())?;
                fs::write(directory.path().join("policy.yaml"), manifests())?;
                Some(Process::from(vipgate.start(&gateway)?))
            }
            SystemUnderTest::Ovs | SystemUnderTest::Xdp | SystemUnderTest::Plain => {
                bail!("only vipgate and nft resolve neighbors and translate")
            }
            SystemUnderTest::Nft => {
                let rules = "table inet testbed { chain out { type nat hook postrouting priority srcnat; \
                             oifname \"gw-out\" masquerade; }; }";
                gateway.exec(&["nft", rules])?;
                None
            }
        };
        let open = |host: &Namespace, address: IpAddr, port| -> Result<UdpSocket> {
            host.run(core, || {
                let socket = UdpSocket::bind((address, port)).with_context(|| format!("cannot bind to {address}"))?;
                socket.set_read_timeout(Some(PING_TIMEOUT))?;
                // Capacity for a whole burst.
                setsockopt(&socket, RcvBufForce, &(4 << 20))?;
                Ok(socket)
            })
        };
        let pods = [open(&source, POD[0].parse()?, 0)?, open(&source, POD[1].parse()?, 0)?];
        let sinks = [open(&sink, SINK[0].parse()?, PORT)?, open(&sink, SINK[1].parse()?, PORT)?];
        Ok(Self { _process: process, gateway, pods, sinks, _hosts: [source, sink], _directory: directory })
    }

    fn measure(
        &self,
        options: &Options,
        subject: SystemUnderTest,
        family: usize,
        name: &'static str,
    ) -> Result<Report> {
        // The hosts resolve their own next hops first.
        for _ in 0..3 {
            self.ping(family)?;
        }
        ensure!(self.ping(family)?.is_some(), "no packet is forwarded");
        let (mut first, mut resolved) = (Vec::new(), Vec::new());
        for _ in 0..options.trials {
            self.delete_neighbor(family)?;
            first.push(self.ping(family)?);
            sleep(PAUSE);
            resolved.extend(self.ping(family)?);
        }
        let lost = first.iter().filter(|round_trip| round_trip.is_none()).count();
        let first: Vec<f64> = first.into_iter().flatten().collect();
        let mut forwarded = BURSTS.map(|_| Vec::new());
        for _ in 0..options.bursts {
            for (forwarded, packets) in forwarded.iter_mut().zip(BURSTS) {
                self.delete_neighbor(family)?;
                forwarded.push(self.send_burst(family, packets)? as f64);
            }
        }
        let [forwarded_of_64, forwarded_of_400] = forwarded.map(median);
        Ok(Report {
            benchmark: "neighbor",
            subject,
            family: name,
            trials: options.trials,
            first_p50_us: round2(quantile(&first, 50)),
            first_p99_us: round2(quantile(&first, 99)),
            first_worst_us: round2(quantile(&first, 100)),
            resolved_p50_us: round2(quantile(&resolved, 50)),
            resolved_p99_us: round2(quantile(&resolved, 99)),
            lost,
            forwarded_of_64,
            forwarded_of_400,
        })
    }

    /// Deletes the gateway's neighbor entry of the sink.
    fn delete_neighbor(&self, family: usize) -> Result<()> {
        self.gateway.exec(&["ip", "neighbour", "delete", SINK[family], "dev", "gw-out"])?;
        sleep(PAUSE);
        Ok(())
    }

    /// Sends a packet and its reply; returns the round-trip time in microseconds.
    fn ping(&self, family: usize) -> Result<Option<f64>> {
        let (pod, sink) = (&self.pods[family], &self.sinks[family]);
        let mut buffer = [0; 64];
        let start = Instant::now();
        pod.send_to(b"ping", (SINK[family].parse::<IpAddr>()?, PORT))?;
        let Some(source) = receive(sink, &mut buffer)? else { return Ok(None) };
        sink.send_to(b"pong", source)?;
        let reply = receive(pod, &mut buffer)?;
        Ok(reply.map(|_| start.elapsed().as_secs_f64() * 1e6))
    }

    /// Sends packets back to back; returns how many were forwarded.
    fn send_burst(&self, family: usize, packets: usize) -> Result<usize> {
        let (pod, sink) = (&self.pods[family], &self.sinks[family]);
        let destination = SocketAddr::new(SINK[family].parse()?, PORT);
        for _ in 0..packets {
            pod.send_to(b"burst", destination)?;
        }
        sink.set_read_timeout(Some(BURST_TIMEOUT))?;
        let mut forwarded = 0;
        while receive(sink, &mut [0; 64])?.is_some() {
            forwarded += 1;
        }
        sink.set_read_timeout(Some(PING_TIMEOUT))?;
        Ok(forwarded)
    }
}

/// Receives a packet; `None` after the timeout.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<Option<SocketAddr>> {
    match socket.recv_from(buffer) {
        Ok((_, source)) => Ok(Some(source)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Adds a veth pair with one queue and without offloads, so that each frame is sent as on a physical link.
fn add_veth_pair(first: (&Namespace, &str), second: (&Namespace, &str)) -> Result<()> {
    let queues = ["numtxqueues", "1", "numrxqueues", "1"];
    let [first_device, second_device] =
        [first, second].map(|(host, name)| [&["name", name, "netns", host.name()][..], &queues].concat());
    netns::run_command(
        &[&["ip", "link", "add"], &first_device[..], &["type", "veth", "peer"], &second_device].concat(),
    )?;
    for (host, interface) in [first, second] {
        let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
        host.exec(&[&["ethtool", "-K", interface], &off[..]].concat())?;
        host.exec(&["ip", "link", "set", interface, "up"])?;
    }
    Ok(())
}

/// Manifests of one pod with an IPv4 and an IPv6 VIP.
fn manifests() -> String {
    let slice = |family: &str, address: &str| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: api-{}, namespace: testbed, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: {family}\nports: [{{name: http, port: 8080, protocol: TCP}}]\n\
             endpoints: [{{addresses: [\"{address}\"], conditions: {{ready: true}}}}]\n",
            family.to_lowercase()
        )
    };
    "apiVersion: v1\nkind: Namespace\nmetadata: {name: testbed}\n---\n\
     apiVersion: v1\nkind: Service\n\
     metadata: {name: api, namespace: testbed, annotations: {vipgate.io/egress: \"true\"}}\n\
     spec: {type: LoadBalancer, ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]}\n\
     status: {loadBalancer: {ingress: [{ip: 203.0.113.10}, {ip: \"2001:db8:113::10\"}]}}\n"
        .to_owned()
        + &slice("IPv4", POD[0])
        + &slice("IPv6", POD[1])
}
