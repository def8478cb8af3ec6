//! Whole gateways between two cables: packets of pods go in at one side, and what comes out at the other is counted.
//!
//! Each round builds the network anew, starts a subject in it, opens all flows, searches the highest rate of which nearly
//! everything comes through, and measures there and, for delays, at half of it. Rounds of the subjects alternate, so that
//! what else the machine does meets all of them; medians are reported.
//!
//! The source runs on one core, the gateway on another. The kernel's half of receiving happens in the source's context,
//! as it does on any veth, for AF_XDP too; the sink is a program that runs where the gateway sends.

pub(crate) mod ground;
mod report;
pub(crate) mod restart;
mod sink;
mod source;
pub(crate) mod subject;
mod trial;
pub(crate) mod vipgate;

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::maps::{Map, MapError};
use clap::Args;

use ground::Ground;
use report::{Line, Round, compare};
use subject::{Placement, Setting, Subject};
use trial::Bench;

use crate::netns;

/// A frame's checksum, which sizes count and veths don't carry.
const CHECKSUM: u16 = 4;

/// What `vipgate-bench wire` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What to measure beside vipgate
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Subject::Nft])]
    against: Vec<Subject>,
    /// Flows that packets belong to; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1000], value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    flows: Vec<u32>,
    /// Bytes of a frame with its checksum
    #[arg(long, value_delimiter = ',', default_values_t = [64], value_parser = clap::value_parser!(u16).range(64..=1518))]
    size: Vec<u16>,
    /// Rounds of each subject; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each measurement; those of the search are shorter
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=10))]
    seconds: u64,
    /// Also offer twice the peak, and say what is left of it
    #[arg(long)]
    overload: bool,
    /// Share of packets that may be lost at the peak
    #[arg(long, default_value_t = 0.01)]
    loss: f64,
    /// Where the kernel forwards when nft is measured
    #[arg(long, value_enum, default_value_t = Placement::Source)]
    nft_core: Placement,
    #[command(flatten)]
    machine: Machine,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// What whole gateways are measured with.
#[derive(Debug, Args)]
pub(crate) struct Machine {
    /// Cores of source and gateway
    #[arg(long, value_delimiter = ',', num_args = 1, default_values_t = [0, 1])]
    cores: Vec<usize>,
    /// The gateway's program; default: `vipgate` beside this one
    #[arg(long)]
    gateway: Option<PathBuf>,
}

impl Machine {
    /// The cores of source and gateway.
    pub(crate) fn cores(&self) -> Result<[usize; 2]> {
        let cores =
            <[usize; 2]>::try_from(self.cores.as_slice()).ok().context("--cores takes two: of source and gateway")?;
        ensure!(cores[0] != cores[1], "--cores: on one core, source and gateway would measure the scheduler");
        Ok(cores)
    }

    /// The gateway's program.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        program(self.gateway.as_deref(), "--gateway")
    }
}

/// The program that an option names; without it, `vipgate` beside this one.
pub(crate) fn program(named: Option<&Path>, option: &str) -> Result<PathBuf> {
    let beside = || env::current_exe().with_context(|| format!("cannot find vipgate; say {option} PATH"));
    let path = match named {
        Some(path) => path.to_owned(),
        None => beside()?.with_file_name("vipgate"),
    };
    ensure!(path.exists(), "there is no {}: build it (`make build`), or say {option} PATH", path.display());
    Ok(path.canonicalize().unwrap_or(path))
}

/// Measures each size with each number of flows.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    ensure!((0.0..1.0).contains(&options.loss), "--loss is a share: at least 0, less than 1");
    let gateway = options.machine.program()?;
    let setting = Setting { gateway, core: cores[1], placement: options.nft_core };
    let mut subjects = vec![Subject::Vipgate];
    subjects.extend(&options.against);
    netns::prepare()?;
    for subject in &subjects {
        subject.check(&options.flows)?;
    }
    for &size in &options.size {
        for &flows in &options.flows {
            let mut rounds: Vec<Vec<Round>> = subjects.iter().map(|_| Vec::new()).collect();
            for _ in 0..options.rounds {
                for (&subject, rounds) in subjects.iter().zip(&mut rounds) {
                    let round = measure(options, &setting, cores, subject, flows, size);
                    rounds.push(round.with_context(|| format!("{subject:?}, {flows} flows, size {size}"))?);
                }
            }
            let line = |(&subject, rounds): (_, &Vec<_>)| Line::new(subject, options.nft_core, size, flows, rounds);
            let mut lines: Vec<Line> = subjects.iter().zip(&rounds).filter_map(line).collect();
            compare(&mut lines);
            for line in lines {
                println!("{}", serde_json::to_string(&line)?);
                if let Some(warning) = line.warning() {
                    eprintln!("vipgate-bench: {warning}");
                }
            }
        }
    }
    Ok(())
}

fn measure(
    options: &Options,
    setting: &Setting,
    cores: [usize; 2],
    subject: Subject,
    flows: u32,
    size: u16,
) -> Result<Round> {
    let ground = Ground::build()?;
    let running = subject.start(&ground, setting, flows)?;
    let bytes = usize::from(size - CHECKSUM);
    let bench = Bench { ground: &ground, cores, process: running.process(), flows, bytes, tolerated: options.loss };
    bench.open_flows()?;
    let duration = Duration::from_secs(options.seconds);
    let rate = bench.search()?;
    let peak = bench.run(rate, duration)?;
    let half = bench.run(Some(peak.mpps / 2.0), duration)?;
    let overload = options.overload.then(|| bench.run(Some(peak.mpps * 2.0), duration)).transpose()?;
    Ok(Round { peak, half, overload })
}

/// A table of a loaded program.
fn take<T: TryFrom<Map, Error = MapError>>(object: &mut Ebpf, name: &str) -> Result<T> {
    let map = object.take_map(name).with_context(|| format!("a program has no table {name}"))?;
    T::try_from(map).with_context(|| format!("table {name} is of another kind"))
}
