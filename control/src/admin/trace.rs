//! `Trace` request: a synthetic packet, evaluated by the worker that would receive it and by those that it would be
//! handed off to.

mod steps;

use std::net::{IpAddr, SocketAddr};

use etherparse::{PacketBuilder, PacketBuilderStep};
use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec};
use vipgate_dataplane::stage::trace::{Probe, TraceResult};
use vipgate_dataplane::wire::protocol;
use vipgate_dataplane::worker::command::Command;

use super::filter;
use super::protocol::RequestError;
use crate::admin::workers::Workers;
use crate::state::GatewayState;

/// Limit of evaluations of one packet: at most one hairpin, and each worker without ports hands off to the next one.
const MAX_EVALUATIONS: usize = 300;
/// Default ports where none are given: source (a client's) and destination (a server's).
const DEFAULT_PORTS: [u16; 2] = [40_000, 443];
/// Source MAC address of the synthetic packet; no stage evaluates it.
const SOURCE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const TTL: u8 = 64;

/// A packet to trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    pub source: IpAddr,
    /// 0: a default.
    pub source_port: u16,
    pub destination: IpAddr,
    /// 0: a default.
    pub destination_port: u16,
    /// IP protocol number; ICMP and ICMPv6 both mean an echo request of the addresses' family.
    pub protocol: u8,
    /// Ingress interface; none: the one that its source address is expected at.
    pub interface: Option<String>,
    /// TCP: a segment of an established connection instead of a SYN.
    pub established: bool,
    /// The worker that receives it.
    pub worker: u32,
    /// Length of the IP packet, bytes; 0: the minimum.
    pub length: u32,
}

/// What becomes of a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceReply {
    pub steps: Vec<TraceStep>,
    /// forward, fragment, tunnel, reply, consumed, wait, drop, or kernel: it is not captured.
    pub verdict: String,
    /// Drop reason, if it is dropped.
    pub reason: String,
    /// Direction under which it is counted, if it is forwarded.
    pub direction: String,
    /// Source and destination after translation, if known. Port 0: allocated when the session is opened.
    pub source: String,
    pub destination: String,
    /// The worker that processes it.
    pub worker: u32,
    /// Egress interface.
    pub interface: String,
}

/// A step of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStep {
    /// Name of the stage or of a lookup: receive, steering, policy, destination,
    /// vip, service, owner, session, ports, backend, route, worker, hairpin, verdict.
    pub stage: String,
    /// Its result, as a sentence.
    pub text: String,
    pub worker: u32,
}

/// A validated request.
#[derive(Clone, Copy, Debug)]
struct PacketSpec {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: u8,
    established: bool,
    length: u32,
}

/// Traces a packet through the workers' live tables.
pub(super) async fn trace(
    request: &TraceRequest,
    state: &GatewayState,
    workers: &Workers,
) -> Result<TraceReply, RequestError> {
    let spec = PacketSpec::parse(request)?;
    if state.engine.get().is_none() {
        return Err(RequestError::unavailable(
            "the gateway is still starting: it drops all packets until it has a policy",
        ));
    }
    let network = state.network.load();
    let interface = interface(request, &spec, &network, &state.compiled.load())?;
    let max = interface.frames.max_mtu();
    if spec.length > max.into() {
        return Err(RequestError::invalid(format!(
            "length {}: this gateway's packet buffers hold {max} bytes",
            spec.length
        )));
    }
    let mut at = usize::try_from(request.worker).unwrap_or(usize::MAX);
    if at >= state.workers().len() {
        let count = state.workers().len();
        return Err(RequestError::invalid(format!("worker {at}: this gateway has {count}, counted from 0")));
    }
    let packet = spec.packet(interface.mac)?;
    let mut steps = vec![steps::receive_step(&spec, interface, at)];
    match state.device().and_then(|device| device.captures(&packet, interface.ifindex)) {
        Some(true) => steps.push(steps::captured_step(at)),
        Some(false) => return Ok(left_to_kernel(steps, &spec, at, state)),
        None => {}
    }
    let mut probe = Box::new(Probe::new(packet, interface.id));
    let mut arrival = Arrival::Received;
    for _ in 0..MAX_EVALUATIONS {
        let ends = FiveTuple::of(&probe.packet, &spec);
        probe = workers.query(at, |reply| Command::Trace { probe, reply }).await?;
        let Some(found) = probe.result.take() else {
            return Err(RequestError::unavailable("no packet buffer is free: the gateway is overloaded, try again"));
        };
        steps::append_worker_steps(&found, &ends, arrival, state, &mut steps);
        match found.verdict {
            Verdict::HandOff(next) => (at, arrival) = (usize::from(next.0), Arrival::HandedOff),
            // Evaluated again like a packet from outside.
            Verdict::Hairpin => arrival = Arrival::Hairpin,
            verdict => return Ok(reply(&found, verdict, steps, &network)),
        }
    }
    Err(RequestError::unavailable("hand-off loop: the packet exceeds the limit of hand-offs between workers"))
}

/// Reply for a packet that the steering program doesn't capture.
fn left_to_kernel(mut steps: Vec<TraceStep>, spec: &PacketSpec, at: usize, state: &GatewayState) -> TraceReply {
    steps.push(steps::not_captured_step(spec, at, state));
    let worker = u32::try_from(at).unwrap_or(u32::MAX);
    TraceReply { steps, verdict: "kernel".to_owned(), worker, ..TraceReply::default() }
}

/// How a packet reaches a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// Received from an interface.
    Received,
    /// Handed off by another worker, which has done the policy lookup.
    HandedOff,
    /// Hairpin through a VIP.
    Hairpin,
}

/// Addresses, ports and protocol of a packet in its current, perhaps translated, form.
#[derive(Clone, Copy, Debug)]
struct FiveTuple {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: u8,
}

impl FiveTuple {
    fn of(packet: &[u8], spec: &PacketSpec) -> Self {
        let PacketSpec { source, destination, protocol, .. } = *spec;
        let requested = Self { source, destination, protocol };
        PacketSummary::of(packet).map_or(requested, |it| {
            let [from, to] = it.ports.unwrap_or_default();
            Self { source: (it.source, from).into(), destination: (it.destination, to).into(), protocol }
        })
    }
}

fn reply(found: &TraceResult, verdict: Verdict, steps: Vec<TraceStep>, network: &NetworkSpec) -> TraceReply {
    let name =
        |id: InterfaceId| network.interfaces.get(usize::from(id.0)).map(|it| it.name.clone()).unwrap_or_default();
    let reason = if let Verdict::Drop(reason) = verdict { reason.name() } else { "" };
    let ends = found.translated.filter(|_| reason.is_empty());
    let [source, destination] = ends.map_or_else(Default::default, |ends| ends.map(|end| end.to_string()));
    let (word, interface) = match verdict {
        Verdict::Forward(out) => ("forward", name(out)),
        Verdict::Fragment(out) => ("fragment", name(out)),
        Verdict::FragmentIntoTunnel => ("tunnel", String::new()),
        Verdict::Reply(out) => ("reply", name(out)),
        Verdict::Consume => ("consumed", String::new()),
        Verdict::AwaitNeighbor(_) | Verdict::Defer(_) => ("wait", String::new()),
        Verdict::Drop(_) => ("drop", String::new()),
        Verdict::Undecided
        | Verdict::HandOff(_)
        | Verdict::AwaitFirstFragment
        | Verdict::Requeue
        | Verdict::Hairpin => ("undecided", String::new()),
    };
    TraceReply {
        steps,
        verdict: word.to_owned(),
        reason: reason.to_owned(),
        direction: if reason.is_empty() { found.direction.name().to_owned() } else { String::new() },
        source,
        destination,
        worker: found.worker.0.into(),
        interface,
    }
}

/// Ingress interface: the requested one, or the one that the source is behind.
fn interface<'a>(
    request: &TraceRequest,
    spec: &PacketSpec,
    network: &'a NetworkSpec,
    policy: &Policy,
) -> Result<&'a InterfaceSpec, RequestError> {
    let names = || network.interfaces.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(name) = &request.interface {
        let named = network.interfaces.iter().find(|it| it.name == *name);
        return named.ok_or_else(|| RequestError::invalid(format!("interface {name}: this gateway has {}", names())));
    }
    let source = spec.source.ip();
    let is_pod = policy.endpoint_at(source).is_some()
        || policy.is_backend_at(source)
        || policy.node_at(source).is_some()
        || policy.cluster().pods.iter().any(|net| net.contains(&source));
    // A source that the policy doesn't contain is inside if its route is.
    let is_inside = is_pod || steps::routes_inside(source, network);
    let found = network.interfaces.iter().find(|it| if is_inside { it.role.is_inside() } else { it.role.is_outside() });
    found.or(network.interfaces.first()).ok_or_else(|| RequestError::unavailable("the gateway has no interface"))
}

impl PacketSpec {
    fn parse(request: &TraceRequest) -> Result<Self, RequestError> {
        let TraceRequest { source, destination, .. } = *request;
        if source.is_ipv4() != destination.is_ipv4() {
            return Err(RequestError::invalid(format!(
                "from {source} to {destination}: a packet has addresses of one family"
            )));
        }
        let mut number = request.protocol;
        // `icmp` and `icmpv6` both mean the one of the address family.
        if matches!(number, protocol::ICMP | protocol::ICMPV6) {
            number = if source.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
        }
        let known = [protocol::TCP, protocol::UDP, protocol::SCTP, protocol::ICMP, protocol::ICMPV6];
        if !known.contains(&number) {
            let name = filter::protocol_name(number);
            return Err(RequestError::invalid(format!(
                "proto {name}: only tcp, udp, sctp, icmp and icmpv6 are translated, other protocols are dropped"
            )));
        }
        let is_echo = matches!(number, protocol::ICMP | protocol::ICMPV6);
        if is_echo && (request.source_port, request.destination_port) != (0, 0) {
            return Err(RequestError::invalid("icmp has no ports: give addresses only"));
        }
        let or_default = |port: u16, default| if port == 0 { default } else { port };
        let ports = [
            or_default(request.source_port, DEFAULT_PORTS[0]),
            if is_echo { 0 } else { or_default(request.destination_port, DEFAULT_PORTS[1]) },
        ];
        Ok(Self {
            source: (source, ports[0]).into(),
            destination: (destination, ports[1]).into(),
            protocol: number,
            established: request.established,
            length: request.length,
        })
    }

    /// Builds the packet with Ethernet header, as a neighbor would send it.
    fn packet(&self, mac: [u8; 6]) -> Result<Vec<u8>, RequestError> {
        let ethernet = PacketBuilder::ethernet2(SOURCE_MAC, mac);
        let builder = match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), TTL),
            (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), TTL),
            _ => return Err(RequestError::invalid("a packet has addresses of one family")),
        };
        let headers = if self.source.is_ipv4() { 20 } else { 40 } + 20;
        let padding = vec![0; (self.length as usize).saturating_sub(headers)];
        let mut bytes = Vec::new();
        let written = self.write(builder, &padding, &mut bytes);
        written.map_err(|error| RequestError::unavailable(format!("cannot build the packet: {error}")))?;
        Ok(bytes)
    }

    fn write(
        &self,
        builder: PacketBuilderStep<etherparse::IpHeaders>,
        payload: &[u8],
        into: &mut Vec<u8>,
    ) -> Result<(), etherparse::err::packet::BuildWriteError> {
        let [from, to] = [self.source.port(), self.destination.port()];
        match self.protocol {
            protocol::TCP => {
                let segment = builder.tcp(from, to, 1, 64_000);
                if self.established { segment.ack(1).write(into, payload) } else { segment.syn().write(into, payload) }
            }
            protocol::UDP => builder.udp(from, to).write(into, payload),
            protocol::ICMP => builder.icmpv4_echo_request(from, 1).write(into, payload),
            protocol::ICMPV6 => builder.icmpv6_echo_request(from, 1).write(into, payload),
            _ => {
                // An INIT chunk (RFC 9260 section 3.3.2); its checksum is not evaluated here.
                let mut packet = [from.to_be_bytes(), to.to_be_bytes()].concat();
                packet.extend([0; 8]);
                let chunk: [u8; 20] = [1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];
                packet.extend(chunk);
                packet.extend_from_slice(payload);
                builder.write(into, etherparse::ip_number::SCTP, &packet)
            }
        }
    }
}
