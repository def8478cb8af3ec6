//! A node's policy for benchmarks, and the kernel of a namespace programmed with its plan, as the agent does it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use anyhow::Result;
use tokio::runtime;
use vipgate_node::indices::Indices;
use vipgate_node::kernel::Kernel;
use vipgate_node::marks::{MarkMask, RoutingNumbers};
use vipgate_node::plan::{Gateway, Inputs, NodePlan, Settings};
use vipgate_node::policy::{Cluster, Coverage, EgressPolicy, NodePolicy, Pod, TunnelEndpoint};

use crate::netns::Namespace;

/// Addresses of node and gateway on the underlay, and the port of the tunnels.
const NODE: [u8; 4] = [203, 0, 113, 1];
const GATEWAY: [u8; 4] = [203, 0, 113, 254];
const PORT: u16 = 8473;
/// The agent's defaults.
pub(super) const NUMBERS: RoutingNumbers = RoutingNumbers { rule_priority: 190, first_table: 7681 };
/// MTU inside the tunnel.
pub(super) const MTU: u32 = 1450;
/// First pod address: that of the source of packets.
const FIRST_POD: u32 = 0x0a01_0400;

/// A node with this many pods, all covered by one policy, and two gateways.
#[derive(Clone, Debug)]
pub(super) struct BenchNode {
    settings: Settings,
    policy: NodePolicy,
    gateways: Vec<Gateway>,
    indices: Indices,
}

impl BenchNode {
    /// The pods' packets go to the first gateway.
    pub(super) fn new(pods: u32) -> Self {
        let coverage = Some(Coverage { policy: 0, order: Some(0), has_vip: true });
        let pod = |number: u32| {
            let name = format!("bench/pod-{number}").into();
            (IpAddr::from(Ipv4Addr::from_bits(FIRST_POD + number)), Pod { name, coverage })
        };
        let [one, two]: [Arc<str>; 2] = ["gw-1", "gw-2"].map(Arc::from);
        let gateway = |name: &Arc<str>, address: [u8; 4]| Gateway {
            name: name.clone(),
            is_active: Some(true),
            is_reachable: true,
            endpoint: Some((address, PORT).into()),
        };
        let mut second = GATEWAY;
        second[3] -= 1;
        Self {
            settings: Settings {
                node: "bench".into(),
                mask: MarkMask::default(),
                pod_prefixes: Vec::new(),
                tunnel_device: "vipgate0".to_owned(),
                hold_device: "vipgate-hold".to_owned(),
            },
            policy: NodePolicy {
                node: "bench".into(),
                tunnel: TunnelEndpoint { address: (NODE, PORT).into(), vni: 7, mac: [0x0a, 0x76, 1, 2, 3, 4] },
                pod_prefixes: Vec::new(),
                policies: vec![EgressPolicy {
                    name: "EgressPolicy bench/web".into(),
                    destinations: "0.0.0.0/0".parse().into_iter().collect(),
                    excluded: Vec::new(),
                }],
                orders: vec![[one.clone(), two.clone()].into()],
                pods: (0..pods).map(pod).collect::<BTreeMap<_, _>>(),
            },
            gateways: vec![gateway(&one, GATEWAY), gateway(&two, second)],
            indices: Indices::default(),
        }
    }

    /// The policy doesn't cover the first pod any more.
    pub(super) fn uncover_one(&mut self) {
        if let Some(pod) = self.policy.pods.values_mut().next() {
            pod.coverage = None;
        }
    }

    /// The first gateway answers no echoes any more.
    pub(super) fn lose_gateway(&mut self) {
        self.gateways[0].is_reachable = false;
    }

    /// The plan for it.
    pub(super) fn plan(&mut self) -> NodePlan {
        let inputs = Inputs {
            settings: &self.settings,
            policy: Some(&self.policy),
            cluster: &Cluster::default(),
            gateways: &self.gateways,
            local_addresses: &[NODE.into()].into(),
            mtu: MTU,
        };
        NodePlan::new(&inputs, &mut self.indices)
    }

    /// Runs `program` with the kernel of a namespace, on this core.
    pub(super) fn with_kernel<T: Send>(
        &mut self,
        host: &Namespace,
        core: usize,
        program: impl AsyncFnOnce(&mut Self, &mut Kernel) -> Result<T> + Send,
    ) -> Result<T> {
        host.run(core, || {
            runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
                let mut kernel = Kernel::open(self.settings.clone(), NUMBERS, "nft".into())?;
                program(self, &mut kernel).await
            })
        })
    }

    /// Programs the kernel of a namespace.
    pub(super) fn program(&mut self, host: &Namespace, core: usize) -> Result<()> {
        self.with_kernel(host, core, async |node, kernel| Ok(kernel.apply(&node.plan(), MTU).await.map(drop)?))
    }
}
