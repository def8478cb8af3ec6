//! How often the worlds reach what they are for.

macro_rules! classes {
    ($($class:ident: $name:literal,)*) => {
        /// Something that worlds have to reach.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Class { $($class,)* }

        const NAMES: &[&str] = &[$($name,)*];

        /// All classes.
        pub(super) const ALL: &[Class] = &[$(Class::$class,)*];
    };
}

classes! {
    Opened: "session opened",
    Closed: "session ended",
    FailedOver: "standby session activated",
    Demoted: "session of a lost shard demoted",
    PolicyApplied: "policy applied",
    PolicyReverted: "policy applied again",
    GatewayAdded: "gateway added",
    GatewayRemoved: "gateway removed",
    ReleaseAwaited: "release by policy awaited",
    ReleaseReceived: "shard opened after its release by policy",
    ReleaseTimedOut: "release by policy timed out",
    TwoOwners: "two owners after the release by policy has timed out",
    OpenedByView: "shard opened after a view",
    Activated: "gateway activated",
    Drained: "gateway drained",
    DrainRefused: "drain refused",
    Unable: "gateway deactivated for its fault",
    TimedOut: "gateway timed out",
    Replaced: "process replaced",
    LeftView: "removed gateway has left",
    ForcedOut: "removed gateway has left before it had handed over",
    Crashed: "process crashed",
    Restarted: "process restarted",
    LostWithProcess: "session lost with its process",
    SurvivedCrash: "session survived a crash",
    ServerRestarted: "server restarted with its record",
    ServerRestored: "server restarted with the record of a backup",
    ServerRecovered: "server restarted without its record",
    RecordOutdated: "heartbeat refused because the record is outdated",
    RecordRenewed: "outdated record renewed",
    HeartbeatLost: "message to the server lost",
    NoticeLost: "message from the server lost",
    LinkBroken: "link broken",
    LinkStalled: "link stalled",
    LinkMessageLost: "message between gateways lost",
    Suspended: "process suspended",
    PeerLease: "lease extended by peers",
    PlaceTaken: "place of the predecessor taken without the server",
    Succeeded: "successor accepted by a peer",
    PredecessorLinked: "successor refused while its predecessor is linked",
    PromiseWithheld: "promise withheld from a successor",
    SuccessorLease: "lease of a successor extended by peers",
    SucceededTwice: "successor of a successor started",
    RelayedView: "view relayed",
    LeaseExpired: "lease expired at an owner",
    SyncCompleted: "full sync completed",
    SyncAborted: "full sync aborted",
    SyncRequested: "full sync requested",
    Purged: "standby session purged",
    Kept: "standby session kept by a purge",
    Outdated: "purge outdated",
    OtherPolicy: "purge by a peer with another policy",
    RecordOlder: "older record ignored",
    Stranded: "session stranded outside of the group",
    Converged: "world converged in the end",
    NoCandidate: "shard without an active gateway",
}

/// Counts by class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts([u64; NAMES.len()]);

impl Default for Counts {
    fn default() -> Self {
        Self([0; NAMES.len()])
    }
}

impl Counts {
    pub(super) fn add(&mut self, class: Class, count: u64) {
        self.0[class as usize] += count;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(to, count)| *to += count);
    }

    /// Asserts that each of these classes was reached this often.
    pub(super) fn assert_reached(&self, classes: &[Class], least: u64) {
        for (name, count) in NAMES.iter().zip(self.0) {
            println!("{count:>10} {name}");
        }
        let is_missed = |class: &&Class| self.0[**class as usize] < least;
        let missed: Vec<&str> = classes.iter().filter(is_missed).map(|class| NAMES[*class as usize]).collect();
        assert!(missed.is_empty(), "classes reached less than {least} times: {missed:?}");
    }
}
