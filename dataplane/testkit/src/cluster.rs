//! A group of gateways with shared VIPs: the test delivers tunnel packets and session replication between them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::{GatewayId, InterfaceId};
use vipgate_dataplane::flow::tunnel_metadata::TunnelMetadata;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::{
    Announce, BlockSet, HopSpec, NeighborSpec, NetworkSpec, RouteSpec, RouteTarget, ShardSpec,
};
use vipgate_dataplane::ports::BlockId;
use vipgate_dataplane::replication::apply::worker_of;
use vipgate_dataplane::replication::round::{PurgeChunk, RecordChunk};
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::wire::tunnel_auth::TagKey;
use vipgate_dataplane::wire::vxlan::OuterHeaders;
use vipgate_dataplane::worker::command::Command;

use crate::{Gateway, INSIDE, INSIDE_MAC, OUTSIDE, POD_MAC, PolicySet, Setup, at, ends, ip, network, policy, tcp};

/// The replication epoch once gateways have their first common membership view.
const FIRST_EPOCH: u64 = 2;

/// Index of a gateway in a cluster.
pub type GatewayIndex = usize;

/// Gateways with shared VIPs.
#[derive(Debug)]
pub struct Cluster {
    pub gateways: Vec<Gateway>,
    /// Membership state of each.
    pub members: Vec<MemberState>,
    /// Frames sent from one gateway to another.
    pub tunneled: u64,
    round: u8,
    /// The membership view since which this set of gateways is active, the same at every gateway.
    pub active_since: u64,
    /// The replication epoch of the last full sync by (sender, receiver); [`FIRST_EPOCH`] if absent.
    acknowledged: HashMap<(GatewayIndex, GatewayIndex), u64>,
    active: Vec<bool>,
    /// What each gateway has released by policy, as the others know it.
    pub policy_releases: Vec<PolicyRelease>,
    /// Drops all incremental replication.
    pub drops_replication: bool,
    /// How often each gateway process has started; each start has a new tunnel key. 0: without tunnel
    /// authentication.
    pub process_starts: Vec<u8>,
    /// Whether tunnel packets without a tag are rejected.
    pub requires_authentication: bool,
    v6: bool,
}

/// Membership state of a gateway, the same in every gateway's view.
#[derive(Clone, Copy, Debug)]
pub struct MemberState {
    /// It is an active member.
    pub active: bool,
    /// The other gateways are connected to it.
    pub connected: bool,
    /// It may open sessions.
    pub may_open: bool,
}

/// Name of a gateway.
pub fn name(number: GatewayIndex) -> Arc<str> {
    format!("gw-{number}").into()
}

/// The tunnel key of one direction between two processes, as both derive it from their public keys.
pub fn tag_key(from: (GatewayIndex, u8), to: (GatewayIndex, u8)) -> TagKey {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&[from.0 as u8, from.1, to.0 as u8, to.1]);
    TagKey::new(&bytes)
}

/// A tunnel packet on the wire; without a key it has no tag.
pub fn tunnel_packet(
    from: SocketAddr,
    to: SocketAddr,
    mark: TunnelMetadata,
    key: Option<&TagKey>,
    mac: [u8; 6],
    inner: &[u8],
) -> Vec<u8> {
    let outer = OuterHeaders::new(from.ip(), to).unwrap();
    let mut frame = vec![0; outer.length()];
    outer.write(&mut frame, inner.len() as u16, mark.vni(), 7, 0);
    frame[..6].copy_from_slice(&mac);
    frame[6..12].copy_from_slice(&POD_MAC);
    frame.extend(inner);
    if let Some(key) = key {
        key.write_tag(&mut frame[outer.length()..], mark.vni());
    }
    frame
}

/// Tunnel address of a gateway.
pub fn tunnel_address(number: GatewayIndex, v6: bool) -> SocketAddr {
    if v6 { at(&format!("[fd00:2::{}]:4790", number + 1)) } else { at(&format!("10.2.0.{}:4790", number + 1)) }
}

/// The policy of [`policy`] for several gateways: 192.0.2.10 and 2001:db8::10 are announced by all, with port
/// blocks assigned round-robin; gateway 1 owns 192.0.2.11. Gateway 0 is home to pods .5, gateway 1 to .6 and .21.
pub fn shared_policy(count: usize) -> PolicySet {
    let mut set = policy();
    let backups = |home: GatewayIndex| (1..count).map(|step| name((home + step) % count)).collect::<Vec<_>>();
    for vip in &mut set.vips {
        if vip.address == ip("192.0.2.11") {
            vip.shards = vec![ShardSpec { gateway: name(1), blocks: None, backups: backups(1) }];
            continue;
        }
        vip.announce = Announce::Bgp;
        let share = |home: GatewayIndex| {
            let mut blocks = BlockSet::default();
            (0..1024)
                .filter(|block| usize::from(*block) % count == home)
                .for_each(|block| blocks.insert(BlockId(block)));
            ShardSpec { gateway: name(home), blocks: Some(Arc::new(blocks)), backups: backups(home) }
        };
        vip.shards = (0..count).map(share).collect();
    }
    for endpoint in &mut set.endpoints {
        let is_first = endpoint.address.to_string().ends_with('5');
        endpoint.gateway = Some(name(usize::from(!is_first)));
    }
    set
}

/// Asserts that exactly one packet left, from this gateway and interface.
#[track_caller]
pub fn expect_one(
    sent: Vec<(GatewayIndex, InterfaceId, Vec<u8>)>,
    from: GatewayIndex,
    out: InterfaceId,
    cluster: &Cluster,
) -> Vec<u8> {
    assert_eq!(sent.len(), 1, "{:?}", cluster.drops());
    let (number, interface, bytes) = sent.into_iter().next().unwrap();
    assert_eq!((number, interface), (from, out));
    bytes
}

/// The remote endpoint of most sessions.
pub const REMOTE: &str = "198.51.100.10:443";

/// A cluster of three gateways.
pub fn three_gateways() -> Cluster {
    Cluster::new(3, &Setup::default())
}

impl Cluster {
    /// A cluster with tunnels over IPv4.
    pub fn new(count: usize, setup: &Setup) -> Self {
        Self::with_tunnel_family(count, setup, false)
    }

    /// The same with tunnels over IPv6 or IPv4.
    pub fn with_tunnel_family(count: usize, setup: &Setup, v6: bool) -> Self {
        let network = Self::network(count, v6);
        let set = shared_policy(count);
        let gateways = (0..count).map(|_| Gateway::with(setup, network.clone(), &set)).collect();
        let healthy = MemberState { active: true, connected: true, may_open: true };
        let mut cluster = Self {
            gateways,
            members: vec![healthy; count],
            tunneled: 0,
            round: 1,
            active_since: 0,
            acknowledged: HashMap::new(),
            active: Vec::new(),
            policy_releases: vec![PolicyRelease::NotAwaited; count],
            drops_replication: false,
            process_starts: vec![1; count],
            requires_authentication: true,
            v6,
        };
        cluster.publish_views();
        cluster
    }

    /// The network configuration of each gateway.
    pub fn network(count: usize, v6: bool) -> NetworkSpec {
        let mut network = network();
        let prefix = if v6 { "fd00:2::/64" } else { "10.2.0.0/24" };
        let via = RouteTarget::Via(vec![HopSpec { interface: INSIDE, gateway: None }]);
        network.routes.push(RouteSpec { prefix: prefix.parse().unwrap(), target: via });
        for number in 0..count {
            let address = tunnel_address(number, v6).ip();
            network.neighbors.push(NeighborSpec { interface: INSIDE, address, mac: INSIDE_MAC });
        }
        network
    }

    /// Publishes the membership view at every gateway.
    pub fn publish_views(&mut self) {
        self.update_active();
        (0..self.gateways.len()).for_each(|number| self.publish_view(number));
    }

    /// Advances the view if the set of active gateways has changed.
    fn update_active(&mut self) {
        let active: Vec<bool> = self.members.iter().map(|it| it.active).collect();
        if active != self.active {
            (self.active_since, self.active) = (self.active_since + 1, active);
        }
    }

    /// Publishes the membership view at one gateway.
    pub fn publish_view(&mut self, number: GatewayIndex) {
        let spec = self.view_of(number);
        self.publish_members(number, &spec);
    }

    /// The membership view as one gateway has it.
    pub fn view_of(&self, this: GatewayIndex) -> MembersSpec {
        let members = self.members.clone();
        let all = members.iter().enumerate().map(|(number, state)| MemberSpec {
            name: name(number),
            tunnel: Some(tunnel_address(number, self.v6)),
            active: state.active,
            connected: state.connected && number != this,
            may_open: state.may_open,
            policy_release: self.policy_releases[number].clone(),
            authentication: self.authentication(this, number),
        });
        // Here views change only when the set of active gateways does.
        let active_since = self.active_since;
        MembersSpec { this: Some(name(this)), gateways: all.collect(), active_since, active_changes: active_since }
    }

    /// Publishes a given membership view at one gateway.
    pub fn publish_members(&mut self, number: GatewayIndex, spec: &MembersSpec) {
        let gateway = &mut self.gateways[number];
        let snapshot = gateway.builder.with_members(spec);
        gateway.publisher.publish(snapshot);
    }

    /// Publishes a variation of the initial policy at every gateway.
    pub fn change_policy(&mut self, change: impl FnOnce(&mut PolicySet)) {
        let mut set = shared_policy(self.gateways.len());
        change(&mut set);
        self.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    }

    /// Tunnel authentication between two gateways, as seen by the first one.
    fn authentication(&self, this: GatewayIndex, other: GatewayIndex) -> Authentication {
        let (own_start, peer_start) = (self.process_starts[this], self.process_starts[other]);
        if this == other {
            return Authentication::None;
        }
        if own_start == 0 || peer_start == 0 {
            return if self.requires_authentication && own_start > 0 {
                Authentication::Rejected
            } else {
                Authentication::None
            };
        }
        let receive_key = |start: u8| (start > 0).then(|| tag_key((other, start), (this, own_start)));
        Authentication::Tagged {
            transmit_key: tag_key((this, own_start), (other, peer_start)),
            receive_keys: [receive_key(peer_start), receive_key(peer_start - 1)],
        }
    }

    /// A tunnel packet between two gateways, tagged with the key of their current processes.
    pub fn peer_packet(&self, from: GatewayIndex, to: GatewayIndex, mark: TunnelMetadata, inner: &[u8]) -> Vec<u8> {
        let (own_start, peer_start) = (self.process_starts[from], self.process_starts[to]);
        let key = (own_start > 0 && peer_start > 0).then(|| tag_key((from, own_start), (to, peer_start)));
        tunnel_packet(tunnel_address(from, self.v6), tunnel_address(to, self.v6), mark, key.as_ref(), INSIDE_MAC, inner)
    }

    /// A gateway receives a packet; returns what leaves the cluster because of it, and where.
    pub fn receive(
        &mut self,
        number: GatewayIndex,
        interface: InterfaceId,
        packet: &[u8],
    ) -> Vec<(GatewayIndex, InterfaceId, Vec<u8>)> {
        let sent = self.gateways[number].receive(0, interface, packet);
        self.deliver_tunneled(sent.into_iter().map(|(out, bytes)| (number, out, bytes)).collect())
    }

    /// A gateway receives a pod's packet, which must leave outside, at its owner; returns it as sent.
    #[track_caller]
    pub fn pod_sends(&mut self, number: GatewayIndex, owner: GatewayIndex, packet: &[u8]) -> Vec<u8> {
        let sent = self.receive(number, INSIDE, packet);
        expect_one(sent, owner, OUTSIDE, self)
    }

    /// A gateway receives a packet from outside, which must reach a pod from its owner; returns it as the pod receives it.
    #[track_caller]
    pub fn remote_sends(&mut self, number: GatewayIndex, owner: GatewayIndex, packet: &[u8]) -> Vec<u8> {
        let sent = self.receive(number, OUTSIDE, packet);
        expect_one(sent, owner, INSIDE, self)
    }

    /// A pod's handshake with a remote, at one gateway that owns it; returns the pod's external address and port.
    pub fn connect(&mut self, number: GatewayIndex, pod: SocketAddr, remote: SocketAddr) -> SocketAddr {
        let vip = ends(&self.pod_sends(number, number, &tcp(pod, remote, "S", 1000, 0))).0;
        self.remote_sends(number, number, &tcp(remote, vip, "SA", 5000, 1001));
        self.pod_sends(number, number, &tcp(pod, remote, "A", 1001, 5001));
        vip
    }

    /// Delivers tunnel packets between gateways until none is left.
    pub fn deliver_tunneled(
        &mut self,
        sent: Vec<(GatewayIndex, InterfaceId, Vec<u8>)>,
    ) -> Vec<(GatewayIndex, InterfaceId, Vec<u8>)> {
        let (mut outside, mut pending) = (Vec::new(), sent);
        for _ in 0..8 {
            let mut next = Vec::new();
            for (from, out, bytes) in pending {
                match self.tunnel_destination(&bytes) {
                    Some(to) => {
                        self.tunneled += 1;
                        let sent = self.gateways[to].receive(0, out, &bytes);
                        next.extend(sent.into_iter().map(|(out, bytes)| (to, out, bytes)));
                    }
                    None => outside.push((from, out, bytes)),
                }
            }
            pending = next;
        }
        assert!(pending.is_empty(), "packets loop between gateways");
        outside
    }

    fn tunnel_destination(&self, bytes: &[u8]) -> Option<GatewayIndex> {
        let is_udp = matches!((bytes[12], bytes[13], bytes[23], bytes[20]), (8, 0, 17, _) | (0x86, 0xdd, _, 17));
        let port_at = if bytes[12] == 8 { 36 } else { 56 };
        let is_tunnel = is_udp && bytes.get(port_at..port_at + 2) == Some(&4790_u16.to_be_bytes()[..]);
        let to = is_tunnel.then(|| ends(bytes).1)?;
        (0..self.gateways.len()).find(|number| tunnel_address(*number, self.v6) == to)
    }

    /// Advances the clock of every gateway, with replication.
    pub fn advance(&mut self, ms: u32) {
        let mut left = ms;
        while left > 0 {
            let step = left.min(50);
            left -= step;
            for gateway in &mut self.gateways {
                gateway.now = gateway.now.plus(step);
                gateway.turn();
            }
            self.replicate();
        }
    }

    /// Delivers all pending replication records.
    pub fn replicate(&mut self) {
        for from in 0..self.gateways.len() {
            for sender in self.gateways[from].replication_senders.clone() {
                while let Some(outgoing) = sender.pop() {
                    let to = self.index_of(from, outgoing.to);
                    if self.drops_replication || !self.members[to].connected {
                        continue;
                    }
                    self.apply_records(from, to, vec![outgoing.record], self.round);
                    sender.acknowledge(outgoing.to, outgoing.number);
                }
            }
        }
        self.gateways.iter_mut().for_each(Gateway::turn);
    }

    fn index_of(&self, at: GatewayIndex, id: GatewayId) -> GatewayIndex {
        (0..self.gateways.len())
            .find(|number| self.gateways[at].builder.gateway_id(&name(*number)) == Some(id))
            .unwrap()
    }

    fn apply_records(&mut self, from: GatewayIndex, to: GatewayIndex, records: Vec<ReplicationRecord>, round: u8) {
        let gateway = &mut self.gateways[to];
        let source = gateway.builder.gateway_id(&name(from)).unwrap();
        for record in records {
            let snapshot = gateway.builder.snapshot();
            let worker = worker_of(&record, &snapshot.policy, gateway.workers.len() as u8);
            let (reply, _done) = bounded(1);
            gateway.commands[usize::from(worker.0)]
                .send(Command::ApplyRecords { records: vec![record], round, source, reply })
                .unwrap();
            gateway.turn();
        }
    }

    /// Full sync: sends all records that `to` is to have; it then purges standby sessions that weren't among them.
    pub fn full_sync(&mut self, from: GatewayIndex, to: GatewayIndex) -> usize {
        // Rounds are numbered 1 to 15; 0 means none.
        self.round = self.round % 15 + 1;
        let target = self.gateways[from].builder.gateway_id(&name(to)).unwrap();
        let (mut all, mut epoch, mut policy) = (Vec::new(), 0, None);
        for worker in 0..self.gateways[from].workers.len() {
            let mut cursor = Some(0);
            while cursor.is_some() {
                let (reply, response) = bounded(1);
                let acknowledged_epoch = self.acknowledged_epoch(from, to);
                let records = Vec::with_capacity(64);
                let expected = (self.active_since, None);
                let chunk = RecordChunk {
                    target,
                    acknowledged_epoch,
                    cursor,
                    records,
                    expected,
                    policy: policy.clone(),
                    observed: (0, 0),
                };
                self.gateways[from].commands[worker].send(Command::ListRecords { chunk, reply }).unwrap();
                self.gateways[from].turn();
                let chunk = response.try_recv().unwrap();
                (cursor, epoch, policy) = (chunk.cursor, chunk.observed.0, chunk.policy);
                all.extend(chunk.records);
            }
        }
        let count = all.len();
        self.apply_records(from, to, all, self.round);
        self.acknowledged.insert((from, to), epoch);
        assert!(self.purge_stale(from, to, self.active_since));
        count
    }

    /// The replication epoch of the last full sync between two gateways.
    fn acknowledged_epoch(&self, from: GatewayIndex, to: GatewayIndex) -> u64 {
        self.acknowledged.get(&(from, to)).copied().unwrap_or(FIRST_EPOCH)
    }

    /// Purges standby sessions that the current round didn't include; returns false if the round began under an
    /// outdated view.
    pub fn purge_stale(&mut self, from: GatewayIndex, to: GatewayIndex, view: u64) -> bool {
        let mut is_current = true;
        let owner = self.gateways[to].builder.gateway_id(&name(from)).unwrap();
        for worker in 0..self.gateways[to].workers.len() {
            let policy = self.gateways[from].builder.snapshot().policy.members().policy_version().clone();
            let mut chunk = PurgeChunk::first(owner, (self.round, view, policy), self.acknowledged_epoch(to, from));
            while chunk.cursor.is_some() {
                let (reply, response) = bounded(1);
                self.gateways[to].commands[worker].send(Command::PurgeStandby { chunk, reply }).unwrap();
                self.gateways[to].turn();
                chunk = response.try_recv().unwrap();
            }
            is_current &= !chunk.outdated;
        }
        is_current
    }

    /// A gateway fails: it is inactive and disconnected in all other gateways' views.
    pub fn kill(&mut self, number: GatewayIndex) {
        self.members[number] = MemberState { active: false, connected: false, may_open: true };
        self.update_active();
        for other in (0..self.gateways.len()).filter(|other| *other != number) {
            self.publish_view(other);
        }
    }

    /// Standby sessions of a gateway.
    pub fn standby_sessions(&self, number: GatewayIndex) -> u64 {
        self.gateways[number].workers.iter().map(|worker| u64::from(worker.tables().sessions.standby_count())).sum()
    }

    /// Packets dropped at all gateways, by reason.
    pub fn drops(&self) -> HashMap<DropReason, u64> {
        let mut all = HashMap::new();
        for gateway in &self.gateways {
            gateway.drops().into_iter().for_each(|(reason, count)| *all.entry(reason).or_default() += count);
        }
        all
    }
}
