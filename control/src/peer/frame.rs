//! Framing of the link protocol: a four-byte big-endian length, then a protobuf message. Input is untrusted: the length
//! is checked before memory is allocated.

use std::sync::Arc;

use prost::Message;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::proto::frame::Kind;
use super::proto::{Farewell, Frame};
use crate::membership::replication::ProtocolViolation;
use crate::membership::succession::ClaimRefusal;

/// Maximum length of a message in bytes.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 20;

/// Why a link has ended or couldn't be established.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LinkError {
    /// The connection failed or couldn't be established.
    #[error("{0}")]
    Connection(String),
    /// Heartbeats are missing.
    #[error("no frame received for {0} ms")]
    HeartbeatTimeout(u128),
    /// The send queue is full: the peer doesn't read.
    #[error("the send queue is full: the peer reads nothing")]
    SendQueueFull,
    /// A frame exceeds the maximum length.
    #[error("received a frame of {0} bytes, the maximum is {MAX_FRAME_BYTES}")]
    FrameTooLong(usize),
    /// A frame can't be decoded.
    #[error("received an invalid frame: {0}")]
    InvalidFrame(String),
    /// A frame is valid but not allowed here.
    #[error("protocol violation: {0}")]
    ProtocolViolation(&'static str),
    /// There is no protocol version that both support.
    #[error(
        "no common protocol version: the peer supports {} to {}, this gateway {} to {}; update the older one",
        .theirs.0, .theirs.1, .ours.0, .ours.1
    )]
    UnsupportedVersion {
        /// The peer's lowest and highest version.
        theirs: (u32, u32),
        /// This gateway's lowest and highest version.
        ours: (u32, u32),
    },
    /// The name in its Hello doesn't match its certificate.
    #[error("the peer claims the name {claimed}, but its certificate is pinned for {pinned}")]
    NameMismatch {
        /// The name in the Hello.
        claimed: String,
        /// The gateway that the certificate is pinned for.
        pinned: Arc<str>,
    },
    /// The peer's process isn't the one in the view, nor does it succeed the one that counts.
    #[error("the incarnation doesn't match the membership view: another process has this name")]
    IncarnationMismatch,
    /// The peer's process takes the place of another one, to which there is a link.
    #[error("its predecessor is still linked: it runs, or its end isn't known here yet")]
    PredecessorLinked,
    /// The view doesn't contain the certificate, or no longer.
    #[error("the certificate doesn't match the membership view")]
    UntrustedCertificate,
    /// The view contains no peer with the source address of the connection.
    #[error("no peer in the membership view has this source address")]
    UnknownAddress,
    /// A newer link of the same process has replaced this one.
    #[error("superseded by a newer connection")]
    Superseded,
    /// The peer has closed the link with a reason.
    #[error("closed by the peer: {0}")]
    ClosedByPeer(String),
    /// A worker of this gateway doesn't accept session records.
    #[error("worker {0} of this gateway doesn't reply: it is stuck, or the gateway is stopping")]
    WorkerUnavailable(usize),
    /// The gateway is stopping.
    #[error("the gateway is stopping")]
    ShuttingDown,
}

impl LinkError {
    /// Whether the peer was rejected, as opposed to being unreachable.
    pub fn is_rejection(&self) -> bool {
        match self {
            Self::FrameTooLong(_)
            | Self::InvalidFrame(_)
            | Self::ProtocolViolation(_)
            | Self::UnsupportedVersion { .. }
            | Self::NameMismatch { .. }
            | Self::IncarnationMismatch
            | Self::UnknownAddress
            | Self::UntrustedCertificate => true,
            Self::PredecessorLinked
            | Self::Connection(_)
            | Self::HeartbeatTimeout(_)
            | Self::SendQueueFull
            | Self::Superseded
            | Self::ClosedByPeer(_)
            | Self::WorkerUnavailable(_)
            | Self::ShuttingDown => false,
        }
    }
}

impl From<ProtocolViolation> for LinkError {
    fn from(ProtocolViolation(what): ProtocolViolation) -> Self {
        Self::ProtocolViolation(what)
    }
}

impl From<ClaimRefusal> for LinkError {
    fn from(refusal: ClaimRefusal) -> Self {
        match refusal {
            ClaimRefusal::OtherProcess => Self::IncarnationMismatch,
            ClaimRefusal::PredecessorLinked => Self::PredecessorLinked,
        }
    }
}

impl From<std::io::Error> for LinkError {
    fn from(error: std::io::Error) -> Self {
        let text = error.to_string();
        if text.contains("ApplicationVerificationFailure") {
            return Self::UntrustedCertificate;
        }
        let hint = if text.contains("AccessDenied") || text.contains("CertificateUnknown") {
            ": the peer rejects this gateway's certificate: its membership view is older or a different one"
        } else if text.contains("InvalidContentType") || text.contains("corrupt message") {
            ": the remote end doesn't speak TLS"
        } else {
            ""
        };
        Self::Connection(format!("{text}{hint}"))
    }
}

/// Encodes a frame with its length.
pub(crate) fn encode(kind: Kind) -> Vec<u8> {
    let frame = Frame { kind: Some(kind) };
    let length = frame.encoded_len();
    let mut bytes = Vec::with_capacity(4 + length);
    bytes.extend_from_slice(&(length as u32).to_be_bytes());
    frame.encode_raw(&mut bytes);
    bytes
}

/// Encodes the Farewell frame, the last one of a link.
pub(super) fn encode_farewell(reason: &LinkError) -> Vec<u8> {
    encode(Kind::Farewell(Farewell { reason: reason.to_string() }))
}

/// Reads the next frame; `None` for a frame of an unknown kind. Not cancel-safe.
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
) -> Result<Option<Kind>, LinkError> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(LinkError::FrameTooLong(length));
    }
    buffer.resize(length, 0);
    stream.read_exact(buffer).await?;
    let frame = Frame::decode(buffer.as_slice()).map_err(|error| LinkError::InvalidFrame(error.to_string()))?;
    Ok(frame.kind)
}
