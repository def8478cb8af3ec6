//! Several gateways that serve the same VIPs: tunnels between them are carried by hand, and so is what they tell each other.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::command::{Command, CopyChunk, PurgeChunk};
use vipgate_dataplane::copies::worker_of;
use vipgate_dataplane::io::{InterfaceId, PacketIo};
use vipgate_dataplane::ports::BlockId;
use vipgate_dataplane::session::image::Image;
use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec, MembersSpec};
use vipgate_dataplane::snapshot::tunnels::Mark;
use vipgate_dataplane::wire::tunnel_tag::TagKey;
use vipgate_dataplane::wire::vxlan::Outer;

use super::*;

/// The replication epoch that begins when gateways first hear of each other.
const FIRST_EPOCH: u64 = 2;

/// A gateway's place in a cluster.
pub type Number = usize;

pub struct Cluster {
    pub gateways: Vec<Gateway>,
    pub members: Vec<Standing>,
    /// Frames that went from one gateway to another.
    pub tunnelled: u64,
    round: u8,
    /// The view since which these serve, as all see it.
    pub since: u64,
    /// The replication epoch in which one has last told another one all; the first one, if it isn't here.
    told: HashMap<(Number, Number), u64>,
    serving: Vec<bool>,
    /// What is told is lost.
    pub deaf: bool,
    /// How often each has started: each time it has another key. 0: it is of a version that has none.
    pub starts: Vec<u8>,
    /// Whether what has no tag is refused.
    pub required: bool,
    v6: bool,
}

/// How a gateway stands, as all others see it.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    pub serving: bool,
    pub linked: bool,
    pub may_open: bool,
}

pub fn name(number: Number) -> Arc<str> {
    format!("gw-{number}").into()
}

/// The key of what one gateway sends another one, as both have made it of what both show.
pub fn tag_key(from: (Number, u8), to: (Number, u8)) -> TagKey {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&[from.0 as u8, from.1, to.0 as u8, to.1]);
    TagKey::new(&bytes)
}

/// A packet as the network brings it in a tunnel from this address; without a key it has no tag.
pub fn tunnelled(
    from: SocketAddr,
    to: SocketAddr,
    mark: Mark,
    key: Option<&TagKey>,
    mac: [u8; 6],
    inner: &[u8],
) -> Vec<u8> {
    let outer = Outer::new(from.ip(), to).unwrap();
    let mut frame = vec![0; outer.length()];
    outer.write(&mut frame, inner.len() as u16, mark.vni(), 7, 0);
    frame[..6].copy_from_slice(&mac);
    frame[6..12].copy_from_slice(&POD_MAC);
    frame.extend(inner);
    if let Some(key) = key {
        key.seal(&mut frame[outer.length()..], mark.vni());
    }
    frame
}

pub fn tunnel(number: Number, v6: bool) -> SocketAddr {
    if v6 { at(&format!("[fd00:2::{}]:4790", number + 1)) } else { at(&format!("10.2.0.{}:4790", number + 1)) }
}

/// The policy of [`super::policy`] for several gateways: 192.0.2.10 and its twin are announced by all, blocks in turn; 192.0.2.11 is the
/// second one's. Pods .5 are at home at the first one, .6 and .21 at the second one.
pub fn shared_policy(count: usize) -> PolicySet {
    let mut set = policy();
    let backups = |home: Number| (1..count).map(|step| name((home + step) % count)).collect::<Vec<_>>();
    for vip in &mut set.vips {
        if vip.address == ip("192.0.2.11") {
            vip.shares = vec![ShareSpec { gateway: name(1), blocks: None, backups: backups(1) }];
            continue;
        }
        vip.announce = Announce::Bgp;
        let share = |home: Number| {
            let mut blocks = BlockSet::default();
            (0..1024)
                .filter(|block| usize::from(*block) % count == home)
                .for_each(|block| blocks.insert(BlockId(block)));
            ShareSpec { gateway: name(home), blocks: Some(Arc::new(blocks)), backups: backups(home) }
        };
        vip.shares = (0..count).map(share).collect();
    }
    for endpoint in &mut set.endpoints {
        let is_first = endpoint.address.to_string().ends_with('5');
        endpoint.gateway = Some(name(usize::from(!is_first)));
    }
    set
}

/// Exactly one packet left, by this gateway and interface.
pub fn only(sent: Vec<(Number, InterfaceId, Vec<u8>)>, from: Number, out: InterfaceId, cluster: &Cluster) -> Vec<u8> {
    assert_eq!(sent.len(), 1, "{:?}", cluster.drops());
    let (number, interface, bytes) = sent.into_iter().next().unwrap();
    assert_eq!((number, interface), (from, out));
    bytes
}

/// The far side of most sessions.
pub const FAR: &str = "198.51.100.10:443";

pub fn three() -> Cluster {
    Cluster::new(3, &Setup::default())
}

impl Cluster {
    pub fn new(count: usize, setup: &Setup) -> Self {
        Self::over(count, setup, false)
    }

    /// The same with tunnels over IPv6 or IPv4.
    pub fn over(count: usize, setup: &Setup, v6: bool) -> Self {
        let network = Self::network(count, v6);
        let set = shared_policy(count);
        let gateways = (0..count).map(|_| Gateway::with(setup, network.clone(), &set)).collect();
        let fine = Standing { serving: true, linked: true, may_open: true };
        let mut cluster = Self {
            gateways,
            members: vec![fine; count],
            tunnelled: 0,
            round: 1,
            since: 0,
            told: HashMap::new(),
            serving: Vec::new(),
            deaf: false,
            starts: vec![1; count],
            required: true,
            v6,
        };
        cluster.agree();
        cluster
    }

    /// The network of each of them.
    pub fn network(count: usize, v6: bool) -> NetworkSpec {
        let mut network = network();
        let prefix = if v6 { "fd00:2::/64" } else { "10.2.0.0/24" };
        let via = RouteTarget::Via(vec![HopSpec { interface: INSIDE, gateway: None }]);
        network.routes.push(RouteSpec { prefix: prefix.parse().unwrap(), target: via });
        for number in 0..count {
            let address = tunnel(number, v6).ip();
            network.neighbours.push(NeighbourSpec { interface: INSIDE, address, mac: INSIDE_MAC });
        }
        network
    }

    /// All gateways hear how all stand.
    pub fn agree(&mut self) {
        self.count();
        (0..self.gateways.len()).for_each(|number| self.hear(number));
    }

    /// Whether others serve than before.
    fn count(&mut self) {
        let serving: Vec<bool> = self.members.iter().map(|it| it.serving).collect();
        if serving != self.serving {
            (self.since, self.serving) = (self.since + 1, serving);
        }
    }

    /// One of them does.
    pub fn hear(&mut self, number: Number) {
        let spec = self.seen_by(number);
        self.tell_members(number, &spec);
    }

    /// All gateways as one of them sees them.
    pub fn seen_by(&self, number: Number) -> MembersSpec {
        let members = self.members.clone();
        let all = members.iter().enumerate().map(|(at, standing)| MemberSpec {
            name: name(at),
            tunnel: Some(tunnel(at, self.v6)),
            serving: standing.serving,
            linked: standing.linked && at != number,
            may_open: standing.may_open,
            authentication: self.authentication(number, at),
        });
        // Here views change for no other reason than that others serve.
        let (since, serving_changes) = (self.since, self.since);
        MembersSpec { this: Some(name(number)), gateways: all.collect(), since, serving_changes }
    }

    /// One of them sees all so.
    pub fn tell_members(&mut self, number: Number, spec: &MembersSpec) {
        let gateway = &mut self.gateways[number];
        let snapshot = gateway.builder.with_members(spec);
        gateway.publisher.publish(snapshot);
    }

    /// All gateways have a policy that differs in something from the one that they began with.
    pub fn change_policy(&mut self, change: impl FnOnce(&mut PolicySet)) {
        let mut set = shared_policy(self.gateways.len());
        change(&mut set);
        self.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    }

    /// How one authenticates what it sends another one, and that one what it sends.
    fn authentication(&self, this: Number, other: Number) -> Authentication {
        let (own, theirs) = (self.starts[this], self.starts[other]);
        if this == other {
            return Authentication::None;
        }
        if own == 0 || theirs == 0 {
            return if self.required && own > 0 { Authentication::Refused } else { Authentication::None };
        }
        let taken = |start: u8| (start > 0).then(|| tag_key((other, start), (this, own)));
        Authentication::Tagged {
            sent: tag_key((this, own), (other, theirs)),
            taken: [taken(theirs), taken(theirs - 1)],
        }
    }

    /// A packet that a gateway has sent another one, in their tunnel, as it would be if both know each other's last start.
    pub fn sent_on(&self, from: Number, to: Number, mark: Mark, inner: &[u8]) -> Vec<u8> {
        let (own, theirs) = (self.starts[from], self.starts[to]);
        let key = (own > 0 && theirs > 0).then(|| tag_key((from, own), (to, theirs)));
        tunnelled(tunnel(from, self.v6), tunnel(to, self.v6), mark, key.as_ref(), INSIDE_MAC, inner)
    }

    /// A packet arrives at a gateway; what leaves the cluster because of it, and where.
    pub fn arrives(
        &mut self,
        number: Number,
        interface: InterfaceId,
        packet: &[u8],
    ) -> Vec<(Number, InterfaceId, Vec<u8>)> {
        let sent = self.gateways[number].arrives(0, interface, packet);
        self.carry(sent.into_iter().map(|(out, bytes)| (number, out, bytes)).collect())
    }

    /// Carries tunnel packets from gateway to gateway until none is left.
    pub fn carry(&mut self, sent: Vec<(Number, InterfaceId, Vec<u8>)>) -> Vec<(Number, InterfaceId, Vec<u8>)> {
        let (mut outside, mut open) = (Vec::new(), sent);
        for _ in 0..8 {
            let mut next = Vec::new();
            for (from, out, bytes) in open {
                match self.tunnel_to(&bytes) {
                    Some(to) => {
                        self.tunnelled += 1;
                        let sent = self.gateways[to].arrives(0, out, &bytes);
                        next.extend(sent.into_iter().map(|(out, bytes)| (to, out, bytes)));
                    }
                    None => outside.push((from, out, bytes)),
                }
            }
            open = next;
        }
        assert!(open.is_empty(), "packets travel without end");
        outside
    }

    fn tunnel_to(&self, bytes: &[u8]) -> Option<Number> {
        let is_udp = matches!((bytes[12], bytes[13], bytes[23], bytes[20]), (8, 0, 17, _) | (0x86, 0xdd, _, 17));
        let port_at = if bytes[12] == 8 { 36 } else { 56 };
        let is_tunnel = is_udp && bytes.get(port_at..port_at + 2) == Some(&4790_u16.to_be_bytes()[..]);
        let to = is_tunnel.then(|| ends(bytes).1)?;
        (0..self.gateways.len()).find(|number| tunnel(*number, self.v6) == to)
    }

    /// Lets time pass for all, and lets them tell each other.
    pub fn pass(&mut self, ms: u32) {
        let mut left = ms;
        while left > 0 {
            let step = left.min(50);
            left -= step;
            for gateway in &mut self.gateways {
                gateway.now = gateway.now.plus(step);
                gateway.turn();
            }
            self.tell();
        }
    }

    /// What gateways have to tell each other arrives.
    pub fn tell(&mut self) {
        for from in 0..self.gateways.len() {
            for outlet in self.gateways[from].outlets.clone() {
                while let Some(news) = outlet.pop() {
                    let to = self.number(from, news.to);
                    if self.deaf || !self.members[to].linked {
                        continue;
                    }
                    self.take(from, to, vec![news.image], self.round);
                    outlet.acknowledge(news.to, news.number);
                }
            }
        }
        self.gateways.iter_mut().for_each(Gateway::turn);
    }

    fn number(&self, at: Number, id: vipgate_dataplane::snapshot::members::GatewayId) -> Number {
        (0..self.gateways.len()).find(|number| self.gateways[at].builder.gateway(&name(*number)) == Some(id)).unwrap()
    }

    fn take(&mut self, from: Number, to: Number, images: Vec<Image>, round: u8) {
        let gateway = &mut self.gateways[to];
        let from = gateway.builder.gateway(&name(from)).unwrap();
        for image in images {
            let snapshot = gateway.builder.snapshot();
            let worker = worker_of(&image, &snapshot.policy, gateway.workers.len() as u8);
            let (reply, _done) = bounded(1);
            gateway.commands[usize::from(worker.0)]
                .send(Command::Take { images: vec![image], round, from, reply })
                .unwrap();
            gateway.turn();
        }
    }

    /// One gateway tells another one all sessions whose copies belong there; that one forgets what isn't among them.
    pub fn tell_all(&mut self, from: Number, to: Number) -> usize {
        // As gateways number them: 0 stands for no round.
        self.round = self.round % 15 + 1;
        let id = self.gateways[from].builder.gateway(&name(to)).unwrap();
        let (mut all, mut epoch) = (Vec::new(), 0);
        for worker in 0..self.gateways[from].workers.len() {
            let mut cursor = Some(0);
            while cursor.is_some() {
                let (reply, answer) = bounded(1);
                let told_by = self.told_by(from, to);
                let images = Vec::with_capacity(64);
                let begun_by = (self.since, None);
                let chunk = CopyChunk { to: id, told_by, cursor, images, begun_by, listed_by: (0, 0) };
                self.gateways[from].commands[worker].send(Command::Copies { chunk, reply }).unwrap();
                self.gateways[from].turn();
                let chunk = answer.try_recv().unwrap();
                (cursor, epoch) = (chunk.cursor, chunk.listed_by.0);
                all.extend(chunk.images);
            }
        }
        let count = all.len();
        self.take(from, to, all, self.round);
        self.told.insert((from, to), epoch);
        assert!(self.forget_unnamed(from, to, self.since));
        count
    }

    /// The replication epoch in which one has last told another one all.
    fn told_by(&self, from: Number, to: Number) -> u64 {
        self.told.get(&(from, to)).copied().unwrap_or(FIRST_EPOCH)
    }

    /// A gateway forgets what another one hasn't named in this round, which began by a view; whether it still holds.
    pub fn forget_unnamed(&mut self, from: Number, to: Number, view: u64) -> bool {
        let mut holds = true;
        let owner = self.gateways[to].builder.gateway(&name(from)).unwrap();
        for worker in 0..self.gateways[to].workers.len() {
            let mut cursor = Some(0);
            while cursor.is_some() {
                let (reply, answer) = bounded(1);
                let (round, told_by) = (self.round, self.told_by(to, from));
                let (forgotten, outdated, spared) = (0, false, false);
                let chunk = PurgeChunk { owner, round, view, told_by, cursor, forgotten, outdated, spared };
                self.gateways[to].commands[worker].send(Command::Purge { chunk, reply }).unwrap();
                self.gateways[to].turn();
                let chunk = answer.try_recv().unwrap();
                cursor = chunk.cursor;
                holds &= !chunk.outdated;
            }
        }
        holds
    }

    /// A gateway dies: it takes part in nothing any more, and the others hear of it.
    pub fn kill(&mut self, number: Number) {
        self.members[number] = Standing { serving: false, linked: false, may_open: true };
        self.count();
        for other in (0..self.gateways.len()).filter(|other| *other != number) {
            self.hear(other);
        }
    }

    pub fn copies(&self, number: Number) -> u64 {
        self.gateways[number].workers.iter().map(|worker| u64::from(worker.tables().sessions.copies())).sum()
    }

    pub fn drops(&self) -> HashMap<DropReason, u64> {
        let mut all = HashMap::new();
        for gateway in &self.gateways {
            gateway.drops().into_iter().for_each(|(reason, count)| *all.entry(reason).or_default() += count);
        }
        all
    }
}
