//! Topology of the second scenario: pods behind the inside router of a group of gateways.

use tempfile::TempDir;
use vipgate_lab::{self as lab, Host, Lab, networks, reflector};

use crate::command_error::CommandError;
use crate::demo::group::{GATEWAYS, GatewayGroup, GroupConfig, POD_PORT};

/// Tenant C's VIPs, which both gateways announce.
pub(in crate::demo) const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
/// Tenant C's pods.
pub(super) const PODS: [(&str, [&str; 2]); 2] =
    [("pod-c1", ["10.1.0.31", "fd00:1::31"]), ("pod-c2", ["10.1.0.32", "fd00:1::32"])];
/// Networks whose addresses must not be seen outside.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.1.0.0/24", "fd00:1::/64"];

const CONFIG: GroupConfig = GroupConfig {
    policy: &[
        GATEWAYS,
        ("pool.yaml", include_str!("../../../../conf/demo/group/pool.yaml")),
        ("tenant-c.yaml", include_str!("../../../../conf/demo/group/tenant-c.yaml")),
    ],
    policyd: "",
    inside_networks: POD_NETWORKS,
    has_nodes: false,
};

/// Hosts and processes of the second scenario.
#[derive(Debug)]
pub(in crate::demo) struct FailoverTopology {
    pub(in crate::demo) pods: Vec<Host>,
    pub(in crate::demo) group: GatewayGroup,
}

impl FailoverTopology {
    /// Creates hosts, links, addresses, routes, servers.
    pub(in crate::demo) fn build(lab: &Lab) -> Result<Self, CommandError> {
        let folder = lab::directory().map_err(CommandError::runtime)?;
        Self::network(lab, folder).map_err(CommandError::runtime)
    }

    fn network(lab: &Lab, folder: TempDir) -> Result<Self, lab::Error> {
        let group = GatewayGroup::build(lab, CONFIG, folder)?;
        let inside = &group.network.inside;
        inside.addresses("pods", &["10.1.0.1/24", "fd00:1::1/64"])?;
        let pod = |(name, addresses): (&str, [&str; 2])| {
            let host = networks::add_pod(lab, inside, name, addresses)?;
            reflector::start_at(&host, &addresses, POD_PORT);
            Ok::<_, lab::Error>(host)
        };
        let pods = PODS.into_iter().map(pod).collect::<Result<_, _>>()?;
        Ok(Self { pods, group })
    }

    /// Starts the policy server and both gateways, and adds routes to them.
    pub(super) fn start(&mut self) -> Result<(), CommandError> {
        self.group.start()?;
        self.route_via(&[0, 1])
    }

    /// Sets ECMP routes to these gateways on both routers.
    pub(super) fn route_via(&self, gateways: &[usize]) -> Result<(), CommandError> {
        self.group.route_inside_via(gateways)?;
        self.group.route_outside_via(VIPS, gateways)
    }
}
