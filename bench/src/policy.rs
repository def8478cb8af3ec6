//! Policy benchmarks: time until a change is in force, impact of changes on the packet path, cost of large gateway
//! groups, and a policy server with many gateways. Each result includes the load of other programs on the machine.

mod change;
mod churn;
mod effect;
mod group;
mod kubernetes;
mod manifests;
mod noise;
mod path;
mod server;

use std::fmt::Display;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;

/// Options of `vipgate-bench policy`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Time from a change at the policy server to its effect on a gateway; needs root
    Effect(effect::Options),
    /// Packet path under policy changes, compared to constant policy
    Path(path::Options),
    /// Cost per gateway of a large group that shares all VIPs: memory, and membership changes
    Group(group::Options),
    /// A policy server with many gateways
    Server(server::Options),
    /// A changed manifest file at the policy server, stage by stage, up to the responses of all gateways
    Change(change::Options),
    /// A policy server that reads a real Kubernetes API server, with one gateway; needs root
    Kubernetes(kubernetes::Options),
}

/// Policy size.
#[derive(Clone, Copy, Debug, Args)]
struct PolicySize {
    /// VIPs, each with its own egress policy, as for Services
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=16_000))]
    vips: u32,
    /// Endpoints, each with one of the VIPs
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    endpoints: u32,
}

/// Runs one of the benchmarks.
pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.command {
        Command::Effect(options) => effect::run(options),
        Command::Path(options) => path::run(options),
        Command::Group(options) => group::run(options),
        Command::Server(options) => server::run(options),
        Command::Change(options) => change::run(options),
        Command::Kubernetes(options) => kubernetes::run(options),
    }
}

/// Prints a result.
fn print_result(result: &(impl Serialize + Display), json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(result)?);
    } else {
        println!("{result}");
    }
    Ok(())
}
