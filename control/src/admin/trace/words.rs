//! What was found, in sentences.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use vipgate_dataplane::command::SessionRecord;
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::explain::{Class, Fate, Found};
use vipgate_dataplane::ports::allocator::Outlook;
use vipgate_dataplane::snapshot::network::NextHop;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::shares::Owner;
use vipgate_dataplane::snapshot::spec::{EgressSpec, InterfaceSpec, NetworkSpec, Role, RouteTarget};
use vipgate_dataplane::stage::refuse::Word;
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::wire::icmp_error::Error;
use vipgate_dataplane::wire::protocol;

use super::{Ends, Question, Turn};
use crate::admin::filter::protocol_name;
use crate::admin::group;
use crate::admin::proto::TraceStep;
use crate::cli::output::span;
use crate::gateway::state::GatewayState;

/// The packet itself.
pub(super) fn arrives(question: &Question, interface: &InterfaceSpec, worker: usize) -> TraceStep {
    let side = match interface.role {
        Role::Inside => "inside",
        Role::Outside => "outside",
        Role::Both => "inside and outside",
    };
    let kind = match question.protocol {
        protocol::TCP if question.later => "tcp segment",
        protocol::TCP => "tcp SYN",
        protocol::UDP => "udp datagram",
        protocol::SCTP => "sctp INIT",
        _ => "icmp echo request",
    };
    let Question { source, destination, .. } = question;
    let ends = match question.protocol {
        protocol::ICMP | protocol::ICMPV6 => format!("{} -> {}", source.ip(), destination.ip()),
        _ => format!("{source} -> {destination}"),
    };
    step("arrives", format!("{kind} {ends} on {} ({side})", interface.name), worker)
}

/// It is captured.
pub(super) fn captured(worker: usize) -> TraceStep {
    step("steer", "captured from the kernel, by its addresses".to_owned(), worker)
}

/// It is not captured.
pub(super) fn left(question: &Question, worker: usize, state: &GatewayState) -> TraceStep {
    let policy = state.compiled.load();
    let source = question.source.ip();
    let why = if policy.endpoint_at(source).is_some() {
        "it stays on this link, or is for the gateway's own host"
    } else if longest(&policy.cluster().pods, source).is_some() && own(&policy, question.destination.ip()).is_some() {
        "no policy covers its sender, a pod, and it stays inside the cluster, or on this link"
    } else if policy.is_backend_at(source) {
        "no policy covers its sender, who doesn't serve on this port either"
    } else {
        "no policy covers its sender, and it is for no VIP"
    };
    step(
        "steer",
        format!("NOT CAPTURED: {why}; the gateway's kernel does with it what its own routes and rules say"),
        worker,
    )
}

fn step(stage: &str, text: String, worker: usize) -> TraceStep {
    TraceStep { stage: stage.to_owned(), text, worker: u32::try_from(worker).unwrap_or(u32::MAX) }
}

/// Whether the kernel's way to an address leads inside.
pub(super) fn leaves_inside(address: IpAddr, network: &NetworkSpec) -> bool {
    let best =
        network.routes.iter().filter(|route| route.prefix.contains(&address)).max_by_key(|it| it.prefix.prefix_len());
    let Some(RouteTarget::Via(hops)) = best.map(|route| &route.target) else { return false };
    let role = |hop: usize| hops.get(hop).and_then(|hop| network.interfaces.get(usize::from(hop.interface.0)));
    role(0).is_some_and(|interface| interface.role == Role::Inside)
}

/// What one worker found. What it has in common with the worker before is said once.
pub(super) fn tell(found: &Found, ends: &Ends, turn: Turn, state: &GatewayState, steps: &mut Vec<TraceStep>) {
    let mut say = |stage: &str, text: String| {
        steps.push(TraceStep { stage: stage.to_owned(), text, worker: found.worker.0.into() });
    };
    let told = Told { found, ends, policy: &found.view.policy, state };
    if turn != Turn::HandedOver {
        for (stage, text) in told.policy(turn) {
            say(stage, text);
        }
    }
    say("session", told.session());
    for (stage, text) in told.opening() {
        say(stage, text);
    }
    if let Some(text) = told.route() {
        say("route", text);
    }
    let (stage, text) = told.verdict();
    say(stage, text);
}

struct Told<'a> {
    found: &'a Found,
    ends: &'a Ends,
    policy: &'a Policy,
    state: &'a GatewayState,
}

type Said = (&'static str, String);

impl Told<'_> {
    /// Who sends, and to whom: what policy says of both.
    fn policy(&self, turn: Turn) -> Vec<Said> {
        let Ends { source, destination, .. } = *self.ends;
        let mut said = Vec::new();
        let endpoint = self.policy.endpoint_at(source.ip());
        if turn == Turn::Around {
            said.push(("around", format!("it comes from the VIP {} now", source.ip())));
        } else if let Some(endpoint) = endpoint {
            let spec = &self.policy.egress_of(endpoint).spec;
            said.push(("policy", format!("{} is covered by {}", named(source.ip(), &endpoint.name), spec.name)));
            said.push(("destination", rule(spec, self.policy, destination.ip())));
        } else if self.policy.vip_at(source.ip()).is_some() {
            said.push(("policy", format!("{} is a VIP: only what comes around may come from it", source.ip())));
        } else if self.policy.is_backend_at(source.ip()) {
            said.push(("policy", format!("no policy covers {}, which is a backend of a Service", source.ip())));
        } else {
            said.push(("policy", format!("no policy covers {}", source.ip())));
        }
        if turn != Turn::Around && endpoint.is_none() {
            said.extend(uncovered(self.policy, source.ip(), destination.ip()).map(|text| ("uncovered", text)));
        }
        if let Some(vip) = self.policy.vip_at(destination.ip()) {
            let what = if vip.retired { "was a VIP, and only sessions that have begun go on" } else { "is the VIP of" };
            let name = if vip.retired { "" } else { &*vip.name };
            said.push(("vip", format!("{} {what} {name}", vip.address).trim_end().to_owned()));
            let service = self.policy.service_at(destination, self.ends.protocol);
            let protocol = protocol_name(self.ends.protocol);
            said.push(match service {
                Some(service) => {
                    ("service", format!("{protocol} port {} is {}", destination.port(), service.spec.name))
                }
                None => ("service", format!("no Service has {protocol} port {} there", destination.port())),
            });
            if !vip.shares.list().is_empty() {
                let owner = vip.shares.owner_of_port(destination.port());
                said.push(("owner", format!("port {} belongs to {}", destination.port(), self.whose(owner))));
            }
        }
        if let Some(endpoint) = endpoint.filter(|endpoint| endpoint.home.is_some()) {
            let owner = self.whose(self.policy.owner_of(endpoint));
            said.push(("owner", format!("{} belongs to {owner}", source.ip())));
        }
        said
    }

    fn whose(&self, owner: Owner) -> String {
        match owner {
            Owner::This => format!("{}, this gateway", self.state.name),
            Owner::Other(_) => group::owner(self.policy, owner, self.state),
            Owner::Nobody => "nobody: none of those that may have it serves".to_owned(),
        }
    }

    /// The session that knows it.
    fn session(&self) -> String {
        let Some((record, fate)) = &self.found.session else {
            let whose = if self.found.worker.0 == 0 && self.state.workers.len() < 2 {
                String::new()
            } else {
                format!(" to worker {}", self.found.worker.0)
            };
            return format!("none is known{whose}");
        };
        let what = match fate {
            Fate::Known => "is known",
            Fate::Rechecked => "is known, and the policy that has changed since still wants it",
            Fate::Ended => "is known, but policy doesn't want it any more: this packet would end it",
            Fate::TakenOver => {
                "is a copy, which this packet would make live: its part of the VIP is this gateway's now"
            }
            Fate::LetGo => "was this gateway's, and is another one's now",
            Fate::BegunAnew => "is closed, and this packet begins it anew",
            Fate::CopyOf(owner) => return format!("{} is a copy: it belongs to {}", short(record), self.whose(*owner)),
        };
        let expires = span(record.expires_ms.into());
        format!(
            "{} {what}; {}, idle for {}, expires in {expires}",
            short(record),
            record.state.name(),
            span(record.idle_ms.into())
        )
    }

    /// What a new session would get.
    fn opening(&self) -> Vec<Said> {
        let mut said = Vec::new();
        let (found, translated) = (self.found, self.found.translated);
        if let Some(leaves) = found.leaves_with
            && let Some(vip) = self.policy.vips().find(|vip| vip.id == leaves.vip)
        {
            said.push(("vip", format!("it would leave as {} ({})", vip.address, vip.name)));
            let share = match leaves.blocks {
                None => format!("all {} blocks of ports are this gateway's", self.state.port_blocks),
                Some(blocks) => {
                    format!(
                        "{blocks} of {} blocks of ports are this gateway's for the endpoint",
                        self.state.port_blocks
                    )
                }
            };
            let outlook = match leaves.outlook {
                Outlook::Free => "a port toward this destination is free",
                Outlook::Exhausted if leaves.blocks.is_some() => {
                    "toward this destination NO PORT IS FREE in its SHARD; ports of other shards are not lent"
                }
                Outlook::Exhausted => "toward this destination NO PORT IS FREE here",
                Outlook::Crowded => "toward this destination nearly all ports are in use",
            };
            said.push((
                "ports",
                format!("{share}; worker {} has taken {} of them; {outlook}", found.worker.0, leaves.owned),
            ));
        }
        if found.is_reserved {
            let what = "the session table is full but for its reserve, and this session has a place there: its holder has less than its fair share";
            said.push(("table", what.to_owned()));
        }
        match found.class {
            Some(Class::Egress { revives: true }) => {
                let port = translated.map(|[source, _]| format!(" {source}")).unwrap_or_default();
                said.push((
                    "vip",
                    format!(
                        "a session with these ends has ended a moment ago: it is taken up again, with its port{port}"
                    ),
                ));
            }
            Some(Class::Inbound) => {
                if let Some([_, backend]) = translated {
                    let name = self.policy.endpoint_at(backend.ip()).map(|it| it.name.to_string()).unwrap_or_default();
                    said.push((
                        "backend",
                        format!(
                            "new sessions of this client go to {}, port {}",
                            named(backend.ip(), &name),
                            backend.port()
                        ),
                    ));
                }
            }
            Some(Class::Stateless) => said.push(("backend", "without a session: as policy alone says".to_owned())),
            Some(Class::Health) => {
                said.push(("service", "it is a health check, which the gateway answers itself".to_owned()));
            }
            Some(Class::Unchanged) => said.push(("policy", "it is routed as it is".to_owned())),
            Some(Class::Egress { revives: false } | Class::Known | Class::Peer) | None => {}
        }
        said
    }

    fn route(&self) -> Option<String> {
        let network = &self.found.view.network;
        let name = |id: vipgate_dataplane::io::InterfaceId| &network.interface(id).name;
        Some(match self.found.next_hop? {
            NextHop::Known(id) => {
                let hop = network.hop(id);
                let link =
                    if hop.link.is_some() { "its link address is known" } else { "its link address is NOT KNOWN yet" };
                format!("by {} on {}, {link}", hop.address, name(hop.interface))
            }
            NextHop::Unknown(out) => format!("on the link of {}, where the kernel has not heard of it yet", name(out)),
            NextHop::Hairpin => "to a VIP: it comes around".to_owned(),
            NextHop::Node(id) => {
                let node = self.policy.nodes().list().get(id.0 as usize);
                node.map_or_else(String::new, |node| {
                    format!("into the tunnel to node {} ({})", node.name, node.address)
                })
            }
        })
    }

    fn verdict(&self) -> Said {
        let found = self.found;
        let network = &found.view.network;
        let name = |id: vipgate_dataplane::io::InterfaceId| network.interface(id).name.clone();
        let ends =
            found.translated.map(|ends| format!(" as {}", spelled(ends, self.ends.protocol))).unwrap_or_default();
        let text = match found.verdict {
            Verdict::HandOff(worker) => return ("worker", format!("handed to worker {}", worker.0)),
            Verdict::Around => return ("around", format!("sent on{ends}, to be taken in again")),
            Verdict::Forward(out) if found.direction == Direction::PeerOut => {
                format!(
                    "sent through the tunnel to the gateway that has it, out of {}; ask that gateway what it does then",
                    name(out)
                )
            }
            Verdict::Forward(out) => format!("sent on{ends}, out of {}", name(out)),
            Verdict::Cut(out) => {
                format!("sent on in pieces{ends}, out of {}, which carries {} bytes", name(out), found.mtu)
            }
            Verdict::CutIntoTunnel => {
                format!("sent on in pieces{ends}, through the tunnel, which carries {} bytes", found.mtu)
            }
            Verdict::Answer(out) => format!("answered by the gateway itself, out of {}", name(out)),
            Verdict::Heard | Verdict::Park | Verdict::Requeue | Verdict::Undecided => {
                "taken in by the gateway, which says nothing".to_owned()
            }
            Verdict::Wait(_) => format!("sent on{ends} as soon as its neighbour has answered the kernel's ARP or NDP"),
            Verdict::Defer(_) => "kept for up to 1 s, until its share has changed hands".to_owned(),
            Verdict::Drop(reason) => {
                let hears = match found.hears {
                    None => "its sender hears nothing",
                    Some(Word::Reset) => "its sender hears a reset",
                    Some(Word::Error(error)) => icmp(error),
                };
                let meaning = reason.help().trim_end_matches('.');
                format!("DROPPED, {}: {meaning}; {hears}", reason.name())
            }
        };
        ("verdict", text)
    }
}

fn icmp(error: Error) -> &'static str {
    match error {
        Error::TtlExceeded => "its sender hears \"time to live exceeded\"",
        Error::NoRoute => "its sender hears \"network unreachable\"",
        Error::HostUnreachable => "its sender hears \"host unreachable\"",
        Error::PacketTooBig { .. } => "its sender hears how long a packet may be",
        Error::PortUnreachable => "its sender hears \"port unreachable\"",
        Error::Prohibited => "its sender hears \"administratively prohibited\"",
    }
}

fn short(record: &SessionRecord) -> String {
    let SessionRecord { endpoint, vip, remote, direction, .. } = record;
    format!("{} {endpoint} as {vip} with {remote}", direction.name())
}

fn named(address: IpAddr, name: &str) -> String {
    if name.is_empty() { address.to_string() } else { format!("{address} ({name})") }
}

fn spelled([source, destination]: [SocketAddr; 2], number: u8) -> String {
    let end = |end: SocketAddr| match number {
        protocol::ICMP | protocol::ICMPV6 => end.ip().to_string(),
        _ if end.port() == 0 && end.is_ipv6() => format!("[{}]:(any free port)", end.ip()),
        _ if end.port() == 0 => format!("{}:(any free port)", end.ip()),
        _ => end.to_string(),
    };
    format!("{} -> {}", end(source), end(destination))
}

/// The longest prefix that holds an address.
fn longest<'a>(nets: impl IntoIterator<Item = &'a IpNet>, address: IpAddr) -> Option<IpNet> {
    nets.into_iter().filter(|net| net.contains(&address)).max_by_key(|net| net.prefix_len()).copied()
}

/// The prefix of the cluster's own addresses that holds one.
fn own(policy: &Policy, address: IpAddr) -> Option<IpNet> {
    let cluster = policy.cluster();
    longest(cluster.pods.iter().chain(&cluster.others), address)
}

/// Which prefix decides about a destination, of a policy's and of the cluster's own: the longest.
fn rule(spec: &EgressSpec, policy: &Policy, destination: IpAddr) -> String {
    let wanted = longest(&spec.destinations, destination);
    let is_as_long = |net: &IpNet| wanted.is_none_or(|wanted| wanted.prefix_len() <= net.prefix_len());
    let Some(wanted) = wanted.filter(|_| !longest(&spec.excluded, destination).is_some_and(|net| is_as_long(&net)))
    else {
        return match longest(&spec.excluded, destination) {
            Some(net) => format!("{destination} is excluded by {net}: it is not translated"),
            None => format!("{destination} is in none of the policy's destinations: it is not translated"),
        };
    };
    match own(policy, destination).filter(|own| own.prefix_len() > wanted.prefix_len()) {
        Some(own) if policy.vip_at(destination).is_none_or(|vip| vip.retired) => {
            format!("{destination} is inside the cluster, by {own}: it is not translated")
        }
        _ => format!("{destination} is translated, by {wanted}"),
    }
}

/// What becomes of a pod that no policy covers, where it is known to be one.
fn uncovered(policy: &Policy, source: IpAddr, destination: IpAddr) -> Option<String> {
    let cluster = policy.cluster();
    let pods = longest(&cluster.pods, source)?;
    Some(match own(policy, destination) {
        _ if !cluster.drop_uncovered => {
            format!("it is a pod's address, by {pods}, and goes on as it is (uncovered: pass)")
        }
        Some(own) => format!("it is a pod's address, by {pods}, and {destination} is inside the cluster, by {own}"),
        None => format!("it is a pod's address, by {pods}, and doesn't leave the cluster (uncovered: drop)"),
    })
}
