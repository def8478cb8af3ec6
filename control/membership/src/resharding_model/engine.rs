//! The placement of a gateway's engine: real snapshots, of one VIP whose blocks belong to the shards in turn, and what
//! the model reads of them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vipgate_dataplane::flow::ids::{self, GatewayId};
use vipgate_dataplane::policy::Snapshot;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::members::{Members, MembersSpec};

use super::policies::{ModelPolicy, NAMES, Placement, SHARDS, index_of};
use super::specs;

/// The owner of a shard, as a gateway sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    This,
    Other(usize),
    Unowned,
}

/// A shard in a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shard {
    pub(super) owner: Owner,
    pub(super) may_open: bool,
    /// Whether it waits for releases, by view or by policy.
    pub(super) awaits_release: bool,
    successor: Option<usize>,
}

/// A snapshot, and the builder of the next one.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    source: Rc<RefCell<Source>>,
    pub(super) snapshot: Arc<Snapshot>,
    /// Whether any release by policy is awaited.
    pub(super) awaits_release: bool,
    /// Empty before the first policy.
    pub(super) shards: Vec<Shard>,
}

/// What snapshots are built from.
#[derive(Debug)]
struct Source {
    builder: Builder,
    placement: Option<Placement>,
    /// All updates so far. Builders share the use of ports with their copies, so an independent one is built anew.
    updates: Vec<Update>,
}

#[derive(Clone, Debug)]
enum Update {
    Policy(Arc<str>, Placement),
    Members(MembersSpec),
}

impl Source {
    fn new() -> Self {
        Self { builder: Builder::new(specs::network()), placement: None, updates: Vec::new() }
    }

    fn apply(&mut self, update: Update) -> Snapshot {
        let snapshot = match &update {
            Update::Policy(version, placement) => {
                let change = match self.placement.replace(*placement) {
                    None => specs::first_policy(version, *placement),
                    Some(last) if last.orders == placement.orders => {
                        PolicyChange { version: version.to_string(), ..PolicyChange::default() }
                    }
                    Some(_) => specs::next_policy(version, *placement),
                };
                self.builder.with_change(&change).expect("a valid policy")
            }
            Update::Members(spec) => self.builder.with_members(spec),
        };
        self.updates.push(update);
        snapshot
    }
}

impl Engine {
    pub(super) fn new() -> Self {
        let source = Source::new();
        let snapshot = source.builder.snapshot();
        Self::of(snapshot, Rc::new(RefCell::new(source)))
    }

    fn of(snapshot: Snapshot, source: Rc<RefCell<Source>>) -> Self {
        let policy = &snapshot.policy;
        let (awaits_release, members) = (policy.awaits_policy_release(), policy.members());
        let shard = |at: usize| {
            let shard = policy.vip(specs::VIP)?.shards.of_port(specs::first_port(at))?;
            Some(Shard {
                owner: match shard.owner {
                    ids::Owner::This => Owner::This,
                    ids::Owner::Other(id) => Owner::Other(index(members, id)),
                    ids::Owner::Unowned => Owner::Unowned,
                },
                may_open: shard.may_open,
                awaits_release: shard.awaits_release(),
                successor: shard.successor().map(|id| index(members, id)),
            })
        };
        let shards = (0..SHARDS).filter_map(shard).collect();
        Self { source, snapshot: Arc::new(snapshot), awaits_release, shards }
    }

    /// The same with a builder of its own.
    pub(super) fn detached(&self) -> Self {
        let mut source = Source::new();
        let mut last = source.builder.snapshot();
        for update in &self.source.borrow().updates {
            last = source.apply(update.clone());
        }
        Self::of(last, Rc::new(RefCell::new(source)))
    }

    fn update(&mut self, update: Update) {
        let snapshot = self.source.borrow_mut().apply(update);
        *self = Self::of(snapshot, self.source.clone());
    }

    pub(super) fn set_policy(&mut self, policy: &ModelPolicy) {
        self.update(Update::Policy(policy.version.clone(), policy.placement));
    }

    pub(super) fn set_members(&mut self, spec: &MembersSpec) {
        self.update(Update::Members(spec.clone()));
    }

    fn members(&self) -> &Members {
        self.snapshot.policy.members()
    }

    /// The engine's number of a peer.
    pub(super) fn id(&self, gateway: usize) -> GatewayId {
        self.members().id(NAMES[gateway]).expect("a peer is a member")
    }

    /// The gateway with a number of the engine.
    pub(super) fn gateway(&self, id: GatewayId) -> usize {
        index(self.members(), id)
    }

    pub(super) fn replication_epoch(&self) -> u64 {
        self.members().replication_epoch()
    }

    pub(super) fn is_active(&self, gateway: usize) -> bool {
        self.members().id(NAMES[gateway]).is_some_and(|id| self.members().is_active(id))
    }

    /// The other gateway that owns a shard, or would own it next.
    pub(super) fn successor(&self, shard: usize) -> Option<usize> {
        self.shards.get(shard)?.successor
    }

    /// Whether the gateway may open sessions in a shard, as long as it has a lease.
    pub(super) fn may_open(&self, shard: usize) -> bool {
        self.shards.get(shard).is_some_and(|shard| shard.may_open)
    }

    pub(super) fn owner(&self, shard: usize) -> Owner {
        self.shards.get(shard).map_or(Owner::Unowned, |shard| shard.owner)
    }
}

fn index(members: &Members, id: GatewayId) -> usize {
    index_of(members.name(id))
}
