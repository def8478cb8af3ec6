//! How a node forwards pods' packets, and what one round measures of it.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use rustix::process::setpriority_process;
use serde::Serialize;

use super::policy::{BenchNode, NUMBERS};
use crate::netns::{self, Namespace};
use crate::wire::kernel::find_thread;
use crate::wire::sink::Expectation;
use crate::wire::source::OfferedLoad;
use crate::wire::testbed::Testbed;
use crate::wire::trial::Trial;

/// Pods of the traffic source.
const PODS: u32 = 1024;
/// Bytes of a frame without FCS.
const FRAME: usize = 60;
/// The node's address on the underlay.
const NODE: u32 = 0xcb00_7101;
/// Offered rate of the latency measurement, in millions per second, and the share of probes that may be lost.
const PROBE_MPPS: f64 = 0.1;
const MAX_LOSS: f64 = 0.05;
/// Packets that a measurement must have forwarded.
const MIN_FORWARDED: f64 = 2000.0;
/// Nice value of the thread that forwards, and of the source.
pub(super) const HIGHEST_PRIORITY: i32 = -20;

/// What a node does with pods' packets to the outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Forwarding {
    /// Routing, without netfilter: the least that a CNI does.
    Plain,
    /// Routing with connection tracking, which every rule of kube-proxy or a NetworkPolicy brings.
    Tracked,
    /// Masquerading by nftables.
    Masquerade,
    /// A route into a VXLAN tunnel, without netfilter.
    Tunnel,
    /// What the agent programs.
    Steered,
}

impl Forwarding {
    pub(super) const ALL: [Self; 5] = [Self::Plain, Self::Tracked, Self::Masquerade, Self::Tunnel, Self::Steered];

    /// Programs the node.
    fn program(self, node: &Namespace, core: usize) -> Result<()> {
        match self {
            Self::Plain => {}
            Self::Tracked => {
                let rules = "table ip bench { chain forward { type filter hook forward priority 0; \
                             ct state invalid drop; }; }";
                node.exec(&["nft", rules])?;
            }
            Self::Masquerade => {
                let rules = "table ip bench { chain out { type nat hook postrouting priority srcnat; \
                             oifname \"gw-out\" ip saddr 10.1.4.0/22 masquerade; }; }";
                node.exec(&["nft", rules])?;
            }
            Self::Tunnel => {
                BenchNode::new(PODS).program(node, core)?;
                // Only the device and the routes are left.
                node.exec(&["nft", "delete table inet vipgate"])?;
                let table = (NUMBERS.first_table + 1).to_string();
                node.exec(&["ip", "rule", "add", "iif", "gw-in", "priority", "100", "lookup", &table])?;
            }
            Self::Steered => BenchNode::new(PODS).program(node, core)?,
        }
        Ok(())
    }

    fn expectation(self) -> Expectation {
        match self {
            Self::Plain | Self::Tracked => Expectation::untranslated(),
            Self::Masquerade => Expectation::translated_to(NODE),
            Self::Tunnel | Self::Steered => Expectation::tunnelled(),
        }
    }
}

/// Result of one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// CPU time of the forwarding core per packet of an open flow, and per first packet of a flow, in nanoseconds.
    pub(super) packet_ns: f64,
    pub(super) flow_ns: f64,
    /// Forwarded packets per second by the clock, in millions, when more are offered.
    pub(super) mpps: f64,
    /// One-way latency, in microseconds.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Share of time in which some thread waited for a core.
    pub(super) pressure: Option<f64>,
}

/// Loads of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) cores: [usize; 2],
    pub(super) flows: u32,
    pub(super) new_flows: u32,
    pub(super) duration: Duration,
}

/// Measures one round on a new testbed.
pub(super) fn measure(forwarding: Forwarding, load: Load) -> Result<Round> {
    let testbed = Testbed::build()?;
    let node = &testbed.gateway;
    // Which the tunnel device inherits.
    node.exec(&["sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=0"])?;
    forwarding.program(node, load.cores[1])?;
    // Enables NAPI, without which a veth doesn't receive frames in batches. UDP datagrams are not merged by it.
    node.exec(&["ethtool", "-K", "gw-in", "gro", "on"])?;
    let trial = Trial {
        testbed: &testbed,
        cores: load.cores,
        pid: None,
        flows: load.flows,
        bytes: FRAME,
        max_loss: MAX_LOSS,
        expectation: forwarding.expectation(),
    };
    // A core of its own, whose CPU time is the cost of forwarding alone.
    node.exec(&["sh", "-c", "echo 1 > /sys/class/net/gw-in/threaded"]).context("this needs Linux 5.12")?;
    let thread = find_thread("napi/gw-in-").context("the kernel started no NAPI thread for gw-in")?;
    netns::pin_to_core(Some(thread), load.cores[1])?;
    setpriority_process(Some(thread), HIGHEST_PRIORITY).context("cannot set the priority of a kernel thread")?;
    let forwarder = thread.as_raw_nonzero().get();
    let run = |offered: OfferedLoad| {
        let before = cpu_ns(forwarder)?;
        let result = trial.run_once(offered)?;
        let used = cpu_ns(forwarder)? - before;
        let forwarded = result.sent as f64 * (1.0 - result.loss);
        ensure!(forwarded >= MIN_FORWARDED, "only {forwarded} of {} packets were forwarded", result.sent);
        Ok::<_, anyhow::Error>((used as f64 / forwarded, result))
    };
    // As fast as the source can: with pauses, waking up for a few packets would cost more than forwarding them. What the
    // ring before the thread can't hold is lost, and costs the thread nothing.
    let open =
        OfferedLoad { mpps: None, duration: load.duration, flows: load.flows, once_per_flow: false, bytes: FRAME };
    let (flow_ns, _) = run(OfferedLoad { flows: load.new_flows, once_per_flow: true, ..open })?;
    let (packet_ns, forwarded) = run(open)?;

    node.exec(&["sh", "-c", "echo 0 > /sys/class/net/gw-in/threaded"])?;
    let probes = trial.run_once(OfferedLoad { mpps: Some(PROBE_MPPS), ..open })?;
    ensure!(probes.loss <= MAX_LOSS, "{:.0} % of the probes are lost", probes.loss * 100.0);
    let micros = |quantile| probes.latency.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Round {
        packet_ns,
        flow_ns,
        mpps: forwarded.mpps,
        p50_us: micros(0.5),
        p99_us: micros(0.99),
        pressure: forwarded.cpu.pressure,
    })
}

/// CPU time of a thread (`sum_exec_runtime`), in nanoseconds.
fn cpu_ns(thread: i32) -> Result<u64> {
    let path = format!("/proc/{thread}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    text.split(' ').next().and_then(|word| word.parse().ok()).with_context(|| format!("cannot parse {path}"))
}
