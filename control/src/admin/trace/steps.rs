//! Texts of the trace steps.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::ids::Owner;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::network::NextHop;
use vipgate_dataplane::policy::spec::{EgressSpec, InterfaceSpec, NetworkSpec, Role, RouteTarget};
use vipgate_dataplane::ports::allocator::Availability;
use vipgate_dataplane::session::query::SessionInfo;
use vipgate_dataplane::stage::reject::RejectReply;
use vipgate_dataplane::stage::trace::{PacketClass, SessionOutcome, TraceResult};
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_dataplane::wire::protocol;

use super::{Arrival, FiveTuple, PacketSpec, TraceStep};
use crate::admin::filter::protocol_name;
use crate::admin::membership;
use crate::output::format_duration;
use crate::state::GatewayState;

/// Step `receive`: the packet and its ingress interface.
pub(super) fn receive_step(spec: &PacketSpec, interface: &InterfaceSpec, worker: usize) -> TraceStep {
    let side = match interface.role {
        Role::Inside => "inside",
        Role::Outside => "outside",
        Role::Both => "inside and outside",
    };
    let kind = match spec.protocol {
        protocol::TCP if spec.established => "tcp segment",
        protocol::TCP => "tcp SYN",
        protocol::UDP => "udp datagram",
        protocol::SCTP => "sctp INIT",
        _ => "icmp echo request",
    };
    let PacketSpec { source, destination, .. } = spec;
    let ends = match spec.protocol {
        protocol::ICMP | protocol::ICMPV6 => format!("{} -> {}", source.ip(), destination.ip()),
        _ => format!("{source} -> {destination}"),
    };
    step("receive", format!("{kind} {ends} on {} ({side})", interface.name), worker)
}

/// Step `steering`: the packet is captured by the XDP program.
pub(super) fn captured_step(worker: usize) -> TraceStep {
    step("steering", "captured by the XDP program, by its addresses".to_owned(), worker)
}

/// Step `steering`: the packet is left to the kernel.
pub(super) fn not_captured_step(spec: &PacketSpec, worker: usize, state: &GatewayState) -> TraceStep {
    let policy = state.compiled.load();
    let source = spec.source.ip();
    let reason = if policy.endpoint_at(source).is_some() {
        "its destination is on-link, or local to the gateway's host"
    } else if longest_match(&policy.cluster().pods, source).is_some()
        && cluster_prefix(&policy, spec.destination.ip()).is_some()
    {
        "no policy covers its source, a pod, and its destination is inside the cluster, or on-link"
    } else if policy.is_backend_at(source) {
        "no policy covers its source, a backend but not on this port"
    } else {
        "no policy covers its source, and its destination is no VIP"
    };
    step("steering", format!("NOT CAPTURED: {reason}; the host's kernel applies its own routes and rules"), worker)
}

fn step(stage: &str, text: String, worker: usize) -> TraceStep {
    TraceStep { stage: stage.to_owned(), text, worker: u32::try_from(worker).unwrap_or(u32::MAX) }
}

/// Whether the kernel's best route to an address leaves by an inside interface.
pub(super) fn routes_inside(address: IpAddr, network: &NetworkSpec) -> bool {
    let best =
        network.routes.iter().filter(|route| route.prefix.contains(&address)).max_by_key(|it| it.prefix.prefix_len());
    let Some(RouteTarget::Via(hops)) = best.map(|route| &route.target) else { return false };
    let role = |hop: usize| hops.get(hop).and_then(|hop| network.interfaces.get(usize::from(hop.interface.0)));
    role(0).is_some_and(|interface| interface.role == Role::Inside)
}

/// Appends the steps of one worker. The policy steps are omitted after a hand-off: the previous worker has them.
pub(super) fn append_worker_steps(
    found: &TraceResult,
    ends: &FiveTuple,
    arrival: Arrival,
    state: &GatewayState,
    steps: &mut Vec<TraceStep>,
) {
    let mut push = |stage: &str, text: String| {
        steps.push(TraceStep { stage: stage.to_owned(), text, worker: found.worker.0.into() });
    };
    let describer = Describer { found, ends, policy: &found.snapshot.policy, state };
    if arrival != Arrival::HandedOff {
        for (stage, text) in describer.policy(arrival) {
            push(stage, text);
        }
    }
    push("session", describer.session());
    for (stage, text) in describer.new_session() {
        push(stage, text);
    }
    if let Some(text) = describer.route() {
        push("route", text);
    }
    let (stage, text) = describer.verdict();
    push(stage, text);
}

/// Describes what one worker found.
struct Describer<'a> {
    found: &'a TraceResult,
    ends: &'a FiveTuple,
    policy: &'a Policy,
    state: &'a GatewayState,
}

/// Stage and text.
type Step = (&'static str, String);

impl Describer<'_> {
    /// Policy lookups of source and destination.
    fn policy(&self, arrival: Arrival) -> Vec<Step> {
        let FiveTuple { source, destination, .. } = *self.ends;
        let mut steps = Vec::new();
        let endpoint = self.policy.endpoint_at(source.ip());
        if arrival == Arrival::Hairpin {
            steps.push(("hairpin", format!("re-enters with the VIP {} as its source", source.ip())));
        } else if let Some(endpoint) = endpoint {
            let spec = &self.policy.egress_of(endpoint).spec;
            steps.push(("policy", format!("{} is covered by {}", with_name(source.ip(), &endpoint.name), spec.name)));
            steps.push(("destination", rule(spec, self.policy, destination.ip())));
        } else if self.policy.vip_at(source.ip()).is_some() {
            steps.push(("policy", format!("{} is a VIP: a valid source for hairpin packets only", source.ip())));
        } else if self.policy.is_backend_at(source.ip()) {
            steps.push(("policy", format!("no policy covers {}, a backend of a Service", source.ip())));
        } else {
            steps.push(("policy", format!("no policy covers {}", source.ip())));
        }
        if arrival != Arrival::Hairpin && endpoint.is_none() {
            steps.extend(uncovered(self.policy, source.ip(), destination.ip()).map(|text| ("uncovered", text)));
        }
        if let Some(vip) = self.policy.vip_at(destination.ip()) {
            let what = if vip.ports.retired { "is a retired VIP: existing sessions only" } else { "is the VIP of" };
            let name = if vip.ports.retired { "" } else { &*vip.name };
            steps.push(("vip", format!("{} {what} {name}", vip.address).trim_end().to_owned()));
            let service = self.policy.service_at(destination, self.ends.protocol);
            let protocol = protocol_name(self.ends.protocol);
            steps.push(match service {
                Some(service) => {
                    ("service", format!("{protocol} port {} is {}", destination.port(), service.spec.name))
                }
                None => ("service", format!("no Service has {protocol} port {} at this VIP", destination.port())),
            });
            if !vip.shards.is_standalone() {
                let owner = vip.shards.owner_of_port(destination.port());
                steps.push(("owner", format!("port {} is owned by {}", destination.port(), self.owner_name(owner))));
            }
        }
        if let Some(endpoint) = endpoint.filter(|endpoint| self.policy.home_of(endpoint).is_some()) {
            let owner = self.owner_name(self.policy.owner_of(endpoint));
            steps.push(("owner", format!("the shard of {} is owned by {owner}", source.ip())));
        }
        steps
    }

    fn owner_name(&self, owner: Owner) -> String {
        match owner {
            Owner::This => format!("{}, this gateway", self.state.name),
            Owner::Other(_) => membership::owner_name(self.policy, owner, self.state),
            Owner::Unowned => "no gateway: none of its candidates is active".to_owned(),
        }
    }

    /// The matching session.
    fn session(&self) -> String {
        let Some((record, fate)) = &self.found.session else {
            let place = if self.found.worker.0 == 0 && self.state.workers().len() < 2 {
                String::new()
            } else {
                format!(" on worker {}", self.found.worker.0)
            };
            return format!("no matching session{place}");
        };
        let what = match fate {
            SessionOutcome::Valid => "matches",
            SessionOutcome::Revalidated => "matches, revalidated after a policy change",
            SessionOutcome::Ended => "matches, but revalidation after a policy change fails: this packet would end it",
            SessionOutcome::FailedOver => {
                "is a standby session, which this packet would activate: this gateway owns its shard now"
            }
            SessionOutcome::Demoted => "is released: another gateway owns its shard now",
            SessionOutcome::Reopened => "is closed, and this packet reopens it",
            SessionOutcome::Standby(owner) => {
                return format!("{} is a standby session, active on {}", session_text(record), self.owner_name(*owner));
            }
        };
        let expires = format_duration(record.expires_ms.into());
        format!(
            "{} {what}; {}, idle for {}, expires in {expires}",
            session_text(record),
            record.state.name(),
            format_duration(record.idle_ms.into())
        )
    }

    /// VIP, ports and backend that a new session would get.
    fn new_session(&self) -> Vec<Step> {
        let mut steps = self.snat();
        if self.found.uses_reserve {
            let what = "the session table is full except for its reserve, which is open to this session: its holder \
                        is below its fair share";
            steps.push(("table", what.to_owned()));
        }
        steps.extend(self.class());
        steps
    }

    /// VIP and ports of a new egress session.
    fn snat(&self) -> Vec<Step> {
        let Some(snat) = self.found.snat else { return Vec::new() };
        let Some(vip) = self.policy.vips().find(|vip| vip.ports.id == snat.vip) else { return Vec::new() };
        let shard = match snat.blocks {
            None => format!("this gateway owns all {} port blocks", self.state.port_blocks),
            Some(blocks) => format!("the endpoint's shard has {blocks} of {} port blocks", self.state.port_blocks),
        };
        let outlook = match snat.availability {
            Availability::Available => "a port is free for this destination",
            Availability::Exhausted if snat.blocks.is_some() => {
                "NO PORT IS FREE in its SHARD for this destination; other gateways are asked for one"
            }
            Availability::Exhausted => "NO PORT IS FREE for this destination",
            Availability::NearlyExhausted => "nearly all ports are in use for this destination",
        };
        let ports = format!("{shard}; worker {} has claimed {} of them; {outlook}", self.found.worker.0, snat.owned);
        vec![("vip", format!("SNAT to {} ({})", vip.address, vip.name)), ("ports", ports)]
    }

    /// What follows from the class of a packet.
    fn class(&self) -> Option<Step> {
        let translated = self.found.translated;
        Some(match self.found.class? {
            PacketClass::Egress { reopens: true } => {
                let port = translated.map(|[source, _]| format!(" {source}")).unwrap_or_default();
                ("vip", format!("a session with this tuple has just closed: it is reopened with its port{port}"))
            }
            PacketClass::Inbound => {
                let [_, backend] = translated?;
                let name = self.policy.endpoint_at(backend.ip()).map(|it| it.name.to_string()).unwrap_or_default();
                let address = with_name(backend.ip(), &name);
                ("backend", format!("new sessions of this client go to backend {address}, port {}", backend.port()))
            }
            PacketClass::StatelessReply => ("backend", "stateless translation, by policy alone".to_owned()),
            PacketClass::HealthCheck => ("service", "health check, answered by the gateway itself".to_owned()),
            PacketClass::Unchanged => ("policy", "routed untranslated".to_owned()),
            PacketClass::Egress { reopens: false } | PacketClass::Session | PacketClass::ForwardToOwner => return None,
        })
    }

    fn route(&self) -> Option<String> {
        let network = &self.found.snapshot.network;
        let name = |id: vipgate_dataplane::flow::ids::InterfaceId| &network.interface(id).name;
        Some(match self.found.next_hop? {
            NextHop::Neighbor(id) => {
                let hop = network.neighbor(id);
                let mac = if hop.macs.is_some() { "MAC address known" } else { "MAC address NOT RESOLVED yet" };
                format!("via {} on {}, {mac}", hop.address, name(hop.interface))
            }
            NextHop::OnLink(out) => format!("on-link on {}, not in the kernel's neighbor table yet", name(out)),
            NextHop::Hairpin => "to a VIP of this gateway: hairpin".to_owned(),
            NextHop::Node(id) => {
                let node = self.policy.nodes().list().get(id.0 as usize);
                node.map_or_else(String::new, |node| format!("VXLAN tunnel to node {} ({})", node.name, node.address))
            }
        })
    }

    fn verdict(&self) -> Step {
        let found = self.found;
        let network = &found.snapshot.network;
        let name = |id: vipgate_dataplane::flow::ids::InterfaceId| network.interface(id).name.clone();
        let ends =
            found.translated.map(|ends| format!(" as {}", tuple_text(ends, self.ends.protocol))).unwrap_or_default();
        let text = match found.verdict {
            Verdict::HandOff(worker) => return ("worker", format!("handed off to worker {}", worker.0)),
            Verdict::Hairpin => return ("hairpin", format!("translated{ends}, re-enters the packet path")),
            Verdict::Forward(out) if found.direction == Direction::PeerOut && found.snat.is_some() => {
                format!(
                    "forwarded to the next gateway with ports of the VIP, which opens the session, out of {}",
                    name(out)
                )
            }
            Verdict::Forward(out) if found.direction == Direction::PeerOut => {
                format!(
                    "forwarded to its owner through the tunnel, out of {}; run the trace there for its next steps",
                    name(out)
                )
            }
            Verdict::Forward(out) => format!("forwarded{ends}, out of {}", name(out)),
            Verdict::Fragment(out) => {
                format!("fragmented and forwarded{ends}, out of {}, MTU {} bytes", name(out), found.mtu)
            }
            Verdict::FragmentIntoTunnel => {
                format!("fragmented and forwarded{ends}, through the tunnel, MTU {} bytes", found.mtu)
            }
            Verdict::Reply(out) => format!("the gateway itself replies, out of {}", name(out)),
            Verdict::Consume | Verdict::AwaitFirstFragment | Verdict::Requeue | Verdict::Undecided => {
                "consumed by the gateway, without a reply".to_owned()
            }
            Verdict::AwaitNeighbor(_) => {
                format!("forwarded{ends} once the kernel's ARP or NDP has resolved its neighbor")
            }
            Verdict::Defer(_) => "queued for up to 1 s, until the failover of its shard is complete".to_owned(),
            Verdict::Drop(reason) => {
                let notification = match found.reply {
                    None => "dropped silently",
                    Some(RejectReply::TcpReset) => "the sender receives a reset",
                    Some(RejectReply::IcmpError(error)) => icmp(error),
                };
                let meaning = reason.help().trim_end_matches('.');
                format!("DROPPED, {}: {meaning}; {notification}", reason.name())
            }
        };
        ("verdict", text)
    }
}

fn icmp(error: IcmpError) -> &'static str {
    match error {
        IcmpError::TtlExceeded => "the sender receives ICMP \"time exceeded\"",
        IcmpError::NoRoute => "the sender receives ICMP \"network unreachable\"",
        IcmpError::HostUnreachable => "the sender receives ICMP \"host unreachable\"",
        IcmpError::PacketTooBig { .. } => "the sender receives ICMP \"packet too big\" with the MTU",
        IcmpError::PortUnreachable => "the sender receives ICMP \"port unreachable\"",
        IcmpError::Prohibited => "the sender receives ICMP \"administratively prohibited\"",
    }
}

fn session_text(record: &SessionInfo) -> String {
    let SessionInfo { endpoint, vip, remote, direction, .. } = record;
    format!("{} {endpoint}, translated to {vip}, remote {remote},", direction.name())
}

fn with_name(address: IpAddr, name: &str) -> String {
    if name.is_empty() { address.to_string() } else { format!("{address} ({name})") }
}

fn tuple_text([source, destination]: [SocketAddr; 2], number: u8) -> String {
    let end = |end: SocketAddr| match number {
        protocol::ICMP | protocol::ICMPV6 => end.ip().to_string(),
        _ if end.port() == 0 && end.is_ipv6() => format!("[{}]:(any free port)", end.ip()),
        _ if end.port() == 0 => format!("{}:(any free port)", end.ip()),
        _ => end.to_string(),
    };
    format!("{} -> {}", end(source), end(destination))
}

/// The longest prefix that contains an address.
fn longest_match<'a>(nets: impl IntoIterator<Item = &'a IpNet>, address: IpAddr) -> Option<IpNet> {
    nets.into_iter().filter(|net| net.contains(&address)).max_by_key(|net| net.prefix_len()).copied()
}

/// The longest of the cluster's own prefixes that contains an address.
fn cluster_prefix(policy: &Policy, address: IpAddr) -> Option<IpNet> {
    let cluster = policy.cluster();
    longest_match(cluster.pods.iter().chain(&cluster.others), address)
}

/// The rule for a destination: the longest prefix wins, among the policy's and the cluster's own.
fn rule(spec: &EgressSpec, policy: &Policy, destination: IpAddr) -> String {
    let wanted = longest_match(&spec.destinations, destination);
    let is_as_long = |net: &IpNet| wanted.is_none_or(|wanted| wanted.prefix_len() <= net.prefix_len());
    let Some(wanted) =
        wanted.filter(|_| !longest_match(&spec.excluded, destination).is_some_and(|net| is_as_long(&net)))
    else {
        return match longest_match(&spec.excluded, destination) {
            Some(net) => format!("{destination} is excluded by {net}: not translated"),
            None => format!("{destination} matches no destination of the policy: not translated"),
        };
    };
    match cluster_prefix(policy, destination).filter(|own| own.prefix_len() > wanted.prefix_len()) {
        Some(own) if policy.vip_at(destination).is_none_or(|vip| vip.ports.retired) => {
            format!("{destination} is inside the cluster ({own}): not translated")
        }
        _ => format!("{destination} matches {wanted}: translated"),
    }
}

/// The rule for a pod address that no policy covers; none for other addresses.
fn uncovered(policy: &Policy, source: IpAddr, destination: IpAddr) -> Option<String> {
    let cluster = policy.cluster();
    let pods = longest_match(&cluster.pods, source)?;
    Some(match cluster_prefix(policy, destination) {
        _ if !cluster.drop_uncovered => {
            format!("pod address ({pods}), passes unchanged (uncovered: pass)")
        }
        Some(own) => {
            format!("pod address ({pods}), and {destination} is inside the cluster ({own})")
        }
        None => format!("pod address ({pods}), doesn't leave the cluster (uncovered: drop)"),
    })
}
