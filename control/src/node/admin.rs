//! Admin API of the agent.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use vipgate_common::Tasks;
use vipgate_node::agent::{AgentHandle, Status as AgentStatus};
use vipgate_node::drops::Reason;
use vipgate_node::kernel::{Counter, Repairs};
use vipgate_node::mark_users::MarkUsers;
use vipgate_node::marks::{Action, GatewayIndex, MarkMask, RoutingNumbers};
use vipgate_node::plan::trace::{Outcome, state, trace};
use vipgate_node::plan::{NodePlan, Steering, Target, counter_label};
use vipgate_node::policy::NodePolicy;

use crate::admin::protocol::{AGENT, Greeting, RequestError};
use crate::admin::{AdminService, Replies, one, serve_requests};
use crate::listener::{ConnectionLimiter, Limits};
use crate::xds::client::ServerStatus;

/// Limits of connections to the admin socket.
const LIMITS: Limits = Limits { connections: 32, per_address: 32 };

/// A request to an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// The agent's state, after a comparison of the kernel with it.
    Status,
    /// The pods of the node, and where their packets go.
    Endpoints,
    /// What becomes of a pod's packet.
    Trace {
        /// An address of a pod, or its name as "namespace/pod".
        pod: String,
        destination: String,
    },
}

/// State of an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatusReply {
    pub(crate) node: String,
    pub(crate) version: String,
    /// Whether the policy client is connected, and why it isn't.
    pub(crate) connected: bool,
    pub(crate) server_error: String,
    /// Number of the membership view; 0: none.
    pub(crate) view: u64,
    pub(crate) tunnel: Option<Tunnel>,
    pub(crate) pods: Pods,
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) drops: Vec<Drop>,
    pub(crate) held: Held,
    pub(crate) kernel: Kernel,
    /// Rules of others that use the same bits of marks: nothing there should (node.yaml: mark_mask).
    pub(crate) mark_users: Vec<MarkUser>,
}

/// The node's end of the tunnels; empty without policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tunnel {
    pub(crate) device: String,
    /// Address and port.
    pub(crate) endpoint: String,
    pub(crate) vni: u32,
    /// Inside the tunnel, bytes.
    pub(crate) mtu: u32,
}

/// Numbers of pods' addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pods {
    pub(crate) covered: u64,
    pub(crate) uncovered: u64,
    /// Covered, but without a VIP; without a gateway.
    pub(crate) no_vip: u64,
    pub(crate) unreachable: u64,
}

/// A gateway of the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gateway {
    pub(crate) name: String,
    /// Number, mark and routing table; 0: it has none.
    pub(crate) index: u32,
    pub(crate) mark: u32,
    pub(crate) table: u32,
    /// Its tunnel endpoint; empty: none is known.
    pub(crate) endpoint: String,
    /// In a few words: active, inactive, unreachable, or why it is unusable.
    pub(crate) state: String,
    pub(crate) usable: bool,
    /// Round-trip time of the last echo, microseconds; 0: none.
    pub(crate) rtt_us: u64,
    /// Pods' addresses whose packets go to it.
    pub(crate) pods: u64,
    pub(crate) packets_to: u64,
    pub(crate) bytes_to: u64,
    pub(crate) packets_from: u64,
    pub(crate) bytes_from: u64,
}

/// Packets that were dropped for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Drop {
    pub(crate) reason: String,
    pub(crate) packets: u64,
    pub(crate) description: String,
}

/// Packets of pods that policy doesn't know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) now: u64,
    pub(crate) released: u64,
    pub(crate) dropped: u64,
    /// Packets that were held at all.
    pub(crate) total: u64,
}

/// What the kernel has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    /// Whether the kernel has what it was programmed with; if it hadn't, it was repaired.
    pub(crate) agrees: bool,
    /// What was repaired now.
    pub(crate) repaired: String,
    /// How often anything was repaired since the start.
    pub(crate) repairs: u64,
    /// Why it can't be programmed.
    pub(crate) error: String,
}

/// A rule of another program that uses bits of the mask.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MarkUser {
    /// `chain CHAIN of table FAMILY NAME`, or `IPv4 rule PRIORITY`.
    pub(crate) place: String,
    /// The bits of the mask that it matches or sets.
    pub(crate) bits: u32,
}

/// The pods of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndpointsReply {
    pub(crate) endpoints: Vec<Endpoint>,
}

/// An address of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    pub(crate) address: String,
    pub(crate) name: String,
    /// Empty: no policy covers it.
    pub(crate) policy: String,
    /// Where its packets go: a gateway, or `unchanged`, `no_vip`, `unreachable`.
    pub(crate) target: String,
    /// The order of its gateways: the home, then backups.
    pub(crate) gateways: Vec<String>,
}

/// What becomes of a pod's packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceReply {
    pub(crate) steps: Vec<Step>,
    pub(crate) outcome: String,
}

/// A step of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) at: String,
    pub(crate) text: String,
}

/// Answers requests from the agent's state.
pub(super) struct Service {
    /// Name of the node.
    pub(super) name: String,
    pub(super) agent: AgentHandle,
    pub(super) connection: Arc<ArcSwap<ServerStatus>>,
    pub(super) device: String,
    pub(super) mask: MarkMask,
    pub(super) numbers: RoutingNumbers,
    pub(super) mark_users: watch::Receiver<MarkUsers>,
}

/// Serves the admin API until the stop signal of `tasks`.
pub(super) async fn serve(service: Service, listener: UnixListener, tasks: Tasks) {
    serve_requests(service, listener, ConnectionLimiter::new("admin", LIMITS), tasks).await;
}

impl AdminService for Service {
    type Request = Request;

    fn greeting(&self) -> Greeting {
        Greeting::of(AGENT, &self.name)
    }

    async fn answer(&self, request: Request) -> Result<Replies, RequestError> {
        match request {
            Request::Status => one(&self.status().await?),
            Request::Endpoints => one(&self.endpoints()),
            Request::Trace { pod, destination } => one(&self.trace(&pod, &destination)?),
        }
    }
}

/// The address of a pod: an address, or that of a name, of the destination's family.
fn find_pod(pod: &str, destination: IpAddr, policy: Option<&NodePolicy>) -> Result<IpAddr, RequestError> {
    if let Ok(address) = pod.parse::<IpAddr>() {
        if address.is_ipv4() != destination.is_ipv4() {
            return Err(RequestError::invalid(format!("{address} and {destination} are of different families")));
        }
        return Ok(address);
    }
    let mut pods = policy.into_iter().flat_map(|policy| &policy.pods);
    let found = pods.find(|(address, of)| *of.name == *pod && address.is_ipv4() == destination.is_ipv4());
    found.map(|(address, _)| *address).ok_or_else(|| {
        RequestError::refused(format!(
            "this node has no pod {pod} with an address of the destination's family: see `endpoints`"
        ))
    })
}

impl Service {
    async fn status(&self) -> Result<StatusReply, RequestError> {
        let stopping = || RequestError::unavailable("the agent is stopping");
        let (reply, outcome) = oneshot::channel();
        self.agent.commands.send(reply).await.map_err(|_| stopping())?;
        let outcome = outcome.await.map_err(|_| stopping())?;
        let status = self.agent.status.borrow().clone();
        Ok(self.reply(&status, outcome))
    }

    fn endpoints(&self) -> EndpointsReply {
        let status = self.agent.status.borrow().clone();
        let (Some(plan), Some(policy)) = (&status.plan, &status.policy) else { return EndpointsReply::default() };
        let endpoints = plan.endpoints.iter().map(|(address, steering)| endpoint(plan, policy, *address, *steering));
        EndpointsReply { endpoints: endpoints.collect() }
    }

    fn trace(&self, pod: &str, destination: &str) -> Result<TraceReply, RequestError> {
        let status = self.agent.status.borrow().clone();
        let plan = status.plan.as_ref().ok_or_else(|| RequestError::refused("the kernel isn't programmed yet"))?;
        let destination: IpAddr =
            destination.parse().map_err(|_| RequestError::invalid(format!("`{destination}` is no address")))?;
        let pod = find_pod(pod, destination, status.policy.as_deref())?;
        let (steps, outcome) = trace(plan, status.policy.as_deref(), self.mask, self.numbers, pod, destination);
        let outcome = match outcome {
            Outcome::Gateway(name) => format!("to gateway {name}"),
            Outcome::Unchanged => "unchanged".to_owned(),
            Outcome::Held => "held".to_owned(),
            Outcome::Dropped => "dropped".to_owned(),
            Outcome::Foreign => "not steered".to_owned(),
        };
        let steps = steps.into_iter().map(|step| Step { at: step.at.to_owned(), text: step.text });
        Ok(TraceReply { steps: steps.collect(), outcome })
    }

    fn reply(&self, status: &AgentStatus, outcome: Result<Repairs, String>) -> StatusReply {
        let connection = self.connection.load();
        let plan = status.plan.as_deref();
        let count = |name: &str| status.counters.get(name).copied().unwrap_or_default();
        let drop = |reason: Reason| Drop {
            reason: reason.as_str().to_owned(),
            packets: count(reason.as_str()).packets,
            description: reason.description().to_owned(),
        };
        let (now, released, dropped) = status.held;
        let (agrees, repaired, error) = match outcome {
            Ok(repairs) => (repairs.is_empty(), repaired(repairs), String::new()),
            Err(error) => (false, String::new(), error),
        };
        StatusReply {
            node: status.policy.as_ref().map(|policy| policy.node.to_string()).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            connected: connection.connected,
            server_error: connection.error.clone().unwrap_or_default(),
            view: status.view,
            tunnel: plan.and_then(|plan| plan.tunnel).map(|tunnel| Tunnel {
                device: self.device.clone(),
                endpoint: tunnel.address.to_string(),
                vni: tunnel.vni,
                mtu: status.mtu.unwrap_or_default(),
            }),
            pods: plan.map(pods).unwrap_or_default(),
            gateways: plan.map(|plan| self.gateways(plan, status)).unwrap_or_default(),
            drops: Reason::ALL.map(drop).into(),
            held: Held { now: now as u64, released, dropped, total: count("held").packets },
            kernel: Kernel { agrees, repaired, repairs: status.repairs, error },
            mark_users: mark_users(&self.mark_users.borrow()),
        }
    }

    fn gateways(&self, plan: &NodePlan, status: &AgentStatus) -> Vec<Gateway> {
        let gateway = |(gateway, index): &(vipgate_node::selection::GatewayState, Option<GatewayIndex>)| {
            let seen = status.gateways.get(&gateway.name);
            let counter = |direction: &str| match index {
                Some(index) => {
                    let name = format!("{direction}_{}", counter_label(*index, &gateway.name));
                    status.counters.get(&name).copied().unwrap_or_default()
                }
                None => Counter::default(),
            };
            let is_target = |steering: &&Steering| matches!(steering, Steering::Covered { target: Target::Gateway(to), .. } if Some(*to) == *index);
            let (to, from) = (counter("to"), counter("from"));
            Gateway {
                name: gateway.name.to_string(),
                index: index.map_or(0, |index| index.0),
                mark: index.map_or(0, |index| self.mask.mark(Action::Gateway(index))),
                table: index.map_or(0, |index| self.numbers.first_table + index.0),
                endpoint: seen.map(|seen| seen.endpoint.to_string()).unwrap_or_default(),
                state: state(gateway),
                usable: gateway.fault.is_none(),
                rtt_us: seen.and_then(|seen| seen.round_trip).map_or(0, |rtt| rtt.as_micros() as u64),
                pods: plan.endpoints.values().filter(is_target).count() as u64,
                packets_to: to.packets,
                bytes_to: to.bytes,
                packets_from: from.packets,
                bytes_from: from.bytes,
            }
        };
        plan.gateways.iter().map(gateway).collect()
    }
}

fn mark_users(users: &MarkUsers) -> Vec<MarkUser> {
    users.iter().map(|(place, bits)| MarkUser { place: place.to_owned(), bits }).collect()
}

fn repaired(repairs: Repairs) -> String {
    let Repairs { table, devices, routes } = repairs;
    let mut parts = Vec::new();
    if table {
        parts.push("the nftables table".to_owned());
    }
    if devices > 0 {
        parts.push("devices".to_owned());
    }
    if routes > 0 {
        parts.push(format!("{routes} routes and rules"));
    }
    parts.join(", ")
}

/// Numbers of pods' addresses.
pub(super) fn pods(plan: &NodePlan) -> Pods {
    let mut pods = Pods::default();
    for steering in plan.endpoints.values() {
        *match steering {
            Steering::Pass => &mut pods.uncovered,
            Steering::NoVip { .. } => &mut pods.no_vip,
            Steering::Covered { target: Target::Unreachable, .. } => &mut pods.unreachable,
            Steering::Covered { target: Target::Gateway(_), .. } => &mut pods.covered,
        } += 1;
    }
    pods
}

fn endpoint(plan: &NodePlan, policy: &NodePolicy, address: IpAddr, steering: Steering) -> Endpoint {
    let pod = policy.pods.get(&address);
    let of = |index: usize| policy.policies.get(index).map(|policy| policy.name.to_string()).unwrap_or_default();
    let (policy_name, target) = match steering {
        Steering::Pass => (String::new(), "unchanged".to_owned()),
        Steering::NoVip { policy } => (of(policy), "no_vip".to_owned()),
        Steering::Covered { policy, target: Target::Unreachable } => (of(policy), "unreachable".to_owned()),
        Steering::Covered { policy, target: Target::Gateway(index) } => {
            (of(policy), plan.gateway(index).map(|gateway| gateway.name.to_string()).unwrap_or_default())
        }
    };
    let order: Option<&Arc<[Arc<str>]>> =
        pod.and_then(|pod| pod.coverage).and_then(|coverage| policy.orders.get(coverage.order?));
    Endpoint {
        address: address.to_string(),
        name: pod.map(|pod| pod.name.to_string()).unwrap_or_default(),
        policy: policy_name,
        target,
        gateways: order.into_iter().flat_map(|order| order.iter().map(ToString::to_string)).collect(),
    }
}
