//! Configuration of the systems under test.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;

/// Core on which the kernel forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Placement {
    /// The source's core, in its context, as veth does by default; the fastest here
    Source,
    /// The gateway's core, in a kernel thread (threaded NAPI)
    Gateway,
}

/// Configuration of the systems under test.
#[derive(Clone, Debug)]
pub(crate) struct SutConfig {
    /// Path of the vipgate binary.
    pub(crate) gateway: PathBuf,
    /// The gateway's cores: those of its workers, and of as many queues of each interface.
    pub(crate) cores: Vec<usize>,
    /// Where the kernel forwards.
    pub(crate) placement: Placement,
    /// Whether the kernel merges received segments (GRO), as it does on physical interfaces.
    pub(crate) gro: bool,
}

impl SutConfig {
    /// A gateway with one worker on this core.
    pub(crate) fn on_core(gateway: PathBuf, core: usize) -> Self {
        Self { gateway, cores: vec![core], placement: Placement::Source, gro: true }
    }
}
