//! Policy benchmarks: time until a change is in force, cost of large gateway groups, and a policy server with many
//! gateways. Each result includes the load of other programs on the machine.

mod churn;
mod effect;
mod group;
mod manifests;
mod noise;
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
    /// Cost per gateway of a large group that shares all VIPs: memory, and membership changes
    Group(group::Options),
    /// A policy server with many gateways
    Server(server::Options),
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
        Command::Group(options) => group::run(options),
        Command::Server(options) => server::run(options),
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
