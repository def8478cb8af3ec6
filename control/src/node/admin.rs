//! Admin API of the agent.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use vipgate_node::agent::{AgentHandle, Status as AgentStatus};
use vipgate_node::drops::Reason;
use vipgate_node::kernel::{Counter, Repairs};
use vipgate_node::mark_users::MarkUsers;
use vipgate_node::marks::{Action, GatewayIndex, MarkMask, RoutingNumbers};
use vipgate_node::plan::trace::{Outcome, state, trace};
use vipgate_node::plan::{NodePlan, Steering, Target, counter_label};
use vipgate_node::policy::NodePolicy;

use super::proto;
use super::proto::node_server::{Node, NodeServer};
use crate::admin;
use crate::listener::{ConnectionLimiter, Limits};
use crate::xds::client::ServerStatus;

/// Limits of connections to the admin socket.
const LIMITS: Limits = Limits { connections: 32, per_address: 32 };

/// Answers requests from the agent's state.
pub(super) struct Service {
    pub(super) agent: AgentHandle,
    pub(super) connection: Arc<ArcSwap<ServerStatus>>,
    pub(super) device: String,
    pub(super) mask: MarkMask,
    pub(super) numbers: RoutingNumbers,
    pub(super) mark_users: watch::Receiver<MarkUsers>,
}

/// Serves the admin API until `stop` is set.
pub(super) async fn serve(service: Service, listener: UnixListener, stop: watch::Receiver<bool>) {
    let router = Server::builder().add_service(NodeServer::new(service));
    admin::serve_router(router, listener, ConnectionLimiter::new("admin", LIMITS), stop).await;
}

#[tonic::async_trait]
impl Node for Service {
    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::StatusReply>, Status> {
        let (reply, outcome) = oneshot::channel();
        self.agent.commands.send(reply).await.map_err(|_| Status::unavailable("the agent is stopping"))?;
        let outcome = outcome.await.map_err(|_| Status::unavailable("the agent is stopping"))?;
        let status = self.agent.status.borrow().clone();
        Ok(Response::new(self.reply(&status, outcome)))
    }

    async fn endpoints(&self, _: Request<proto::EndpointsRequest>) -> Result<Response<proto::EndpointsReply>, Status> {
        let status = self.agent.status.borrow().clone();
        let (Some(plan), Some(policy)) = (&status.plan, &status.policy) else {
            return Ok(Response::new(proto::EndpointsReply::default()));
        };
        let endpoints = plan.endpoints.iter().map(|(address, steering)| endpoint(plan, policy, *address, *steering));
        Ok(Response::new(proto::EndpointsReply { endpoints: endpoints.collect() }))
    }

    async fn trace(&self, request: Request<proto::TraceRequest>) -> Result<Response<proto::TraceReply>, Status> {
        let proto::TraceRequest { pod, destination } = request.into_inner();
        let status = self.agent.status.borrow().clone();
        let plan =
            status.plan.as_ref().ok_or_else(|| Status::failed_precondition("the kernel isn't programmed yet"))?;
        let destination: IpAddr =
            destination.parse().map_err(|_| Status::invalid_argument(format!("`{destination}` is no address")))?;
        let pod = find_pod(&pod, destination, status.policy.as_deref())?;
        let (steps, outcome) = trace(plan, status.policy.as_deref(), self.mask, self.numbers, pod, destination);
        let outcome = match outcome {
            Outcome::Gateway(name) => format!("to gateway {name}"),
            Outcome::Unchanged => "unchanged".to_owned(),
            Outcome::Held => "held".to_owned(),
            Outcome::Dropped => "dropped".to_owned(),
            Outcome::Foreign => "not steered".to_owned(),
        };
        let steps = steps.into_iter().map(|step| proto::Step { at: step.at.to_owned(), text: step.text });
        Ok(Response::new(proto::TraceReply { steps: steps.collect(), outcome }))
    }
}

/// The address of a pod: an address, or that of a name, of the destination's family.
fn find_pod(pod: &str, destination: IpAddr, policy: Option<&NodePolicy>) -> Result<IpAddr, Status> {
    if let Ok(address) = pod.parse::<IpAddr>() {
        if address.is_ipv4() != destination.is_ipv4() {
            return Err(Status::invalid_argument(format!("{address} and {destination} are of different families")));
        }
        return Ok(address);
    }
    let mut pods = policy.into_iter().flat_map(|policy| &policy.pods);
    let found = pods.find(|(address, of)| *of.name == *pod && address.is_ipv4() == destination.is_ipv4());
    found.map(|(address, _)| *address).ok_or_else(|| {
        Status::not_found(format!(
            "this node has no pod {pod} with an address of the destination's family: see `endpoints`"
        ))
    })
}

impl Service {
    fn reply(&self, status: &AgentStatus, outcome: Result<Repairs, String>) -> proto::StatusReply {
        let connection = self.connection.load();
        let plan = status.plan.as_deref();
        let count = |name: &str| status.counters.get(name).copied().unwrap_or_default();
        let drop = |reason: Reason| proto::Drop {
            reason: reason.as_str().to_owned(),
            packets: count(reason.as_str()).packets,
            description: reason.description().to_owned(),
        };
        let (now, released, dropped) = status.held;
        let (agrees, repaired, error) = match outcome {
            Ok(repairs) => (repairs.is_empty(), repaired(repairs), String::new()),
            Err(error) => (false, String::new(), error),
        };
        proto::StatusReply {
            node: status.policy.as_ref().map(|policy| policy.node.to_string()).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            connected: connection.connected,
            server_error: connection.error.clone().unwrap_or_default(),
            view: status.view,
            tunnel: plan.and_then(|plan| plan.tunnel).map(|tunnel| proto::Tunnel {
                device: self.device.clone(),
                endpoint: tunnel.address.to_string(),
                vni: tunnel.vni,
                mtu: status.mtu.unwrap_or_default(),
            }),
            pods: Some(plan.map(pods).unwrap_or_default()),
            gateways: plan.map(|plan| self.gateways(plan, status)).unwrap_or_default(),
            drops: Reason::ALL.map(drop).into(),
            held: Some(proto::Held { now: now as u64, released, dropped, total: count("held").packets }),
            kernel: Some(proto::Kernel { agrees, repaired, repairs: status.repairs, error }),
            mark_users: mark_users(&self.mark_users.borrow()),
        }
    }

    fn gateways(&self, plan: &NodePlan, status: &AgentStatus) -> Vec<proto::Gateway> {
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
            proto::Gateway {
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

fn mark_users(users: &MarkUsers) -> Vec<proto::MarkUser> {
    users.iter().map(|(place, bits)| proto::MarkUser { place: place.to_owned(), bits }).collect()
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
pub(super) fn pods(plan: &NodePlan) -> proto::Pods {
    let mut pods = proto::Pods::default();
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

fn endpoint(plan: &NodePlan, policy: &NodePolicy, address: IpAddr, steering: Steering) -> proto::Endpoint {
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
    proto::Endpoint {
        address: address.to_string(),
        name: pod.map(|pod| pod.name.to_string()).unwrap_or_default(),
        policy: policy_name,
        target,
        gateways: order.into_iter().flat_map(|order| order.iter().map(ToString::to_string)).collect(),
    }
}
