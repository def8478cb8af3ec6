//! Mirror of the engine's placement: owners and replicas of the shards of one VIP, by policy and membership. Building
//! real snapshots takes ten times as long as everything else in a world, so `Shard`, `Members` and what `Rebuild` does
//! for them are written down here once more; `engine_check` compares both over random changes.

use vipgate_dataplane::policy::members::{MemberSpec, MembersSpec, PolicyRelease};

use super::policies::{MAX_GATEWAYS, ModelPolicy, Order, SHARDS, index_of, number_of};

/// The owner of a shard, as a gateway sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    This,
    Other(usize),
    Unowned,
}

/// See `vipgate_dataplane::policy::shard::Shard`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shard {
    pub(super) order: Order,
    pub(super) owner: Owner,
    pub(super) may_open: bool,
    /// The number of changes of active members that its stripe is for; `None`: all ports.
    pub(super) stripe: Option<u64>,
    pub(super) former_owner: Option<usize>,
    pub(super) replica: Option<usize>,
    replica_since: u64,
    active_others: [Option<usize>; 2],
    active_others_since: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Member {
    is_active: bool,
    is_connected: bool,
    may_open: bool,
    /// The policy that it has released; `None`: not awaited.
    release: Option<u32>,
}

/// The placement in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Engine {
    this: Option<usize>,
    /// The number of the policy in force.
    pub(super) policy: u32,
    members: [Member; MAX_GATEWAYS],
    pub(super) active_since: u64,
    active_changes: u64,
    replica_changes: u64,
    pub(super) awaits_release: bool,
    /// Empty before the first policy.
    pub(super) shards: Vec<Shard>,
}

impl Engine {
    pub(super) fn new() -> Self {
        Self {
            this: None,
            policy: 0,
            members: [Member::default(); MAX_GATEWAYS],
            active_since: 0,
            active_changes: 0,
            replica_changes: 0,
            awaits_release: false,
            shards: Vec::new(),
        }
    }

    pub(super) fn replication_epoch(&self) -> u64 {
        self.replica_changes + 1
    }

    pub(super) fn is_active(&self, gateway: usize) -> bool {
        self.members[gateway].is_active
    }

    pub(super) fn is_connected(&self, gateway: usize) -> bool {
        self.members[gateway].is_connected
    }

    /// See `Rebuild::apply`: the VIP is replaced only if its shards are other ones.
    pub(super) fn set_policy(&mut self, policy: &ModelPolicy) {
        if self.policy != policy.number {
            self.members.iter_mut().filter_map(|it| it.release.as_mut()).for_each(|release| *release = 0);
        }
        self.policy = policy.number;
        let orders = policy.placement.orders;
        if self.shards.len() != SHARDS || !self.shards.iter().map(|it| it.order).eq(orders) {
            self.replace_shards(orders);
        }
        if self.awaits_release {
            self.update_owners();
        }
        self.begin_epoch_if_due();
    }

    fn replace_shards(&mut self, orders: [Order; SHARDS]) {
        let former = std::mem::take(&mut self.shards);
        self.shards = (0..SHARDS)
            .map(|at| match former.get(at) {
                Some(former) => Shard::replacing(orders[at], former, self),
                None => Shard::new(orders[at], self),
            })
            .collect();
        self.awaits_release |= self.shards.iter().any(|it| it.former_owner.is_some());
    }

    /// See `Rebuild::set_members`.
    pub(super) fn set_members(&mut self, spec: &MembersSpec) {
        (self.active_since, self.active_changes) = (spec.active_since, spec.active_changes);
        self.members = [Member::default(); MAX_GATEWAYS];
        for MemberSpec { name, active, connected, may_open, policy_release, .. } in &spec.gateways {
            let release = match policy_release {
                PolicyRelease::NotAwaited => None,
                PolicyRelease::Version(version) => Some(number_of(version)),
            };
            self.members[index_of(name)] =
                Member { is_active: *active, is_connected: *connected, may_open: *may_open, release };
        }
        self.this = spec.this.as_ref().map(|name| index_of(name));
        self.update_owners();
        self.begin_epoch_if_due();
    }

    /// See `Rebuild::update_owners`.
    fn update_owners(&mut self) {
        self.awaits_release &= self.awaits_policy_release();
        let before = std::mem::take(&mut self.shards);
        let mut shards = before.clone();
        for shard in &mut shards {
            shard.assign_owner(self);
        }
        if shards != before {
            self.awaits_release |= shards.iter().any(|it| it.former_owner.is_some());
        }
        self.shards = shards;
    }

    fn begin_epoch_if_due(&mut self) {
        let epoch = self.replication_epoch();
        if self.shards.iter().any(|shard| shard.replica_since.max(shard.active_others_since) > epoch) {
            self.replica_changes += 1;
        }
    }

    /// See `Members::awaits_policy_release`.
    pub(super) fn awaits_policy_release(&self) -> bool {
        let awaits = |member: &Member| {
            member.release.is_some_and(|it| !member.may_open || (member.is_active && it != self.policy))
        };
        (0..MAX_GATEWAYS).filter(|it| Some(*it) != self.this).any(|it| awaits(&self.members[it]))
    }

    /// See `Shard::replica_may_lack_sessions`.
    pub(super) fn replica_may_lack_sessions(&self, shard: usize, synced_epoch: u64) -> bool {
        synced_epoch < self.shards[shard].replica_since
    }

    /// See `Shard::replica_targets`: as a bit set.
    pub(super) fn replica_targets(&self, shard: usize) -> u8 {
        let shard = &self.shards[shard];
        let (mut left, mut targets) = (usize::from(shard.owner == Owner::This), 0);
        for other in shard.others(self) {
            if left == 0 {
                break;
            }
            targets |= 1 << other;
            left -= usize::from(self.is_active(other) && self.is_connected(other));
        }
        targets
    }

    /// See `Shard::successor`.
    pub(super) fn successor(&self, shard: usize) -> Option<usize> {
        match self.shards[shard].owner {
            Owner::Other(owner) => Some(owner),
            Owner::This => self.shards[shard].active_others[0],
            Owner::Unowned => None,
        }
    }

    /// Whether the gateway may open sessions in a shard, as long as it has a lease.
    pub(super) fn may_open(&self, shard: usize) -> bool {
        self.shards.get(shard).is_some_and(|shard| shard.may_open)
    }

    pub(super) fn owner(&self, shard: usize) -> Owner {
        self.shards.get(shard).map_or(Owner::Unowned, |shard| shard.owner)
    }
}

impl Shard {
    fn new(order: Order, engine: &Engine) -> Self {
        let mut shard = Self {
            order,
            owner: Owner::Unowned,
            may_open: false,
            stripe: None,
            former_owner: None,
            replica: None,
            replica_since: 1,
            active_others: [None; 2],
            active_others_since: 1,
        };
        shard.assign_owner(engine);
        shard.former_owner = None;
        shard.await_release(engine);
        (shard.replica_since, shard.active_others_since) = (1, 1);
        shard
    }

    fn replacing(order: Order, former: &Self, engine: &Engine) -> Self {
        let mut shard = Self { order, ..former.clone() };
        shard.assign_owner(engine);
        if former.owner == Owner::This && shard.owner != Owner::This {
            shard.active_others_since = engine.replication_epoch() + 1;
        }
        if former.owner == Owner::This && !former.may_open && shard.owner == Owner::This {
            shard.former_owner = former.former_owner.or(former.order.iter().next());
            shard.await_release(engine);
        }
        shard
    }

    fn assign_owner(&mut self, engine: &Engine) {
        let Some(this) = engine.this else {
            (self.owner, self.may_open, self.stripe) = (Owner::This, true, None);
            return;
        };
        let (was_owner, before) = (self.owner == Owner::This && self.stripe.is_some(), self.owner);
        self.owner = match self.order.iter().find(|it| engine.is_active(*it)) {
            Some(owner) if owner == this => Owner::This,
            Some(owner) => Owner::Other(owner),
            None => Owner::Unowned,
        };
        if self.owner == Owner::This && !self.may_open {
            self.stripe = Some(engine.active_changes);
        }
        if self.owner == Owner::This && !was_owner {
            self.stripe = Some(engine.active_changes);
            self.former_owner = match before {
                Owner::Other(former) => Some(former),
                Owner::This | Owner::Unowned => self.order.iter().next(),
            };
        }
        self.await_release(engine);
        let replica = match self.owner {
            Owner::Other(owner) => Some(owner),
            Owner::This => self.others(engine).next().filter(|it| engine.is_active(*it)),
            Owner::Unowned => None,
        };
        let next_epoch = engine.replication_epoch() + 1;
        if replica != self.replica || (self.owner == Owner::This && !was_owner) {
            (self.replica, self.replica_since) = (replica, next_epoch);
        }
        let active_others = {
            let mut others = self.others(engine).filter(|it| engine.is_active(*it));
            [others.next(), others.next()]
        };
        if active_others != self.active_others {
            (self.active_others, self.active_others_since) = (active_others, next_epoch);
        }
    }

    fn await_release(&mut self, engine: &Engine) {
        let is_ours = self.owner == Owner::This;
        self.former_owner = self.former_owner.filter(|_| is_ours && engine.awaits_policy_release());
        let may_open = self.order.iter().next().is_some_and(|home| engine.members[home].may_open);
        self.may_open = is_ours && may_open && self.former_owner.is_none();
    }

    fn others(&self, engine: &Engine) -> impl Iterator<Item = usize> + use<> {
        let this = engine.this;
        self.order.iter().filter(move |it| Some(*it) != this)
    }
}
