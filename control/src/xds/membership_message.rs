//! Views and heartbeats as protobuf messages: conversion in both directions, and validation of what was received.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::proto;
use crate::membership::secret::{Commitment, Secret, incarnation_of};
use crate::membership::view::{MAX_MEMBERS, MAX_NUMBER};
use crate::membership::{DesiredState, DrainBlock, DrainBlockReason, Heartbeat, Member, MembershipView};

/// Maximum length of a gateway's name, bytes.
const MAX_NAME_BYTES: usize = 253;
/// Maximum length of a gateway's fault, bytes; a longer one is truncated.
const MAX_FAULT_BYTES: usize = 200;
/// Maximum length of the version of a policy, bytes.
const MAX_VERSION_BYTES: usize = 64;

/// Why a message isn't a valid view or heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMessage {
    /// Invalid name.
    #[error("`{0}` is not a valid gateway name: 1 to {MAX_NAME_BYTES} bytes without blanks")]
    Name(String),
    /// Incarnation 0.
    #[error("gateway {0}: incarnation 0 is invalid")]
    Incarnation(String),
    /// The incarnation doesn't match the secret, or that has another length or is missing.
    #[error("gateway {0}: the incarnation doesn't match the secret of 32 bytes")]
    Secret(String),
    /// Wrong length of a fingerprint.
    #[error("gateway {0}: a fingerprint has 32 bytes, not {1}")]
    Fingerprint(String, usize),
    /// Wrong length of a key.
    #[error("gateway {0}: a tunnel key has 32 bytes, not {1}")]
    TunnelKey(String, usize),
    /// Invalid address.
    #[error("gateway {0}: `{1}` port {2} is not a valid address")]
    Address(String, String, u32),
    /// Unknown desired state.
    #[error("gateway {0}: unknown desired state {1}")]
    DesiredState(String, i32),
    /// A number above its limit.
    #[error("view {0}: its number, an epoch or a count is too high")]
    Number(u64),
    #[error("view {0}: {1} members are more than {MAX_MEMBERS}")]
    TooManyMembers(u64, usize),
    #[error("view {0}: gateway {1} is in it twice")]
    DuplicateMember(u64, String),
}

/// Checks the number of a view that a gateway reports: the next view gets a higher one, so it must be far from the limit.
///
/// # Errors
/// When it is more than half of the limit.
pub fn check_number(view: &MembershipView) -> Result<(), InvalidMessage> {
    if view.number < MAX_NUMBER / 2 { Ok(()) } else { Err(InvalidMessage::Number(view.number)) }
}

impl TryFrom<proto::View> for MembershipView {
    type Error = InvalidMessage;

    fn try_from(message: proto::View) -> Result<Self, InvalidMessage> {
        let proto::View { number, members, serving_changes } = message;
        if members.len() > MAX_MEMBERS {
            return Err(InvalidMessage::TooManyMembers(number, members.len()));
        }
        let counts = members.iter().map(|member| member.epoch).chain([serving_changes]);
        if number >= MAX_NUMBER || counts.max() > Some(number) {
            return Err(InvalidMessage::Number(number));
        }
        let mut members = members.into_iter().map(Member::try_from).collect::<Result<Vec<_>, _>>()?;
        members.sort_by(|a, b| a.name.cmp(&b.name));
        let mut names = BTreeSet::new();
        match members.iter().find(|member| !names.insert(&member.name)) {
            Some(duplicate) => Err(InvalidMessage::DuplicateMember(number, duplicate.name.to_string())),
            None => Ok(Self { number, serving_changes, members }),
        }
    }
}

impl From<&MembershipView> for proto::View {
    fn from(view: &MembershipView) -> Self {
        Self {
            number: view.number,
            serving_changes: view.serving_changes,
            members: view.members.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<proto::Member> for Member {
    type Error = InvalidMessage;

    fn try_from(message: proto::Member) -> Result<Self, InvalidMessage> {
        let proto::Member { name, serving, epoch, incarnation, fingerprint, address, port, lease_expired, .. } =
            message;
        let (tunnel_key, unable, commitment) = (message.tunnel_key, message.unable, message.commitment);
        let (name, fingerprint) = (checked_name(name)?, checked_hash(fingerprint));
        let fingerprint = fingerprint.map_err(|bytes| InvalidMessage::Fingerprint(name.to_string(), bytes))?;
        let tunnel_key =
            checked_hash(tunnel_key).map_err(|bytes| InvalidMessage::TunnelKey(name.to_string(), bytes))?;
        let peer = checked_endpoint(&name, &address, port)?;
        let overlay = checked_endpoint(&name, &message.overlay_address, message.overlay_port)?;
        let commitment = checked_commitment(&name, incarnation, &commitment)?;
        Ok(Self {
            name,
            serving,
            lease_expired,
            epoch,
            incarnation,
            commitment,
            fingerprint,
            peer,
            tunnel_key,
            overlay,
            unable: checked_fault(&unable),
        })
    }
}

impl From<&Member> for proto::Member {
    fn from(member: &Member) -> Self {
        let (address, port) = endpoint_fields(member.peer);
        let (overlay_address, overlay_port) = endpoint_fields(member.overlay);
        Self {
            name: member.name.to_string(),
            serving: member.serving,
            lease_expired: member.lease_expired,
            epoch: member.epoch,
            incarnation: member.incarnation,
            fingerprint: member.fingerprint.map(Vec::from).unwrap_or_default(),
            address,
            port,
            tunnel_key: member.tunnel_key.map(Vec::from).unwrap_or_default(),
            unable: member.unable.as_deref().unwrap_or_default().to_owned(),
            commitment: member.commitment.map(Vec::from).unwrap_or_default(),
            overlay_address,
            overlay_port,
        }
    }
}

impl From<&DrainBlock> for proto::DrainBlock {
    fn from(block: &DrainBlock) -> Self {
        use proto::drain_block::Reason;
        let (reason, max_unavailable) = match block.reason {
            DrainBlockReason::NoBackup => (Reason::NoBackup, 0),
            DrainBlockReason::BecomingActive => (Reason::BecomingActive, 0),
            DrainBlockReason::MaxUnavailable(max) => (Reason::MaxUnavailable, max),
        };
        let gateways = block.gateways.iter().map(ToString::to_string).collect();
        Self { reason: reason.into(), gateways, max_unavailable }
    }
}

impl proto::DrainBlock {
    /// As a value; `None` for a reason that this version doesn't know.
    pub(crate) fn into_value(self) -> Option<DrainBlock> {
        use proto::drain_block::Reason;
        let reason = match self.reason() {
            Reason::Unspecified => return None,
            Reason::NoBackup => DrainBlockReason::NoBackup,
            Reason::BecomingActive => DrainBlockReason::BecomingActive,
            Reason::MaxUnavailable => DrainBlockReason::MaxUnavailable(self.max_unavailable),
        };
        let gateways = self.gateways.into_iter().take(MAX_MEMBERS).map(Arc::from).collect();
        Some(DrainBlock { reason, gateways })
    }
}

impl From<DesiredState> for proto::heartbeat::DesiredState {
    fn from(state: DesiredState) -> Self {
        match state {
            DesiredState::Joining => Self::Joining,
            DesiredState::Ready => Self::Ready,
            DesiredState::Draining => Self::Draining,
        }
    }
}

impl From<proto::heartbeat::DesiredState> for DesiredState {
    fn from(state: proto::heartbeat::DesiredState) -> Self {
        match state {
            proto::heartbeat::DesiredState::Joining => Self::Joining,
            proto::heartbeat::DesiredState::Ready => Self::Ready,
            proto::heartbeat::DesiredState::Draining => Self::Draining,
        }
    }
}

/// The commitment is computed from the secret.
impl TryFrom<proto::Heartbeat> for Heartbeat {
    type Error = InvalidMessage;

    fn try_from(message: proto::Heartbeat) -> Result<Self, InvalidMessage> {
        let proto::Heartbeat { gateway, incarnation, desired_state, seen_view, fingerprint, tunnel_key, .. } = message;
        let secret = Secret::from_slice(&message.secret).ok_or_else(|| InvalidMessage::Secret(gateway.clone()))?;
        let (gateway, unable) = (checked_name(gateway)?, checked_fault(&message.unable));
        if incarnation == 0 {
            return Err(InvalidMessage::Incarnation(gateway.to_string()));
        }
        let commitment = checked_commitment(&gateway, incarnation, &secret.commitment())?
            .ok_or_else(|| InvalidMessage::Secret(gateway.to_string()))?;
        let desired_state = proto::heartbeat::DesiredState::try_from(desired_state)
            .map_err(|_| InvalidMessage::DesiredState(gateway.to_string(), desired_state))?
            .into();
        let fingerprint =
            checked_hash(fingerprint).map_err(|bytes| InvalidMessage::Fingerprint(gateway.to_string(), bytes))?;
        let tunnel_key = checked_hash(tunnel_key)
            .and_then(|key| key.ok_or(0).map(Some))
            .map_err(|bytes| InvalidMessage::TunnelKey(gateway.to_string(), bytes))?;
        let peer = checked_endpoint(&gateway, &message.peer_address, message.peer_port)?;
        let overlay = checked_endpoint(&gateway, &message.overlay_address, message.overlay_port)?;
        if message.known_view >= MAX_NUMBER / 2 {
            return Err(InvalidMessage::Number(message.known_view));
        }
        Ok(Self {
            gateway,
            incarnation,
            commitment,
            predecessor: Secret::from_slice(&message.predecessor).map(|secret| Box::new(secret.commitment())),
            desired_state,
            seen_view,
            fingerprint,
            peer,
            tunnel_key,
            overlay,
            unable,
            policy_version: checked_version(message.policy_version),
            sessions: message.sessions,
            known_view: message.known_view,
        })
    }
}

impl proto::Heartbeat {
    /// As a message with this sequence number, without secrets.
    pub fn of(heartbeat: &Heartbeat, sequence: u64) -> Self {
        let (peer_address, peer_port) = endpoint_fields(heartbeat.peer);
        let (overlay_address, overlay_port) = endpoint_fields(heartbeat.overlay);
        Self {
            gateway: heartbeat.gateway.to_string(),
            incarnation: heartbeat.incarnation,
            sequence,
            desired_state: proto::heartbeat::DesiredState::from(heartbeat.desired_state).into(),
            seen_view: heartbeat.seen_view,
            fingerprint: heartbeat.fingerprint.map(Vec::from).unwrap_or_default(),
            peer_address,
            peer_port,
            unable: heartbeat.unable.as_deref().unwrap_or_default().to_owned(),
            policy_version: heartbeat.policy_version.as_deref().unwrap_or_default().to_owned(),
            sessions: heartbeat.sessions,
            known_view: heartbeat.known_view,
            tunnel_key: heartbeat.tunnel_key.map(Vec::from).unwrap_or_default(),
            overlay_address,
            overlay_port,
            ..Self::default()
        }
    }
}

fn checked_name(name: String) -> Result<Arc<str>, InvalidMessage> {
    let is_name = (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ' ');
    if is_name { Ok(name.into()) } else { Err(InvalidMessage::Name(name)) }
}

/// A fault as one line of limited length; `None` if it is empty.
fn checked_fault(text: &str) -> Option<Arc<str>> {
    let end = text.floor_char_boundary(MAX_FAULT_BYTES);
    let line: String = text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (!line.is_empty()).then(|| line.into())
}

/// A version of a policy; `None` if it is empty, or no version that a server sends.
fn checked_version(version: String) -> Option<Arc<str>> {
    let is_version = (1..=MAX_VERSION_BYTES).contains(&version.len()) && !version.contains(char::is_control);
    is_version.then(|| version.into())
}

/// A commitment that matches the incarnation; `None` if it is empty.
fn checked_commitment(name: &str, incarnation: u64, bytes: &[u8]) -> Result<Option<Commitment>, InvalidMessage> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let commitment = Commitment::try_from(bytes).ok().filter(|it| incarnation_of(it) == incarnation);
    commitment.map(Some).ok_or_else(|| InvalidMessage::Secret(name.to_owned()))
}

/// 32 bytes; `None` if it is empty. The error is another length.
fn checked_hash(bytes: Vec<u8>) -> Result<Option<[u8; 32]>, usize> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.try_into().map(Some).map_err(|bytes: Vec<u8>| bytes.len())
}

/// An endpoint; `None` if its address is empty.
fn checked_endpoint(name: &str, address: &str, port: u32) -> Result<Option<SocketAddr>, InvalidMessage> {
    if address.is_empty() {
        return Ok(None);
    }
    let invalid = || InvalidMessage::Address(name.to_owned(), address.to_owned(), port);
    let ip: IpAddr = address.parse().map_err(|_| invalid())?;
    let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(invalid)?;
    Ok(Some((ip, port).into()))
}

fn endpoint_fields(endpoint: Option<SocketAddr>) -> (String, u32) {
    endpoint.map_or_else(Default::default, |endpoint| (endpoint.ip().to_string(), endpoint.port().into()))
}
