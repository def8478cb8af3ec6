//! Membership views and heartbeats as values.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::secret::Commitment;

/// SHA-256 of a certificate.
pub type Fingerprint = [u8; 32];
/// X25519 public key.
pub type TunnelKey = [u8; 32];

/// Maximum number of members in a view.
pub const MAX_MEMBERS: usize = 1024;
/// Limit of view numbers, so that there is always a next one: with one change per nanosecond it lasts for a century.
pub const MAX_NUMBER: u64 = 1 << 62;

/// Membership view: the gateways of the policy, and which of them are active.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MembershipView {
    /// Increases with each change; 0: no view yet.
    pub number: u64,
    /// How often the set of active members has changed.
    pub serving_changes: u64,
    /// The gateways of the policy, sorted by name, without duplicates.
    pub members: Vec<Member>,
}

/// A gateway in a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: Arc<str>,
    /// Whether it is active.
    pub serving: bool,
    /// Whether its lease had expired when it was deactivated.
    pub lease_expired: bool,
    /// Increases each time it is deactivated.
    pub epoch: u64,
    /// Number of its process; 0: no heartbeat yet. Public.
    pub incarnation: u64,
    /// Commitment to the process's secret; `None`: no heartbeat yet.
    pub commitment: Option<Commitment>,
    /// Fingerprint of its certificate for connections between gateways.
    pub fingerprint: Option<Fingerprint>,
    /// Address where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Public key, from which its tunnel keys are derived.
    pub tunnel_key: Option<TunnelKey>,
    /// Address and UDP port where it ends VXLAN tunnels of nodes; `None`: it ends none.
    pub overlay: Option<SocketAddr>,
    /// Its fault; `None`: no fault is known.
    pub unable: Option<Arc<str>>,
}

/// The state that a gateway requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DesiredState {
    /// To become active; it doesn't have the state of active gateways yet.
    #[default]
    Joining,
    /// To become active; it has all state as of the view that it has applied.
    Ready,
    /// To become inactive.
    Draining,
}

/// Why the drain of an active gateway is blocked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainBlock {
    pub reason: DrainBlockReason,
    /// The gateways that could take over if they were active, or that the drain waits for; sorted.
    pub gateways: Vec<Arc<str>>,
}

impl fmt::Display for DrainBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gateways = self.gateways.join(", ");
        match self.reason {
            DrainBlockReason::NoBackup => write!(f, "no other active gateway could take over: {gateways}"),
            DrainBlockReason::BecomingActive => write!(f, "it waits for {gateways} to become active"),
            DrainBlockReason::MaxUnavailable(0) => {
                f.write_str("the policy server permits no drain (membership.max_unavailable is 0)")
            }
            DrainBlockReason::MaxUnavailable(max) => write!(
                f,
                "it waits for {gateways} to be active again: the policy server permits {max} unavailable (membership.\
                 max_unavailable)"
            ),
        }
    }
}

/// Reason for which a drain is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainBlockReason {
    /// It is refused: no other active gateway without a fault could take over some of its shards.
    NoBackup,
    /// It waits: the only gateways that could take over are about to become active.
    BecomingActive,
    /// It waits: this many gateways may be unavailable, and as many are.
    MaxUnavailable(u32),
}

impl DesiredState {
    /// Its display name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// Heartbeat of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Its name.
    pub gateway: Arc<str>,
    /// Number of its process.
    pub incarnation: u64,
    /// Commitment to the secret that proves the process's identity.
    pub commitment: Commitment,
    /// Commitment of the previous process, whose secret it knows.
    pub predecessor: Option<Box<Commitment>>,
    /// The state that it requests.
    pub desired_state: DesiredState,
    /// Number of the view that it has applied.
    pub seen_view: u64,
    /// Fingerprint of its certificate for connections between gateways.
    pub fingerprint: Option<Fingerprint>,
    /// Address where other gateways reach it.
    pub peer: Option<SocketAddr>,
    /// Public key, from which its tunnel keys are derived.
    pub tunnel_key: Option<TunnelKey>,
    /// Address and UDP port where it ends VXLAN tunnels of nodes; `None`: it ends none.
    pub overlay: Option<SocketAddr>,
    /// Its fault. It requests to drain then.
    pub unable: Option<Arc<str>>,
    /// Version of the policy that it has in force.
    pub policy_version: Option<Arc<str>>,
    /// Number of its active sessions.
    pub sessions: u64,
    /// The highest view number that it knows to be used.
    pub known_view: u64,
}

impl Heartbeat {
    /// A heartbeat with only these fields, of a process with an unknown secret.
    pub fn minimal(gateway: &str, incarnation: u64, desired_state: DesiredState, seen_view: u64) -> Self {
        let mut commitment = [0; 32];
        commitment.iter_mut().zip(incarnation.to_be_bytes()).for_each(|(to, byte)| *to = byte);
        Self {
            gateway: gateway.into(),
            incarnation,
            commitment,
            predecessor: None,
            desired_state,
            seen_view,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            overlay: None,
            unable: None,
            policy_version: None,
            sessions: 0,
            known_view: seen_view,
        }
    }
}

impl MembershipView {
    /// The member with this name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        let index = self.members.binary_search_by(|member| (*member.name).cmp(name)).ok()?;
        self.members.get(index)
    }

    pub fn active_members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.serving)
    }

    /// Whether another view has the same active members, without interruption between the two views.
    pub fn has_same_active_members(&self, other: &Self) -> bool {
        fn epoch(member: &Member) -> (&str, u64) {
            (&member.name, member.epoch)
        }
        self.active_members().map(epoch).eq(other.active_members().map(epoch))
    }
}

impl Member {
    /// A member without any heartbeat yet.
    pub fn new(name: Arc<str>, epoch: u64) -> Self {
        Self {
            name,
            serving: false,
            lease_expired: false,
            epoch,
            incarnation: 0,
            commitment: None,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            overlay: None,
            unable: None,
        }
    }
}
