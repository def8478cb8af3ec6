//! Whose a VIP is: its shares, the blocks of each, and which gateway has it now.
//!
//! A share is dealt to its home; while that doesn't serve, the first of its backups that does stands in for it. So who owns what
//! follows from the deal and from who serves, and every gateway comes to the same. With a VIP that one gateway has whole there is
//! one share, with all blocks; with one that all announce, one for each of them.

use std::sync::Arc;

use super::members::{GatewayId, Members};
use super::spec::ShareSpec;
use crate::ports::allocator::Part;
use crate::ports::{BLOCKS, BlockId, BlockSet, Stripe};

/// Whose something is, as seen from this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This gateway's.
    This,
    /// Another one's.
    Other(GatewayId),
    /// Nobody's: of those who could have it none serves.
    Nobody,
}

/// The shares of one VIP.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// The number of the share that each block is in; `None`: the first one has all.
    of_block: Option<Arc<[u8; BLOCKS]>>,
    /// None: all is this gateway's.
    list: Box<[Share]>,
}

/// A block that is in no share.
const NO_SHARE: u8 = u8::MAX;

/// What one gateway was dealt of a VIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its home first, then the backups.
    order: Box<[GatewayId]>,
    /// Its blocks; `None`: all.
    blocks: Option<Arc<BlockSet>>,
    /// Who has it.
    pub owner: Owner,
    /// Whether this gateway may open sessions in it.
    pub may_open: bool,
    /// From which of its ports this gateway gives out: others than whoever had it before.
    pub stripe: Stripe,
    /// The one other gateway that is to have all of its sessions: its owner; while it is ours, the only standby gateway.
    replica: Option<GatewayId>,
    /// The replication epoch since which that one is it; 1 for all sessions that there ever were.
    since: u64,
}

impl Share {
    /// Whom it was dealt to.
    pub fn home(&self) -> Option<GatewayId> {
        self.order.first().copied()
    }

    /// Its blocks; `None`: all.
    pub fn blocks(&self) -> Option<&BlockSet> {
        self.blocks.as_deref()
    }

    /// Whether it is this gateway's, and its former owner has not released it yet: sessions of it may still be on their way.
    pub fn is_coming(&self) -> bool {
        self.owner == Owner::This && !self.may_open
    }

    /// Its ports, for whoever gives them out.
    #[inline]
    pub fn part(&self) -> Part<'_> {
        Part { blocks: self.blocks().unwrap_or(&BlockSet::ALL), stripe: self.stripe }
    }

    /// Who has it, by what is known of the gateways now.
    fn settle(&mut self, members: &Members) {
        let Some(this) = members.this() else {
            (self.owner, self.may_open, self.stripe) = (Owner::This, true, Stripe::ALL);
            return;
        };
        let had_it = self.owner == Owner::This && self.stripe != Stripe::ALL;
        let owner = self.order.iter().copied().find(|&id| members.is_serving(id));
        self.owner = match owner {
            Some(id) if id == this => Owner::This,
            Some(id) => Owner::Other(id),
            None => Owner::Nobody,
        };
        let is_ours = self.owner == Owner::This;
        if is_ours && !had_it {
            self.stripe = Stripe::after(members.serving_changes());
        }
        self.may_open = is_ours && self.home().is_some_and(|home| members.may_open(home));
        let replica = self.replica(members);
        if replica != self.replica {
            (self.replica, self.since) = (replica, members.replication_epoch() + 1);
        }
    }

    /// The gateway that is to have all sessions. Links don't matter, since they change between views: what another standby gateway was told
    /// because the link to this one was down, that other one tells it when it is the owner.
    fn replica(&self, members: &Members) -> Option<GatewayId> {
        match self.owner {
            Owner::Other(owner) => Some(owner),
            Owner::This => {
                let next = self.order.iter().copied().find(|&id| Some(id) != members.this());
                // One before it that doesn't serve is told, too: what was told only that one, this one doesn't know.
                next.filter(|&id| members.is_serving(id))
            }
            Owner::Nobody => None,
        }
    }

    /// Whether its owner may lack sessions of it that others know. `told_by`: the replication epoch of our last round that it has all of, 0
    /// where it lacks something. What
    /// was told others before the owner was to know everything, it may not know; what was told nobody says so itself
    /// ([`Entry::has_news`]).
    ///
    /// [`Entry::has_news`]: crate::session::entry::Entry::has_news
    pub fn is_untold(&self, told_by: u64) -> bool {
        told_by < self.since
    }

    /// Who is told of its sessions, where this gateway has it and is linked to them: the next one that serves, and whoever comes before
    /// that one and would have the share if it served.
    pub fn heirs<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        self.line(members).filter(|&id| members.is_linked(id))
    }

    /// Whether a gateway is told of its sessions once it is linked. What is told to begin with doesn't wait for the workers to hear of
    /// the link: what they left out would be forgotten there.
    pub fn is_heir(&self, id: GatewayId, members: &Members) -> bool {
        self.line(members).any(|heir| heir == id)
    }

    fn line<'a>(&'a self, members: &'a Members) -> impl Iterator<Item = GatewayId> + 'a {
        let mut is_over = false;
        let others = self.order.iter().copied().filter(|&id| self.owner == Owner::This && Some(id) != members.this());
        others.take_while(move |&id| {
            let is_next = members.is_serving(id) && members.is_linked(id);
            !std::mem::replace(&mut is_over, is_next)
        })
    }
}

impl Shares {
    /// The shares that a description names, in place of those `before`; the gateways have numbers already.
    pub(super) fn new(specs: &[ShareSpec], before: &Self, members: &Members) -> Self {
        let list = specs.iter().map(|spec| {
            let order = std::iter::once(&spec.gateway).chain(&spec.backups).filter_map(|name| members.id(name));
            let mut share = Share {
                order: order.collect(),
                blocks: spec.blocks.clone(),
                owner: Owner::Nobody,
                may_open: false,
                stripe: Stripe::ALL,
                replica: None,
                since: 1,
            };
            let Some(known) = share.home().and_then(|home| before.of_home(home)) else {
                share.settle(members);
                if before.list.is_empty() {
                    // It has no sessions yet, so nobody lacks any but those who lack something in any case.
                    share.since = 1;
                }
                return share;
            };
            if share.blocks == known.blocks {
                // Its sessions go on, whoever its backups are now.
                (share.replica, share.since) = (known.replica, known.since);
                (share.owner, share.stripe) = (known.owner, known.stripe);
            }
            share.settle(members);
            share
        });
        let list: Box<[Share]> = list.collect();
        let is_whole = matches!(&*list, [] | [Share { blocks: None, .. }]);
        let of_block = (!is_whole).then(|| {
            let mut of_block = [NO_SHARE; BLOCKS];
            for (share, number) in list.iter().zip(0..NO_SHARE) {
                let blocks = share.blocks.as_deref().into_iter().flat_map(|blocks| blocks.iter());
                blocks.for_each(|block| of_block[usize::from(block.0)] = number);
            }
            Arc::new(of_block)
        });
        Self { of_block, list }
    }

    /// The same shares, where what is known of the gateways has changed who has them; `None` if it hasn't.
    pub(super) fn settled(&self, members: &Members) -> Option<Self> {
        let mut after = self.clone();
        after.list.iter_mut().for_each(|share| share.settle(members));
        (after.list != self.list).then_some(after)
    }

    /// Whether another gateway than before is to have the sessions of one of them, as of the epoch that begins.
    pub(super) fn begin_epoch(&self, members: &Members) -> bool {
        self.list.iter().any(|share| share.since > members.replication_epoch())
    }

    /// Whether the gateways that had something have it still, all of it.
    pub(super) fn has_same_owners(&self, other: &Self) -> bool {
        let owners = |shares: &Self| shares.list.iter().map(|share| share.owner).collect::<Vec<_>>();
        self.of_block == other.of_block && owners(self) == owners(other)
    }

    /// All of them; none: everything is this gateway's.
    pub fn list(&self) -> &[Share] {
        &self.list
    }

    /// The blocks that this gateway has; all if there are no shares.
    pub fn own_blocks(&self) -> BlockSet {
        if self.list.is_empty() {
            return BlockSet::ALL;
        }
        let own = self.list.iter().filter(|share| share.owner == Owner::This);
        own.fold(BlockSet::default(), |all, share| all.union(share.blocks().unwrap_or(&BlockSet::ALL)))
    }

    /// Whether it is cut in parts, which different gateways have.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.of_block.is_some()
    }

    /// The share that a port is in; `None` if there are no shares, or it is in none.
    #[inline]
    pub fn of_port(&self, port: u16) -> Option<&Share> {
        match &self.of_block {
            None => self.list.first(),
            Some(of_block) => self.list.get(usize::from(of_block[usize::from(BlockId::of(port).0)])),
        }
    }

    /// Whose a port is.
    #[inline]
    pub fn owner_of_port(&self, port: u16) -> Owner {
        match self.of_port(port) {
            Some(share) => share.owner,
            None if self.list.is_empty() => Owner::This,
            None => Owner::Nobody,
        }
    }

    /// The share of what was dealt to a gateway.
    pub fn of_home(&self, home: GatewayId) -> Option<&Share> {
        self.list.iter().find(|share| share.home() == Some(home))
    }

    /// The share that this gateway opens sessions in for endpoints without a home: its own, else the first one that it stands in for.
    pub fn own(&self, this: Option<GatewayId>) -> Option<&Share> {
        let dealt = this.and_then(|this| self.of_home(this)).filter(|share| share.owner == Owner::This);
        dealt.or_else(|| self.list.iter().find(|share| share.owner == Owner::This))
    }

    /// Which of those who have a part gathers a fragmented datagram, by its hash.
    pub fn gatherer(&self, hash: u64) -> Owner {
        let place = ((hash >> 32) * self.list.len() as u64) >> 32;
        self.list.get(place as usize).map_or(Owner::This, |share| share.owner)
    }

    /// Whether this gateway alone may speak for the whole VIP: it is its own, and whoever had it before has let go. With one that is cut in
    /// parts, any gateway that has one may.
    pub fn may_answer(&self) -> bool {
        match &*self.list {
            [only] => only.owner == Owner::This && only.may_open,
            _ => self.owner() == Owner::This,
        }
    }

    /// Whose the whole VIP is: of one that is cut in parts, this gateway's if it has any.
    pub fn owner(&self) -> Owner {
        match &*self.list {
            [] => Owner::This,
            [only] => only.owner,
            several if several.iter().any(|share| share.owner == Owner::This) => Owner::This,
            several => {
                several.iter().map(|share| share.owner).find(|owner| *owner != Owner::Nobody).unwrap_or(Owner::Nobody)
            }
        }
    }
}
