//! Systems under test: gateways between the source and the sink, started anew for each round.

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;
use tempfile::TempDir;
use vipgate_lab::Process;

use super::config::SutConfig;
use super::kernel;
use super::ovs::OpenVswitch;
use super::sink::Expectation;
use super::vipgate::{PolicySource, Vipgate};
use super::xdp::Forwarder;
use crate::packets::VIP;
use crate::wire::testbed::Testbed;

/// A system under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SystemUnderTest {
    /// vipgate.
    #[value(skip)]
    Vipgate,
    /// Kernel forwarding with SNAT by nftables
    Nft,
    /// Open vSwitch in userspace: AF_XDP ports, SNAT by its own connection tracking
    Ovs,
    /// A stateless forwarder in XDP, which rewrites addresses only: what veths can carry
    Xdp,
    /// Kernel forwarding without SNAT
    Plain,
}

/// A running system under test; stopped on drop.
#[derive(Debug)]
pub(super) struct RunningSut {
    forwarding: Forwarding,
    _directory: TempDir,
}

/// What forwards.
#[derive(Debug)]
enum Forwarding {
    Vipgate(Process, Vipgate),
    Ovs(OpenVswitch),
    Kernel,
    Xdp { _programs: Forwarder },
}

impl RunningSut {
    /// Process ID of the gateway; `None` for the kernel.
    pub(super) fn pid(&self) -> Option<u32> {
        match &self.forwarding {
            Forwarding::Vipgate(process, _) => Some(process.id()),
            Forwarding::Ovs(switch) => Some(switch.pid()),
            Forwarding::Kernel | Forwarding::Xdp { .. } => None,
        }
    }

    /// vipgate's command line, if it is the system under test.
    pub(super) fn vipgate(&self) -> Option<&Vipgate> {
        match &self.forwarding {
            Forwarding::Vipgate(_, vipgate) => Some(vipgate),
            Forwarding::Ovs(_) | Forwarding::Kernel | Forwarding::Xdp { .. } => None,
        }
    }
}

impl SystemUnderTest {
    /// Checks that the system is available on this machine.
    pub(super) fn check(self, flows: &[u32]) -> Result<()> {
        match self {
            Self::Vipgate | Self::Xdp | Self::Plain => Ok(()),
            Self::Nft => kernel::check_nft(flows),
            Self::Ovs => OpenVswitch::check(),
        }
    }

    /// Starts the system and waits until it forwards.
    pub(super) fn start(self, testbed: &Testbed, config: &SutConfig, flows: u32) -> Result<RunningSut> {
        let directory = vipgate_lab::directory().context("cannot create a directory for the configuration")?;
        let forwarding = match self {
            Self::Vipgate => {
                let capacity = (flows * 2).max(65_536);
                let vipgate = Vipgate::configure(config, capacity, None, &PolicySource::File, directory.path())?;
                Forwarding::Vipgate(vipgate.start(&testbed.gateway)?, vipgate)
            }
            Self::Ovs => Forwarding::Ovs(OpenVswitch::start(&testbed.gateway, &config.cores, directory.path())?),
            Self::Nft => {
                kernel::add_snat(testbed, directory.path())?;
                kernel::enable_napi(testbed, config)?;
                Forwarding::Kernel
            }
            Self::Plain => {
                kernel::enable_napi(testbed, config)?;
                Forwarding::Kernel
            }
            Self::Xdp => {
                let programs = Forwarder::start(testbed, config.cores.first().copied().unwrap_or_default())?;
                kernel::place(testbed, config)?;
                Forwarding::Xdp { _programs: programs }
            }
        };
        Ok(RunningSut { forwarding, _directory: directory })
    }

    /// What the system makes of packets.
    pub(super) fn expectation(self) -> Expectation {
        match self {
            Self::Vipgate | Self::Nft | Self::Ovs | Self::Xdp => Expectation::translated_to(VIP),
            Self::Plain => Expectation::untranslated(),
        }
    }

    /// Whether the kernel's interrupts forward, on a core that is configurable.
    pub(super) fn is_placeable(self) -> bool {
        match self {
            Self::Nft | Self::Xdp | Self::Plain => true,
            Self::Vipgate | Self::Ovs => false,
        }
    }
}
