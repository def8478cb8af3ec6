//! Wire benchmark: throughput, loss and latency of gateways over veth, vipgate against others (RFC 2544).
//!
//! Each round builds a new testbed, starts a system under test, opens all flows, searches the peak rate within the loss
//! tolerance, and measures at the peak and, for latency, at half of it. Rounds of the systems alternate, so that other
//! load on the machine affects all of them; medians are reported.
//!
//! The source runs on one core, the gateway on another. The kernel's receive path runs in the source's context, as on
//! any veth, for AF_XDP too; the sink is a BPF program that runs in the gateway's transmit context.

pub(crate) mod config;
mod kernel;
mod load_series;
mod ovs;
mod report;
pub(crate) mod restart;
mod sink;
mod source;
pub(crate) mod system_under_test;
mod tcp;
pub(crate) mod testbed;
mod trial;
pub(crate) mod vipgate;
mod xdp;

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::maps::{Map, MapError};
use clap::Args;
use config::{Placement, SutConfig};
use report::{Case, Report, RoundResult, median, set_ratios};
use sink::Expectation;
use trial::{STEP_DURATION, Trial};
use xdp::Forwarder;

use crate::machine::clean_up_on_signals;
use crate::wire::system_under_test::{RunningSut, SystemUnderTest};
use crate::wire::testbed::Testbed;

/// Bytes of the FCS, which frame sizes include and veths don't carry.
const FCS: u16 = 4;

/// Options of `vipgate-bench wire`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Systems to compare vipgate with
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [SystemUnderTest::Nft])]
    against: Vec<SystemUnderTest>,
    /// Number of flows; a comma-separated list is measured one by one
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1000],
        value_parser = clap::value_parser!(u32).range(1..=1_048_576)
    )]
    flows: Vec<u32>,
    /// Frame size in bytes including FCS
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [64],
        value_parser = clap::value_parser!(u16).range(64..=1518)
    )]
    size: Vec<u16>,
    /// Measure these offered loads instead of searching the peak rate: millions of packets per second
    #[arg(long, value_delimiter = ',', num_args = 1, conflicts_with_all = ["overload", "tcp"])]
    loads: Vec<f64>,
    /// Measure goodput and retransmissions of TCP connections (iperf3) instead
    #[arg(long, conflicts_with_all = ["flows", "size", "overload", "loss"])]
    tcp: bool,
    #[command(flatten)]
    connections: tcp::Options,
    /// Rounds of each system; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds per measurement; trials of the search are shorter
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=10))]
    seconds: u64,
    /// Also measure at twice the peak rate
    #[arg(long)]
    overload: bool,
    /// Loss tolerance at the peak, as a share of packets
    #[arg(long, default_value_t = 0.01)]
    loss: f64,
    /// Where the kernel forwards when nft, xdp or plain is measured
    #[arg(long, value_enum, default_value_t = Placement::Source)]
    nft_core: Placement,
    #[command(flatten)]
    machine: HostOptions,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// Options for benchmarks of gateway processes.
#[derive(Debug, Args)]
pub(crate) struct HostOptions {
    /// Cores of source and gateway
    #[arg(long, value_delimiter = ',', num_args = 1, default_values_t = [0, 1])]
    cores: Vec<usize>,
    /// The gateway binary; default: `vipgate` in the directory of this program
    #[arg(long)]
    gateway: Option<PathBuf>,
}

impl HostOptions {
    /// The cores of source and gateway.
    pub(crate) fn cores(&self) -> Result<[usize; 2]> {
        let cores =
            <[usize; 2]>::try_from(self.cores.as_slice()).ok().context("--cores needs two: for source and gateway")?;
        ensure!(cores[0] != cores[1], "--cores must differ: source and gateway would compete for one core");
        Ok(cores)
    }

    /// Path of the gateway binary.
    pub(crate) fn gateway_binary(&self) -> Result<PathBuf> {
        binary_path(self.gateway.as_deref(), "--gateway")
    }
}

/// Path of the `vipgate` binary: the value of an option, by default `vipgate` in the directory of this program.
pub(crate) fn binary_path(configured: Option<&Path>, option: &str) -> Result<PathBuf> {
    let own_path = || env::current_exe().with_context(|| format!("cannot find vipgate; use {option} PATH"));
    let path = match configured {
        Some(path) => path.to_owned(),
        None => own_path()?.with_file_name("vipgate"),
    };
    ensure!(path.exists(), "{} does not exist: build it (`make build`), or use {option} PATH", path.display());
    Ok(path.canonicalize().unwrap_or(path))
}

/// Measures each frame size with each number of flows, or TCP.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    ensure!((0.0..1.0).contains(&options.loss), "--loss must be at least 0 and less than 1");
    ensure!(options.loads.iter().all(|load| *load > 0.0), "--loads must be above 0");
    let gateway = options.machine.gateway_binary()?;
    let config = SutConfig { placement: options.nft_core, ..SutConfig::on_core(gateway, cores[1]) };
    let mut systems = vec![SystemUnderTest::Vipgate];
    systems.extend(&options.against);
    clean_up_on_signals()?;
    for system in &systems {
        system.check(&options.flows)?;
    }
    if options.tcp {
        return tcp::run(&options.connections, &tcp::Run::new(options, systems, config, cores));
    }
    for &size in &options.size {
        for &flows in &options.flows {
            let bench = Bench { options, config: &config, cores, flows, size };
            if options.loads.is_empty() { bench.compare_peaks(&systems)? } else { load_series::run(&bench, &systems)? }
        }
    }
    Ok(())
}

/// A comparison of systems with one frame size and one number of flows.
struct Bench<'a> {
    options: &'a Options,
    config: &'a SutConfig,
    /// Of source and gateway.
    cores: [usize; 2],
    flows: u32,
    /// With FCS.
    size: u16,
}

impl Bench<'_> {
    /// Measures the peak rates in alternating rounds, and prints a report per system.
    fn compare_peaks(&self, systems: &[SystemUnderTest]) -> Result<()> {
        let mut rounds: Vec<Vec<RoundResult>> = systems.iter().map(|_| Vec::new()).collect();
        let mut controls = Vec::new();
        for _ in 0..self.options.rounds {
            controls.push(self.measure_source()?);
            for (&system, rounds) in systems.iter().zip(&mut rounds) {
                rounds.push(self.in_context(system, self.measure_peak(system))?);
            }
        }
        let case = self.case(controls);
        let report = |(&system, rounds): (_, &Vec<_>)| Report::new(system, case, rounds);
        let mut reports: Vec<Report> = systems.iter().zip(&rounds).filter_map(report).collect();
        set_ratios(&mut reports);
        for report in reports {
            println!("{}", serde_json::to_string(&report)?);
            if let Some(warning) = report.warning() {
                eprintln!("vipgate-bench: {warning}");
            }
        }
        Ok(())
    }

    /// Searches the peak rate, and measures at it, at half of it and at twice of it.
    fn measure_peak(&self, system: SystemUnderTest) -> Result<RoundResult> {
        let testbed = Testbed::build()?;
        let running = system.start(&testbed, self.config, self.flows)?;
        let trial = self.trial(&testbed, system, &running);
        trial.open_all_flows()?;
        let duration = self.duration();
        let rate = trial.search_peak()?;
        let peak = trial.run_undisturbed(rate, duration)?;
        let half = trial.run_undisturbed(Some(peak.mpps / 2.0), duration)?;
        let twice = Some(peak.mpps * 2.0);
        let overload = self.options.overload.then(|| trial.run_undisturbed(twice, duration)).transpose()?;
        Ok(RoundResult { peak, half, overload })
    }

    /// The source's maximum rate, in millions per second, into a veth that drops everything.
    fn measure_source(&self) -> Result<f64> {
        let testbed = Testbed::build()?;
        let _programs = Forwarder::drop_all(&testbed, self.cores[1])?;
        let trial = Trial { pid: None, expectation: Expectation::untranslated(), ..self.trial_on(&testbed) };
        Ok(trial.run_undisturbed(None, STEP_DURATION)?.offered_mpps)
    }

    fn trial<'b>(&self, testbed: &'b Testbed, system: SystemUnderTest, running: &RunningSut) -> Trial<'b> {
        Trial { pid: running.pid(), expectation: system.expectation(), ..self.trial_on(testbed) }
    }

    fn trial_on<'b>(&self, testbed: &'b Testbed) -> Trial<'b> {
        Trial {
            testbed,
            cores: self.cores,
            pid: None,
            flows: self.flows,
            bytes: usize::from(self.size - FCS),
            max_loss: self.options.loss,
            expectation: Expectation::untranslated(),
        }
    }

    fn case(&self, controls: Vec<f64>) -> Case {
        let control_mpps = median(controls).unwrap_or(f64::NAN);
        Case { size: self.size, flows: self.flows, placement: self.options.nft_core, control_mpps }
    }

    fn duration(&self) -> Duration {
        Duration::from_secs(self.options.seconds)
    }

    fn in_context<T>(&self, system: SystemUnderTest, result: Result<T>) -> Result<T> {
        result.with_context(|| format!("{system:?}, {} flows, size {}", self.flows, self.size))
    }
}

/// Takes a BPF map of a loaded program.
fn take_map<T: TryFrom<Map, Error = MapError>>(object: &mut Ebpf, name: &str) -> Result<T> {
    let map = object.take_map(name).with_context(|| format!("the BPF program has no map {name}"))?;
    T::try_from(map).with_context(|| format!("BPF map {name} has another type"))
}
