//! `Trace`: a packet made up and shown to the worker that it would come to, and to those that it would be handed to.

mod words;

use std::net::{IpAddr, SocketAddr};

use etherparse::{PacketBuilder, PacketBuilderStep};
use tonic::Status;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::explain::{Found, Probe};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NetworkSpec};
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::watch::glimpse::Glimpse;
use vipgate_dataplane::wire::protocol;

use super::filter;
use super::proto::{TraceReply, TraceRequest, TraceStep};
use super::sessions::Workers;
use crate::gateway::state::GatewayState;

/// Workers that one packet is followed to; it comes around at most once, and each asks the next one for ports.
const MOST_STOPS: usize = 300;
/// What a port is taken to be where none is given: one that clients have, and one that servers listen on.
const ASSUMED: [u16; 2] = [40_000, 443];
/// A neighbour's link address, which nobody looks at.
const SOMEBODY: [u8; 6] = [2, 0, 0, 0, 0, 1];
const TTL: u8 = 64;

/// What is asked, understood.
#[derive(Clone, Copy, Debug)]
struct Question {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: u8,
    later: bool,
    length: u32,
}

/// Follows a packet.
pub(super) async fn trace(
    request: &TraceRequest,
    state: &GatewayState,
    workers: &Workers,
) -> Result<TraceReply, Status> {
    let question = Question::understood(request)?;
    let network = state.network.load();
    let interface = interface(request, &question, &network, &state.compiled.load())?;
    let mut at = usize::try_from(request.worker).unwrap_or(usize::MAX);
    if at >= state.workers.len() {
        let count = state.workers.len();
        return Err(wrong(format!("worker {at}: this gateway has {count}, counted from 0")));
    }
    let packet = question.packet(interface.mac)?;
    let mut steps = vec![words::arrives(&question, interface, at)];
    match state.device.captures(&packet, interface.ifindex) {
        Some(true) => steps.push(words::captured(at)),
        Some(false) => return Ok(left_to_the_kernel(steps, &question, at, state)),
        None => {}
    }
    let mut probe = Box::new(Probe::new(packet, interface.id));
    let mut turn = Turn::First;
    for _ in 0..MOST_STOPS {
        let ends = Ends::of(&probe.packet, &question);
        probe = workers.ask(at, |reply| Command::Explain { probe, reply }).await?;
        let Some(found) = probe.found.take() else {
            return Err(Status::unavailable("no packet buffer is free: the gateway is very busy, ask again"));
        };
        words::tell(&found, &ends, turn, state, &mut steps);
        match found.verdict {
            Verdict::HandOff(next) => (at, turn) = (usize::from(next.0), Turn::HandedOver),
            // It is looked at like one from outside.
            Verdict::Around => turn = Turn::Around,
            verdict => return Ok(reply(&found, verdict, steps, &network)),
        }
    }
    Err(Status::internal("the packet is handed from worker to worker without end"))
}

/// The answer about a packet that the steering program doesn't capture.
fn left_to_the_kernel(mut steps: Vec<TraceStep>, question: &Question, at: usize, state: &GatewayState) -> TraceReply {
    steps.push(words::left(question, at, state));
    let worker = u32::try_from(at).unwrap_or(u32::MAX);
    TraceReply { steps, verdict: "kernel".to_owned(), worker, ..TraceReply::default() }
}

/// How a packet comes to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// From outside.
    First,
    /// From another worker, which has said what policy says.
    HandedOver,
    /// By way of a VIP.
    Around,
}

/// Where a packet is from and for, as it is by now.
#[derive(Clone, Copy, Debug)]
struct Ends {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: u8,
}

impl Ends {
    fn of(packet: &[u8], question: &Question) -> Self {
        let Question { source, destination, protocol, .. } = *question;
        let asked = Self { source, destination, protocol };
        Glimpse::of(packet).map_or(asked, |it| {
            let [from, to] = it.ports.unwrap_or_default();
            Self { source: (it.source, from).into(), destination: (it.destination, to).into(), protocol }
        })
    }
}

fn reply(found: &Found, verdict: Verdict, steps: Vec<TraceStep>, network: &NetworkSpec) -> TraceReply {
    let name =
        |id: InterfaceId| network.interfaces.get(usize::from(id.0)).map(|it| it.name.clone()).unwrap_or_default();
    let reason = if let Verdict::Drop(reason) = verdict { reason.name() } else { "" };
    let ends = found.translated.filter(|_| reason.is_empty());
    let [source, destination] = ends.map_or_else(Default::default, |ends| ends.map(|end| end.to_string()));
    let (word, interface) = match verdict {
        Verdict::Forward(out) => ("forward", name(out)),
        Verdict::Cut(out) => ("cut", name(out)),
        Verdict::CutIntoTunnel => ("tunnel", String::new()),
        Verdict::Answer(out) => ("answer", name(out)),
        Verdict::Heard => ("heard", String::new()),
        Verdict::Wait(_) | Verdict::Defer(_) => ("wait", String::new()),
        Verdict::Drop(_) => ("drop", String::new()),
        Verdict::Undecided | Verdict::HandOff(_) | Verdict::Park | Verdict::Requeue | Verdict::Around => {
            ("undecided", String::new())
        }
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

/// Where the packet comes in: as asked, or where its sender must be.
fn interface<'a>(
    request: &TraceRequest,
    question: &Question,
    network: &'a NetworkSpec,
    policy: &Policy,
) -> Result<&'a InterfaceSpec, Status> {
    let names = || network.interfaces.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ");
    if !request.interface.is_empty() {
        let named = network.interfaces.iter().find(|it| it.name == request.interface);
        return named.ok_or_else(|| wrong(format!("interface {}: this gateway has {}", request.interface, names())));
    }
    let source = question.source.ip();
    let is_pod = policy.endpoint_at(source).is_some()
        || policy.is_backend_at(source)
        || policy.node_at(source).is_some()
        || policy.cluster().pods.iter().any(|net| net.contains(&source));
    // Whom policy doesn't know, but the way to whom leads inside, is there too.
    let is_inside = is_pod || words::leaves_inside(source, network);
    let found = network.interfaces.iter().find(|it| if is_inside { it.role.is_inside() } else { it.role.is_outside() });
    found.or(network.interfaces.first()).ok_or_else(|| Status::unavailable("the gateway has no interface"))
}

fn wrong(text: impl Into<String>) -> Status {
    Status::invalid_argument(text)
}

impl Question {
    fn understood(request: &TraceRequest) -> Result<Self, Status> {
        let address = |field: &str, text: &str| -> Result<IpAddr, Status> {
            text.parse().map_err(|_| wrong(format!("{field}: \"{text}\" is no IP address")))
        };
        let port = |field: &str, number: u32| -> Result<u16, Status> {
            u16::try_from(number).map_err(|_| wrong(format!("{field}: {number} is no port")))
        };
        let (source, destination) = (address("from", &request.source)?, address("to", &request.destination)?);
        if source.is_ipv4() != destination.is_ipv4() {
            return Err(wrong(format!("from {source} to {destination}: a packet has addresses of one family")));
        }
        let text = if request.protocol.is_empty() { "tcp" } else { &request.protocol };
        let mut number = filter::protocol(text).map_err(|error| wrong(error.to_string()))?;
        // Nobody means the other family's.
        if matches!(number, protocol::ICMP | protocol::ICMPV6) {
            number = if source.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
        }
        let known = [protocol::TCP, protocol::UDP, protocol::SCTP, protocol::ICMP, protocol::ICMPV6];
        if !known.contains(&number) {
            let name = filter::protocol_name(number);
            return Err(wrong(format!(
                "proto {name}: only tcp, udp, sctp, icmp and icmpv6 are translated, all else is dropped"
            )));
        }
        let is_echo = matches!(number, protocol::ICMP | protocol::ICMPV6);
        if is_echo && (request.source_port, request.destination_port) != (0, 0) {
            return Err(wrong("icmp has no ports: give addresses alone"));
        }
        let assumed = |field, number, assumed| match port(field, number)? {
            0 => Ok::<u16, Status>(assumed),
            port => Ok(port),
        };
        let ports = [
            assumed("from", request.source_port, ASSUMED[0])?,
            if is_echo { 0 } else { assumed("to", request.destination_port, ASSUMED[1])? },
        ];
        Ok(Self {
            source: (source, ports[0]).into(),
            destination: (destination, ports[1]).into(),
            protocol: number,
            later: request.later,
            length: request.length,
        })
    }

    /// The packet, as a neighbour would send it.
    fn packet(&self, mac: [u8; 6]) -> Result<Vec<u8>, Status> {
        let link = PacketBuilder::ethernet2(SOMEBODY, mac);
        let builder = match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => link.ipv4(from.octets(), to.octets(), TTL),
            (IpAddr::V6(from), IpAddr::V6(to)) => link.ipv6(from.octets(), to.octets(), TTL),
            _ => return Err(wrong("a packet has addresses of one family")),
        };
        let least = if self.source.is_ipv4() { 20 } else { 40 } + 20;
        let padding = vec![0; (self.length as usize).saturating_sub(least).min(1500)];
        let mut bytes = Vec::new();
        let written = self.write(builder, &padding, &mut bytes);
        written.map_err(|error| Status::internal(format!("cannot make the packet: {error}")))?;
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
                if self.later { segment.ack(1).write(into, payload) } else { segment.syn().write(into, payload) }
            }
            protocol::UDP => builder.udp(from, to).write(into, payload),
            protocol::ICMP => builder.icmpv4_echo_request(from, 1).write(into, payload),
            protocol::ICMPV6 => builder.icmpv6_echo_request(from, 1).write(into, payload),
            _ => {
                // An INIT (RFC 9260 section 3.3.2), whose checksum nobody asks for here.
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
