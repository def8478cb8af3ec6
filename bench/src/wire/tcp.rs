//! TCP through gateways: goodput and retransmissions of iperf3 between the kernels of a pod and of a remote host.
//!
//! Rounds of the systems alternate, as those of the wire benchmark do; each round builds a new testbed. The control is the
//! kernel's forwarding without SNAT. Client, server and gateway share the cores.

mod iperf;
mod losses;
mod report;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use iperf::Goodput;
use report::{Measurement, Setting, print_reports};
use serde::Serialize;
use vipgate_lab::LinkConfig;

use crate::wire::Options as WireOptions;
use crate::wire::config::SutConfig;
use crate::wire::system_under_test::{RunningSut, SystemUnderTest};
use crate::wire::testbed::Testbed;

/// Options of `vipgate-bench wire --tcp`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// With --tcp: parallel connections; a comma-separated list is measured one by one
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 8],
        value_parser = clap::value_parser!(u32).range(1..=128),
        requires = "tcp"
    )]
    streams: Vec<u32>,
    /// With --tcp: MTU of all interfaces
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1500, 9000],
        value_parser = clap::value_parser!(u16).range(576..=9000),
        requires = "tcp"
    )]
    mtu: Vec<u16>,
    /// With --tcp: direction of the data, seen from the pod
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values_t = [DataDirection::Upload, DataDirection::Download],
        requires = "tcp"
    )]
    transfer: Vec<DataDirection>,
    /// With --tcp: offloads of all interfaces: `on` leaves the defaults of veth
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Offloads::Off], requires = "tcp")]
    offloads: Vec<Offloads>,
    /// With --tcp: whether the kernel merges received segments (GRO) where it is the gateway
    #[arg(long, value_enum, default_value_t = Merging::On, requires = "tcp")]
    gro: Merging,
    /// With --tcp: workers of vipgate, polling threads of OVS, and queues of each interface
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2), requires = "tcp")]
    workers: u32,
}

/// Direction of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum DataDirection {
    /// The pod sends.
    Upload,
    /// The pod receives.
    Download,
}

/// Offloads of the interfaces: partial checksums, and segments larger than the MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Offloads {
    /// Each frame is complete, as on a physical link.
    Off,
    /// The defaults of veth.
    On,
}

/// GRO of the kernel's gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Merging {
    /// Each segment is forwarded alone, as through AF_XDP.
    Off,
    /// Segments are merged, as on a physical interface.
    On,
}

/// What is measured in each round.
#[derive(Debug)]
pub(super) struct Run {
    systems: Vec<SystemUnderTest>,
    config: SutConfig,
    /// All cores, the gateway's last.
    cores: [usize; 2],
    rounds: u32,
    duration: Duration,
}

impl Run {
    pub(super) fn new(
        options: &WireOptions,
        mut systems: Vec<SystemUnderTest>,
        config: SutConfig,
        cores: [usize; 2],
    ) -> Self {
        // The control.
        if !systems.contains(&SystemUnderTest::Plain) {
            systems.push(SystemUnderTest::Plain);
        }
        Self { systems, config, cores, rounds: options.rounds, duration: Duration::from_secs(options.seconds) }
    }
}

/// Measures each MTU with offloads on and off.
pub(super) fn run(options: &Options, run: &Run) -> Result<()> {
    vipgate_lab::run(&["iperf3", "--version"]).context("iperf3 is needed: `make deps` installs it")?;
    let workers = options.workers as usize;
    ensure!(workers <= run.cores.len(), "--workers needs as many --cores");
    let cores = run.cores[run.cores.len() - workers..].to_vec();
    let config = SutConfig { cores, gro: options.gro == Merging::On, ..run.config.clone() };
    for &mtu in &options.mtu {
        for &offloads in &options.offloads {
            let setting = Setting { mtu, offloads, gro: options.gro, workers: options.workers };
            let mut measurements = Vec::new();
            for round in 0..run.rounds {
                for &system in &run.systems {
                    measurements.extend(measure_round(options, run, &config, setting, round, system));
                }
            }
            print_reports(&run.systems, setting, &measurements)?;
        }
    }
    Ok(())
}

/// One round of a system: a new testbed, and all numbers of connections in all directions. What fails is part of the result.
fn measure_round(
    options: &Options,
    run: &Run,
    config: &SutConfig,
    setting: Setting,
    round: u32,
    system: SystemUnderTest,
) -> Vec<Measurement> {
    let cases = options.streams.iter().flat_map(|&streams| options.transfer.iter().map(move |&it| (streams, it)));
    let measurement = |(streams, direction), result: Result<Goodput, String>| Measurement {
        round,
        system,
        streams,
        direction,
        result,
    };
    let running = start(config, setting, system);
    let (testbed, running) = match &running {
        Ok((running, testbed)) => (testbed, running),
        Err(error) => return cases.map(|case| measurement(case, Err(last_line(error)))).collect(),
    };
    let transfer = |(streams, direction)| {
        let counters = || running.vipgate().map(report::counters).unwrap_or_default();
        let (before, lost_before) = (counters(), losses::lost(testbed));
        let goodput = iperf::run(testbed, streams, direction, run.duration);
        let mut goodput = goodput.map_err(|error| last_line(&error))?;
        goodput.lost = losses::increase(&lost_before, losses::lost(testbed));
        goodput.counters = losses::increase(&before, counters());
        Ok(goodput)
    };
    cases.map(|case| measurement(case, transfer(case))).collect()
}

/// What an error ends with: its cause, after a program's log.
fn last_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default().to_owned()
}

/// The system is dropped before its testbed.
type Running = (RunningSut, Testbed);

/// Builds a testbed with hosts and starts the system.
fn start(config: &SutConfig, setting: Setting, system: SystemUnderTest) -> Result<Running> {
    let links = LinkConfig {
        queues: config.cores.len() as u32,
        mtu: setting.mtu,
        offloads: setting.offloads == Offloads::On,
        ..LinkConfig::default()
    };
    let testbed = Testbed::with_links(links)?;
    testbed.add_hosts()?;
    let running = system.start(&testbed, config, 1)?;
    Ok((running, testbed))
}
