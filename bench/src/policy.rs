//! What changes of policy cost: the time until they are in force on a gateway, the packets that go on meanwhile, and the
//! server that tells many gateways, and what those share. What the machine did beside is reported with each figure.

mod churn;
mod effect;
mod group;
mod noise;
mod path;
mod server;

use std::fmt::Display;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;

/// What `vipgate-bench policy` takes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// From a change at a policy server to its effect on a whole gateway; needs root
    Effect(effect::Options),
    /// Packets of open sessions while policy changes, and while it doesn't
    Path(path::Options),
    /// What many gateways that share all VIPs cost each of them: memory, and a death
    Group(group::Options),
    /// A whole policy server with many gateways
    Server(server::Options),
}

/// How large a policy is.
#[derive(Clone, Copy, Debug, Args)]
struct Size {
    /// VIPs, each with an egress policy of its own, as Services have
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=16_000))]
    vips: u32,
    /// Endpoints, each behind one of the VIPs
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    endpoints: u32,
}

/// Measures a part.
pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.part {
        Part::Effect(options) => effect::run(options),
        Part::Path(options) => path::run(options),
        Part::Group(options) => group::run(options),
        Part::Server(options) => server::run(options),
    }
}

/// Prints a result.
fn show(result: &(impl Serialize + Display), json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(result)?);
    } else {
        println!("{result}");
    }
    Ok(())
}
